"""The folder of checkpoints: what counts, what is damaged, what is removed."""

import errno
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from checkpoint_helpers import copied, like, new_state
from helpers import (
    assert_equal,
    make_loader,
)
from hostile_files import FORBIDDEN, HostilePickle, forbid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eqxshard
from eqxshard.checkpoint import _arrays, _manifest
from eqxshard.checkpoint._manifest import write_checksums
from eqxshard.sharding import _files


def test_other_folders_are_not_touched(tmp_path, train_step):
    (tmp_path / "2024" / "thesis").mkdir(parents=True)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    says = f"{tmp_path} has '2024', which eqxshard did not write; give the run a"
    with pytest.raises(ValueError, match=re.escape(says)):
        eqxshard.fit(
            new_state(), train_step, make_loader(), steps=2, checkpointer=checkpointer
        )
    checkpointer.save(new_state())
    with pytest.raises(OSError, match="which eqxshard did not write"):
        checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["2024"]


def later(state, step):
    return eqx.tree_at(lambda s: s.step, state, jnp.int32(step))


def tree(folder):
    """The texts of all files below a folder, and the targets of links."""
    found = {}
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(top, name)
            if os.path.islink(path):
                found[path] = os.readlink(path)
            elif name in files:
                with open(path, "rb") as file:
                    found[path] = file.read()
    return found


def test_only_our_files_are_removed(tmp_path, checkpoints):
    """The user's files stay, also in old, damaged and unfinished checkpoints."""
    folder, archive = tmp_path / "disk" / "run", tmp_path / "archive"
    # The folder of a run may be a link to another disk.
    folder.mkdir(parents=True)
    root = tmp_path / "run"
    root.symlink_to(folder)
    first = eqxshard.Checkpointer(root, max_to_keep=9)
    for step in (1, 2, 3, 4, 5):
        first.save(later(new_state(), step))
        first.wait()
    # Numbered folders of the user's, of which one has a list of checksums, too.
    for name in ("2023", "2024"):
        (folder / name / "state").mkdir(parents=True)
        (folder / name / "state" / "thesis.csv").write_text("1")
        (folder / name / "description.json").write_text("mine")
    (folder / "2024" / "checksums.txt").write_text("mine")
    # A copy under another number; an archive behind a link; and a link within.
    shutil.copytree(folder / "1", folder / "77")
    archive.mkdir()
    (folder / "2").rename(archive / "2")
    (folder / "2").symlink_to(archive / "2")
    (folder / "3" / "state").rename(archive / "state")
    (folder / "3" / "state").symlink_to(archive / "state")
    # Notes beside arrays, in a checkpoint that is kept, an old one, and one that was cut.
    for step in ("3", "4", "5"):
        (folder / step / "notes.txt").write_text(f"of {step}")
    (folder / "5" / "state" / "d" / "notes.txt").write_text("of 5")
    (folder / "4" / "checksums.txt").unlink()
    outside = (folder / "2023", folder / "2024", folder / "77", archive)
    before = [tree(path) for path in outside]

    found = eqxshard.Checkpointer(root, max_to_keep=2)
    assert int(found.restore(like(), step=5).step) == 5
    assert int(found.restore(like(), step=2).step) == 2
    for step in (6, 7, 8):
        found.save(later(new_state(), step))
        found.wait()
    assert [tree(path) for path in outside] == before
    assert os.readlink(folder / "2") == str(archive / "2")
    assert os.readlink(folder / "3" / "state") == str(archive / "state")
    assert not (folder / "1").exists() and not (folder / "6").exists()
    assert found.steps() == [2, 7, 8, 77, 2024]
    for step in ("3", "4", "5"):
        left = sorted(path.name for path in (folder / step).iterdir())
        assert left == ["notes.txt", *["state"] * (step != "4")]
        assert (folder / step / "notes.txt").read_text() == f"of {step}"
    left = [path for path in (folder / "5" / "state").rglob("*") if path.is_file()]
    assert left == [folder / "5" / "state" / "d" / "notes.txt"]
    # The copy, and a folder with such a name, are not taken for good checkpoints.
    assert int(eqxshard.Checkpointer(root).restore(like()).step) == 8


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link", "file", "notes"])
def test_a_checkpoint_is_not_written_over_what_is_not_ours(tmp_path, kind):
    folder, other = tmp_path / "run [v2]", tmp_path / "other"
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(new_state())
    checkpointer.wait()
    other.mkdir()
    (other / "thesis").write_text("1")
    if kind == "folder":
        shutil.copytree(other, folder / "1")
    elif kind == "file":
        (folder / "1").write_text("1")
    elif kind == "notes":
        checkpointer.save(later(new_state(), 1))
        checkpointer.wait()
        (folder / "1" / "checksums.txt").unlink()
        (folder / "1" / "state").rename(other / "state")
        (folder / "1" / "state").symlink_to(other / "state")
    else:
        (folder / "1").symlink_to(other if kind == "link" else tmp_path / "gone")
    (folder / "lock").touch()
    before = tree(other), tree(folder).keys()
    checkpointer.save(later(new_state(), 1))
    where = re.escape(str(folder))
    says = (
        rf"^the checkpoint of step 1 could not be written to {where}: {where}/1 is not a "
    )
    says += (
        r"checkpoint of this run; move it away, or give the run a folder of its own; the"
    )
    with pytest.raises(OSError, match=says):
        checkpointer.wait()
    # The rest of the unfinished checkpoint is removed.
    left = {folder / "1" / "state", *(folder / "lock",)} if kind == "notes" else set()
    assert tree(other) == before[0]
    assert {*map(str, left)} <= tree(folder).keys() <= before[1]
    assert tree(folder).keys() == before[1] or kind == "notes"
    assert checkpointer.steps() == [0]


def test_notes_in_a_checkpoint_that_is_replaced_stay(checkpoints, tmp_path, train_step):
    folder = copied(checkpoints, tmp_path)
    (folder / "10" / "notes.txt").write_text("good")
    (folder / "10" / "description.json").write_text("{")
    checkpointer = eqxshard.Checkpointer(folder)
    state = checkpointer.restore(like())
    assert int(state.step) == 8
    eqxshard.fit(state, train_step, make_loader(), steps=10, checkpointer=checkpointer)
    assert int(eqxshard.Checkpointer(folder).restore(like()).step) == 10
    assert (folder / "10" / "notes.txt").read_text() == "good"


NAMES = """
import os, sys
import eqxshard

for make in (eqxshard.Checkpointer, eqxshard.run.RunFolder):
    for name in (sys.argv[1], "runs/" + chr(252)):
        try:
            make(name)
            print("made")
        except ValueError as error:
            print(str(error).replace(os.getcwd(), ""))
"""


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["ascii", "utf-8"])
def test_names_that_the_locale_cannot_write_are_refused_at_the_start(tmp_path, locale):
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    env["PYTHONUTF8"] = "0" if locale == "ascii" else "1"
    # In UTF-8, these bytes are no name.
    name = b"runs/\xc3\xbc" if locale == "ascii" else b"runs/\xfc"
    command = [sys.executable, "-c", NAMES, name]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    says = rf"the folder of .*, '/runs/.*', has characters .* names are in {locale}; s"
    expected = [True, locale == "ascii"] * 2
    lines = done.stdout.splitlines()
    assert [bool(re.match(says, line)) for line in lines] == expected, done.stdout
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_before_the_run(tmp_path, train_step):
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        says = f"checkpoints cannot be written to {tmp_path / folder}: "
        with pytest.raises(ValueError, match=says):
            eqxshard.fit(
                new_state(),
                train_step,
                make_loader(),
                steps=2,
                checkpointer=eqxshard.Checkpointer(tmp_path / folder),
            )
    with pytest.raises(ValueError, match=r"cannot be written to 'nowhere://x'; use a loc"):
        eqxshard.Checkpointer("nowhere://x")


def test_unfinished_checkpoints_do_not_count_and_are_removed(checkpoints, tmp_path):
    folder = copied(checkpoints, tmp_path)
    for step in ("8", "10"):
        (folder / step / "checksums.txt").unlink()
    (folder / "notes").mkdir()
    checkpointer = eqxshard.Checkpointer(folder)
    assert checkpointer.steps() == [4]
    state = checkpointer.restore(like())
    checkpointer.save(eqx.tree_at(lambda s: s.step, state, state.step + 1))
    checkpointer.wait()
    assert sorted(os.listdir(folder)) == ["4", "5", "eqxshard.txt", "notes"]


# Damage


def files_of(folder):
    """The files of a checkpoint, by their paths in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder) for path in paths]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_is_found_and_the_one_before_is_used(checkpoints, tmp_path_factory, data):
    folder = copied(checkpoints, tmp_path_factory.mktemp("damaged"))
    newest = folder / "10"
    file = newest / data.draw(st.sampled_from(files_of(newest)), label="file")
    content = bytearray(file.read_bytes())
    kinds = ["delete", *(["flip", "cut"] if content else ["grow"])]
    kind = data.draw(st.sampled_from(kinds), label="kind")
    if kind == "delete":
        file.unlink()
    else:
        where = data.draw(st.integers(0, max(len(content) - 1, 0)), label="where")
        if kind == "flip":
            content[where] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        content = content[:where] if kind == "cut" else content + b"x" * (kind == "grow")
        file.write_bytes(content)
    checkpointer = eqxshard.Checkpointer(folder)
    restored = checkpointer.restore(like())
    step = int(restored.step)
    if (newest / "checksums.txt").exists():
        # The cut may be the end of the last line.
        assert step == 8 or same_lines(checkpoints[0] / "10", newest)
    else:
        assert step == 8 and checkpointer.steps() == [4, 8]


def same_lines(one, other):
    """True if all files are the same, except for the ends of lines."""
    return all(
        (one / file).read_text("latin-1").strip()
        == (other / file).read_text("latin-1").strip()
        for file in files_of(one)
    )


def test_a_damaged_checkpoint_is_reported_and_replaced(
    checkpoints, tmp_path, train_step, caplog
):
    folder = copied(checkpoints, tmp_path)
    (folder / "10" / "description.json").write_text("{")
    checkpointer = eqxshard.Checkpointer(folder)
    with caplog.at_level(logging.WARNING):
        state = checkpointer.restore(like())
    assert (
        "step 10 in" in caplog.text
        and "description.json has changed since it was written" in caplog.text
    )
    with pytest.raises(ValueError, match=r"no good .* 10 in .* \(step 10: description"):
        checkpointer.restore(like(), step=10)
    eqxshard.fit(state, train_step, make_loader(), steps=10, checkpointer=checkpointer)
    assert_equal(eqxshard.Checkpointer(folder).restore(like(), step=10), checkpoints[1])


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_a_checkpoint_with_what_is_no_file_is_damaged(checkpoints, tmp_path, kind, caplog):
    """Nothing of it is opened. The folder of all checkpoints may be a link."""
    folder = copied(checkpoints, tmp_path)
    os.symlink(folder, tmp_path / "link")
    forbid(folder / "10" / "odd", kind)
    checkpointer = eqxshard.Checkpointer(tmp_path / "link")
    says = r"\(step 10: .*/10/odd is not a regular file\); use one of: step 4"
    with pytest.raises(ValueError, match=says):
        checkpointer.restore(like(), step=10)
    assert int(eqxshard.Checkpointer(tmp_path / "link").restore(like()).step) == 8
    assert "step 10" in caplog.text


@pytest.mark.parametrize("times", [3, 10**6])
def test_a_read_that_fails_is_tried_again_and_is_not_damage(
    checkpoints, tmp_path, monkeypatch, times
):
    """A network file system may fail for a while."""
    folder, fails = copied(checkpoints, tmp_path), itertools.count()

    def read(file):
        if next(fails) < times:
            raise OSError(errno.EIO, "Input/output error")
        return digest(file)

    digest = _manifest._digest
    monkeypatch.setattr(_manifest, "_digest", read)
    monkeypatch.setattr(_files, "_WAITS", (0, 0, 0))
    checkpointer = eqxshard.Checkpointer(folder)
    if times > 3:
        with pytest.raises(OSError, match=r"cannot be read \(Input/output error"):
            checkpointer.restore(like())
        times = 0
    assert int(checkpointer.restore(like()).step) == 10


@pytest.mark.parametrize("times", [3, 10**6])
def test_a_folder_that_cannot_be_listed_is_not_empty(
    checkpoints, tmp_path, monkeypatch, times
):
    folder, fails, listing = checkpoints[0], itertools.count(), os.listdir

    def listdir(path):
        if next(fails) < times:
            raise OSError(errno.EIO, "Input/output error")
        return listing(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(_files, "_WAITS", (0, 0, 0))
    checkpointer = eqxshard.Checkpointer(folder)
    if times > 3:
        with pytest.raises(OSError, match=r"cannot be listed \(Input/output error\)"):
            checkpointer.steps()
    else:
        assert checkpointer.steps() == [4, 8, 10]


@pytest.mark.parametrize("how", ["folder", "nothing", "other"])
def test_a_complete_folder_without_a_checkpoint_is_damaged(checkpoints, tmp_path, how):
    folder = copied(checkpoints, tmp_path)
    shutil.rmtree(folder / "10")
    (folder / "10").mkdir()
    if how == "folder":
        (folder / "10" / "checksums.txt").mkdir()
    if how == "nothing":
        (folder / "10" / "checksums.txt").touch()
    if how == "other":
        (folder / "10" / "description.json").write_text("[]")
        write_checksums(folder / "10")
    checkpointer = eqxshard.Checkpointer(folder)
    with pytest.raises(ValueError, match=r"no good .* \(step 10: .*; use one of"):
        checkpointer.restore(like(), step=10)
    # Once it was found damaged, it does not count.
    state = checkpointer.restore(like(), step=8)
    checkpointer.claim_run(8, make_loader())
    assert_equal(eqxshard.Checkpointer(folder).restore(like()), state)


@pytest.mark.parametrize(
    "name, says",
    [
        ("description.json", r"\(step 10: description.json was not written by"),
        ("state/manifest.ocdbt", r"\(step 10: .* in .*/10 cannot be read: .*; use another"),
    ],
)
def test_pickles_are_not_read(checkpoints, tmp_path, name, says):
    folder = copied(checkpoints, tmp_path)
    for step in (4, 8):
        shutil.rmtree(folder / str(step))
    hostile = HostilePickle(tmp_path)
    (folder / "10" / name).write_bytes(hostile.content)
    checkpointer = eqxshard.Checkpointer(folder)
    write_checksums(checkpointer.directory / "10")
    with pytest.raises(ValueError, match=says):
        checkpointer.restore(like())
    assert not hostile.has_run()


@pytest.mark.parametrize("change", [lambda data: b"another", lambda data: data[:-20]])
def test_arrays_that_cannot_be_decoded_are_damage_though_the_digests_are_right(
    checkpoints, tmp_path, caplog, change
):
    folder = copied(checkpoints, tmp_path)
    manifest = folder / "10" / "state" / "manifest.ocdbt"
    manifest.write_bytes(change(manifest.read_bytes()))
    checkpointer = eqxshard.Checkpointer(folder)
    write_checksums(checkpointer.directory / "10")
    with caplog.at_level(logging.WARNING):
        assert int(checkpointer.restore(like()).step) == 8
    (said,) = caplog.messages
    assert re.match(
        r"the checkpoint of step 10 in .* is damaged \(step in .*/10 cann", said
    )
    assert "manifest" in said and said.endswith("; using the one before it.")
    with pytest.raises(
        ValueError, match=r"no good .* 10 in .*; use one of: step 4, step 8"
    ):
        checkpointer.restore(like(), step=10)
    # As it is damaged, it is written again.
    assert checkpointer.description(8)["step"] == 8
    checkpointer.claim_run(8, make_loader())


# Damage that is only seen when arrays are read


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with checkpoints of steps 0 and 1, whose file of chunks is not hashed."""
    folder = tmp_path_factory.mktemp("large")
    checkpointer = eqxshard.Checkpointer(folder)
    for step in (0, 1):
        checkpointer.save(large_state(step))
        checkpointer.wait()
    return folder


def large_state(step=0):
    model = {"x": jnp.arange(600_000.0) + step, "y": jnp.ones(3)}
    key = jax.random.key(0)
    return eqxshard.TrainState(step=jnp.int32(step), model=model, opt_state=(), key=key)


def damage_chunks(folder, kind):
    (file,) = (folder / "1" / "state").glob("ocdbt.process_0_*/d/*")
    assert f"#{file.stat().st_size}  state/" in (folder / "1" / "checksums.txt").read_text()
    content = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(content[:-1])
    else:
        content[int(kind * (len(content) - 1))] ^= 16
        file.write_bytes(content)


@pytest.mark.parametrize("kind", ["delete", "cut", 0.0, 0.37, 0.5, 1.0])
def test_damaged_chunks_are_found_where_they_are_read(large, tmp_path, kind, caplog):
    folder = shutil.copytree(large, tmp_path / "copy")
    damage_chunks(folder, kind)
    checkpointer = eqxshard.Checkpointer(folder)
    assert_equal(checkpointer.restore(large_state()), large_state(0))
    assert "the checkpoint of step 1 in" in caplog.text
    assert "is damaged (" in caplog.text and "; using the one before it." in caplog.text
    with pytest.raises(ValueError, match=r"no good .* \(step 1: .*\); use one of: step 0"):
        checkpointer.restore(large_state(), step=1)


@pytest.mark.parametrize("times", [3, 10**6])
def test_chunks_that_cannot_be_read_are_not_damaged(large, monkeypatch, times):
    read_part, fails = _arrays._read_part, itertools.count()

    def read(*args):
        if next(fails) < times:
            # TensorStore's message for EIO.
            raise ValueError("UNKNOWN: Error reading x: Input/output error [source x]")
        return read_part(*args)

    monkeypatch.setattr(_arrays, "_read_part", read)
    monkeypatch.setattr(_files, "_WAITS", (0, 0, 0))
    checkpointer = eqxshard.Checkpointer(large)
    if times > 3:
        with pytest.raises(
            OSError, match=r"cannot be read \(.* Input/output error\), whic"
        ):
            checkpointer.restore(large_state())
        times = 0
    assert int(checkpointer.restore(large_state()).step) == 1
