"""What other packages offer by entry points: a real package, built and installed from the page that describes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import models, offered, resolve
from lockstep.errors import InputError
from lockstep.offered import Offer
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from support import Cli
from test_packaging import call

PAGE = Path(__file__).parents[1] / "docs/extending.md"
SMALL = ("data=embedded", "train_limit=640", "test_limit=100", "epochs=1", "threads=1", "backend=gloo")
BROKEN = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "broken-extras"
version = "0.1"
[project.entry-points."lockstep.models"]
unfinished = "broken_extras:net"
[project.entry-points."lockstep.analyzers"]
silent = "broken_extras:answer"
[tool.setuptools]
py-modules = ["broken_extras"]
"""


def offering(monkeypatch: pytest.MonkeyPatch, *found: Offer) -> None:
    monkeypatch.setattr(offered, "offers", lambda kind: tuple(offer for offer in found if offer.kind == kind))


def test_a_name_becomes_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(
        monkeypatch,
        Offer("model", "wide", "extras:wide", "extras 1.0"),
        Offer("strategy", "mine", "extras:Mine", "extras 1.0"),
        Offer("launcher", "gentle", "extras:gentle", "extras 1.0"),
        Offer("model", "mnist-convnet", "extras:other", "extras 1.0"),
    )
    chosen = Placement(ranks=2, strategy="mine", launcher="gentle", backend="gloo", device="cpu")
    recipe, placement, why = resolve.resolve(Recipe(model="wide"), chosen)
    assert (recipe.model, placement.strategy, placement.launcher) == ("extras:wide", "extras:Mine", "extras:gentle")
    assert why["model"] == "'wide', offered by the package extras 1.0"
    again = resolve.resolve(recipe, placement)
    assert (again.recipe, again.placement) == (recipe, placement)
    assert resolve.resolve(Recipe(), Placement()).recipe.model == "mnist-convnet", "our own names win"


def test_names_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(
        monkeypatch,
        Offer("model", "wide", "a:wide", "a 1.0"),
        Offer("model", "wide", "b:wide", "b 2.0"),
        Offer("model", "odd", "just_a_module", "c 3.0"),
    )
    with pytest.raises(InputError, match=r"model=wide is offered by a 1.0 and b 2.0: write model=a:wide"):
        models.check_name("wide")
    with pytest.raises(InputError, match=r"package c 3.0: 'just_a_module' is not of the form"):
        models.check_name("odd")
    with pytest.raises(InputError, match="model=wode: no such model; did you mean 'wide'"):
        models.check_name("wode")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(400)
def test_a_real_package(cli: Cli, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code, exchange = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    mark = tmp_path / "imported"
    code += f"\nopen({str(mark)!r}, 'a').close()\n"
    for name, toml, text in (("lockstep_extras", project, code), ("broken_extras", BROKEN, "import nothing_like_it\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(toml)
        (tmp_path / name / f"{name}.py").write_text(text)
        (tmp_path / name / f"{name}_exchange.py").write_text(exchange)
        call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, tmp_path / name, cwd=tmp_path)
    cli.environment["PYTHONPATH"] = str(site)

    # Nobody asked for it.
    cli.run(*SMALL)
    assert cli("runs").returncode == 0
    assert not mark.exists()

    run = cli.run(*SMALL, "model=wide", "model_args.width=32", "strategy=rank-by-rank", "launcher=gentle", "ranks=2")
    assert mark.exists()
    assert run["recipe"]["model"] == "lockstep_extras:wide"
    assert run["placement"]["strategy"] == "lockstep_extras_exchange:RankByRank"
    assert run["why"]["launcher"] == "'gentle', offered by the package lockstep-extras 1.0"
    assert all("nice" in command for command in run["command"])
    usual = cli.run(*SMALL, "model=lockstep_extras:wide", "model_args.width=32", "strategy=flat", "ranks=2")
    assert run["weights_sha256"] == usual["weights_sha256"], "it computes what flat computes"

    (finding,) = json.loads(cli("explain", "last", "-q", "tails", "--json").stdout)["findings"]
    assert finding["question"] == "tails"
    assert finding["figures"]["slowest_ms"] >= finding["figures"]["median_ms"] > 0
    everything = cli("explain", "last")
    assert everything.returncode == 0, everything.stderr
    assert "the analyzer 'silent' failed" in everything.stdout
    assert cli("explain", "last", "-q", "nonsense").returncode == 2

    message = cli.error("run", *SMALL, "model=unfinished", code=2)
    assert "No module named 'nothing_like_it'" in message
    listed = cli("models")
    assert re.search(r"wide +50,890", listed.stdout), listed.stdout
    assert "'unfinished', offered by the package broken-extras 0.1: model 'broken_extras:net'" in listed.stderr
    found = json.loads(cli("doctor", "--json").stdout)
    said = {(each["state"], each["what"]) for each in found if each["area"] == "packages"}
    assert ("ok", "analyzer tails, of the package lockstep-extras 1.0") in said
    assert ("ok", "strategy rank-by-rank, of the package lockstep-extras 1.0") in said
    assert {state for state, what in said if "broken-extras" in what} == {"problem"}


def test_names_are_read_without_importing(tmp_path: Path) -> None:
    """By the metadata alone: what is offered need not even be there."""
    info = tmp_path / "ghost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lockstep.models]\nghost = nowhere:net\n")
    code = "from lockstep.offered import offers; print(offers('model'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert "Offer(kind='model', name='ghost', spec='nowhere:net', package='ghost 1.0')" in done.stdout, done.stderr
