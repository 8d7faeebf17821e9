"""The notebooks of the site run, and show what is stored in them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


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
