"""Runs the notebooks of the site.

`python tests/notebook_helpers.py` stores their outputs.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from eqxshard.planning._backends import wheels_folder

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
_WHEELS = "/home/you/.cache/eqxshard/plan"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def execute(path: Path, folder: str) -> Any:
    """A notebook, run in a folder from top to bottom in a kernel of its own."""
    notebook = read(path)
    where = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)  # When it ran.
        outputs = [tidy(x) for x in cell.outputs if x.get("name") != "stderr"]
        cell.outputs = join_streams(outputs)
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def varies(cell: Any) -> bool:
    """True if a cell's output may differ on another machine, or another version of JAX."""
    return "varies" in cell.metadata.get("tags", [])


def tidy(output: Any) -> Any:
    """An output as readers see it, without the speed of the machine."""
    data = output.get("data", {})
    if "text/html" in data:
        data.pop("text/plain", None)  # Nobody sees it, and it may have addresses.
        html = re.sub(r"  [\d,.]+ examples/s", "", data["text/html"])
        # Plans say where to install a compiler on this machine.
        data["text/html"] = html.replace(str(wheels_folder()), _WHEELS)
    return output


def join_streams(outputs: list[Any]) -> list[Any]:
    """Join the text of outputs that follow each other.

    A kernel sends a printed line in two pieces if its timer rings in between.
    """
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main() -> None:
    """Store the outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, folder)
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
        print(path, path.stat().st_size, file=sys.stderr)


if __name__ == "__main__":
    main()
