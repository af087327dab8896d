"""Reports as Markdown and LaTeX with their pictures beside them; a real LaTeX compiles them, whatever the runs are called."""

from __future__ import annotations

import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli.report import command
from lockstep.report import paper
from lockstep.report.document import report
from lockstep.report.latex import HEAD, MOST_ROWS, escaped, table_text
from lockstep.report.subject import of_names, of_runs
from lockstep.report.views import Cell, Report, Table
from test_report import ALONE, BOTH, RECIPE, Folders, isolated, study_folder

HOSTILE = (
    r"\immediate\openout3=owned.txt\end{document} [5cm] * $x_1^2$ & # % ~ {} -- ''q'' `` <b> ^^M | é 日本 × – −1 µs"
)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    return isolated(tmp_path, monkeypatch)


def hostile(folders: Folders) -> Report:
    study_folder(folders, {HOSTILE: (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 2)
    return report([*of_names(["mine"], folders.root), of_runs([folders.run("one", environment={"note": HOSTILE})])])


def test_markdown_has_its_pictures_beside_it(folders: Folders, tmp_path: Path) -> None:
    folders.run("one")
    for words, place, beside in (
        (["-o", str(tmp_path / "my report.md")], tmp_path / "my report.md", "my-report-files"),
        (["--format", "md", "-o", f"{tmp_path}/out/"], tmp_path / "out/report.md", "report-files"),
    ):
        done = CliRunner().invoke(command, ["one", "--runs", str(folders.root), *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        links = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)$", place.read_text(), re.MULTILINE)
        assert len(links) >= 3
        assert all(link.startswith(f"{beside}/") for link in links)
        assert all((place.parent / link).read_text().startswith("<svg") for link in links)


def test_no_text_is_a_command_of_tex() -> None:
    written = escaped(HOSTILE)
    assert r"\textbackslash{}immediate\textbackslash{}openout3=owned.txt\textbackslash{}end\{document\}" in written
    assert r"{[}5cm{]} {*} \$x\_1\textasciicircum{}2\$ \& \# \% \textasciitilde{} \{\} -{}-" in written
    assert r"\texttt{{[}U+65E5{]}}" in written, "what no Latin font has is named, not lost"
    assert "\n" not in escaped("two\n\nlines")


def test_a_long_table_goes_over_pages() -> None:
    rows = [[Cell(f"row {number}"), Cell("1.00", notes=["0.9–1.1"])] for number in range(MOST_ROWS + 1)]
    assert r"\begin{longtable}{lr}" in table_text(Table("a", "A", "b", ["x", "y"], rows, right=[1]), "a")
    assert r"\begin{tabular}{lr}" in table_text(Table("a", "A", "b", ["x", "y"], rows[:-1], right=[1]), "a")


def compiled(file: Path) -> str:
    """What LaTeX says of a document; a PDF is beside it."""
    latex = shutil.which("pdflatex")
    argv = [latex, "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error"] if latex else ["tectonic"]
    if not shutil.which(argv[0]):
        pytest.skip("no LaTeX here: apt-get install texlive-latex-recommended lmodern, or tectonic")
    done = subprocess.run(
        [*argv, file.name], cwd=file.parent, capture_output=True, text=True, errors="replace", timeout=180
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert file.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    return done.stdout


@pytest.mark.slow
def test_a_real_latex_compiles_it(folders: Folders, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    beside = paper.write(hostile(folders), out / "report.tex", "tex")
    figures, tables = list(out.glob("report-files/*.pdf")), list(out.glob("report-files/*.tex"))
    assert len(figures) >= 6
    assert len(tables) >= 6
    assert beside == len(figures) + len(tables)
    said = compiled(out / "report.tex")
    assert "Undefined" not in said
    assert "Missing character" not in said
    assert not (out / "owned.txt").exists()
    # A paper of one's own takes a table alone; here one of every sign, and of many pages.
    rows = [[Cell(f"{sign}{sign} {HOSTILE}", notes=[f"[{sign}"]), Cell("1.00")] for sign in string.printable]
    (out / "own.tex").write_text(table_text(Table("a", HOSTILE, HOSTILE, [HOSTILE, "y"], rows, right=[1]), "a"))
    (out / "paper.tex").write_text(
        rf"{HEAD}\begin{{document}}\input{{report-files/1-cells}}\input{{own}}\end{{document}}"
    )
    compiled(out / "paper.tex")
