"""The notebooks of the site run, and show what is stored in them."""

import importlib.util
import json
from pathlib import Path

import pytest

from eqxshard.planning._backends import wheels_folder

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.slow
# The libraries that run notebooks warn.
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


def test_what_is_stored_has_no_path_of_this_machine():
    helpers = pytest.importorskip("notebook_helpers")
    html = f"<pre>pip install --target {wheels_folder()}</pre>"
    tidied = helpers.tidy({"data": {"text/html": html}})["data"]["text/html"]
    assert tidied == "<pre>pip install --target /home/you/.cache/eqxshard/plan</pre>"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_installs_what_is_missing(name, tmp_path, monkeypatch):
    """From the checkout that it is in or, elsewhere, from the index."""
    cell = json.loads((FOLDER / name).read_text())["cells"][1]["source"]
    code = "".join(cell).partition("\n\nimport equinox")[0]
    code = code.replace("%pip install -q {source}", "installed.append(source)")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    installed: list[str] = []
    for folder in (FOLDER, tmp_path):
        monkeypatch.chdir(folder)
        exec(code, {"installed": installed})
    assert installed == ["../..", "eqxshard"]
    assert (FOLDER / "../../pyproject.toml").exists()
