import re
import subprocess

import pytest
from etils import epath

from eqxshard.checkpoint._arrays import DamageError
from eqxshard.checkpoint._manifest import verify, write_checksums


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


def cut_last_line(file):
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda f: (f / "a.txt").write_text("x"), "a.txt has changed since it was written"),
        (lambda f: (f / "below" / "b.txt").unlink(), "below/b.txt is missing"),
        (lambda f: (f / "checksums.txt").unlink(), "checksums.txt is missing"),
        (lambda f: (f / "checksums.txt").write_text("x"), "checksums.txt is not a list of"),
        (lambda f: (f / "checksums.txt").write_text(""), "checksums.txt is not a list of"),
        (lambda f: cut_last_line(f / "checksums.txt"), "checksums.txt is not a list of"),
    ],
)
def test_damage_is_named(folder, damage, says):
    damage(folder)
    with pytest.raises(DamageError, match=re.escape(says)):
        verify(folder)


def test_files_that_were_added_do_not_count(folder):
    # Users, the Finder of macOS, editors and network file systems leave such files.
    (folder / "notes.txt").write_text("x")
    (folder / ".DS_Store").write_text("x")
    (folder / "below" / "._b.txt").write_text("x")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "a.txt").write_text("x")
    verify(folder)
