"""Executes the notebooks of this folder and writes them anew, with their outputs: `make notebooks`.

Each runs in a folder of its own that looks like this one, so nothing is left here but the notebooks, and no path of this machine is in them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def execute(notebook: Path, folder: Path) -> Any:
    """The notebook with its outputs; raises what a cell raised."""
    import nbformat
    from nbclient import NotebookClient

    place = folder / "examples/notebooks"
    place.mkdir(parents=True)
    (folder / "docs").symlink_to(ROOT / "docs")
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    for cell in content.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
    content.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return content


def main() -> None:
    import nbformat

    for notebook in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        with tempfile.TemporaryDirectory(prefix="lockstep-notebook-") as folder:
            nbformat.write(execute(notebook, Path(folder)), notebook)
        print(f"{notebook.name}: {notebook.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
