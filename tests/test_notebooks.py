"""The notebooks of the site run, and show what is stored in them."""

import json
import re
from pathlib import Path

import pytest
from page_parser import parse

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def code_cells(name):
    notebook = json.loads((FOLDER / name).read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
# Of the libraries that run notebooks.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_what_is_stored_in_it(name, tmp_path):
    helpers = pytest.importorskip("notebook_helpers")
    stored = helpers.read(FOLDER / name)
    ran = helpers.execute(FOLDER / name, str(tmp_path))
    for old, new in zip(helpers.code_cells(stored), helpers.code_cells(ran), strict=True):
        if not helpers.varies(old):
            remedy = "run python tests/notebook_helpers.py"
            assert new.outputs == old.outputs, f"{remedy}: {old.source}"
        assert bool(new.outputs) == bool(old.outputs), old.source


def test_the_stored_outputs_are_whole():
    """A bar that is full, tables and pictures; no error, no path, nothing large."""
    assert NAMES == ["sharding_by_pictures.ipynb", "start_here.ipynb"]
    shown = ""
    for name in NAMES:
        text = (FOLDER / name).read_text()
        assert len(text) < 100_000
        assert not re.search(r"/tmp/|/home/|/root/|0x[0-9a-f]{6}", text)
        for cell in code_cells(name):
            for output in cell["outputs"]:
                assert output["output_type"] != "error"
                html = "".join(output.get("data", {}).get("text/html", ""))
                page = parse(html)
                assert not page.find_all("script")
                for bar in page.find_all("progress"):
                    assert bar.attributes["value"] == bar.attributes["max"]
                shown += html
    for words in ("<progress ", "NVIDIA H200", "optimizer state"):
        assert words in shown
    assert "bytes/device" in shown and "<svg" in shown
