import subprocess
from pathlib import Path

import pytest
from etils import epath
from hostile_files import FORBIDDEN, forbid

from eqxshard.checkpoint._checksums import is_complete, verify, write_checksums


@pytest.fixture
def folder(tmp_path):
    """A complete folder of two files."""
    (tmp_path / "below").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "below" / "b.txt").write_text("b")
    write_checksums(epath.Path(tmp_path))
    return epath.Path(tmp_path)


def test_sha256sum_can_verify_it(folder):
    command = ["sha256sum", "--check", "--quiet", "checksums.txt"]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 0


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda f: (f / "a.txt").write_text("x"), "a.txt has changed since it was written"),
        (lambda f: (f / "below" / "b.txt").unlink(), "below/b.txt is missing"),
        (lambda f: (f / "c.txt").write_text("c"), "c.txt is not in checksums.txt"),
        (lambda f: (f / "checksums.txt").unlink(), "checksums.txt cannot be read"),
        (lambda f: (f / "checksums.txt").write_text("x"), "checksums.txt cannot be read"),
    ],
)
def test_damage_is_named(folder, damage, says):
    damage(folder)
    assert verify(folder) == says


@pytest.mark.parametrize("kind", FORBIDDEN)
@pytest.mark.parametrize("name", ["below/b.txt", "checksums.txt", "below/more"])
def test_what_is_no_file_is_not_opened(folder, kind, name):
    path = Path(folder) / name
    path.unlink(missing_ok=True)
    forbid(path, kind)
    assert verify(folder) == f"{path} is not a regular file"


def test_hidden_files_that_were_added_do_not_count(folder):
    # As the Finder of macOS, editors and network file systems leave them.
    (folder / ".DS_Store").write_text("x")
    (folder / "below" / "._b.txt").write_text("x")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "a.txt").write_text("x")
    assert verify(folder) is None


def test_a_folder_that_cannot_be_read_is_not_called_incomplete(tmp_path):
    (tmp_path / "file").touch()
    assert not is_complete(epath.Path(tmp_path / "file"))
    assert not is_complete(epath.Path(tmp_path / "nothing"))
    # An error of the file system.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="loop"):
        is_complete(epath.Path(tmp_path / "loop"))
