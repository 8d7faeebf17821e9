"""Folders in odd places: names, permissions, disks that cannot be written to."""

import contextlib
import os
import shutil
import subprocess

import pytest
from checkpoint_helpers import copied, like, new_state
from helpers import assert_equal, make_loader

import eqxshard

NAMES = ("with spaces/", "übung 学習 🙂", "100% #1?&x=[a]*{b}", "~user", "-x", "a'b\"")


@pytest.mark.parametrize("name", NAMES)
def test_any_name_will_do(tmp_path, checkpoints, train_step, name):
    folder = f"{tmp_path}/{name}"
    checkpointer = eqxshard.Checkpointer(folder, save_every=4)
    state = eqxshard.fit(
        new_state(), train_step, make_loader(), steps=10, checkpointer=checkpointer
    )
    for again in (folder, f"{folder}//", tmp_path / name):
        checkpointer = eqxshard.Checkpointer(again)
        assert checkpointer.steps() == [4, 8, 10]
        assert_equal(checkpointer.restore(like()), state)
    file = f"{folder}/model.safetensors"
    eqxshard.save_weights(file, state.model)
    assert_equal(eqxshard.load_weights(file, like().model), state.model)
    assert os.listdir(tmp_path) == [name.rstrip("/")]


def test_a_backslash_is_refused(tmp_path):
    """TensorStore would write to other folders."""
    with pytest.raises(ValueError, match=r"has a backslash, which .* slash; give another"):
        eqxshard.Checkpointer(tmp_path / "a\\b")
    assert not list(tmp_path.iterdir())


def test_a_relative_path_is_that_of_the_start(tmp_path, train_step, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    checkpointer = eqxshard.Checkpointer("run", save_every=1)
    leave = eqxshard.callbacks.Every(1, lambda run: os.chdir(there))
    eqxshard.fit(
        *(new_state(), train_step, make_loader()),
        steps=3,
        checkpointer=checkpointer,
        callbacks=[leave],
    )
    assert int(checkpointer.restore(like()).step) == 3
    assert not list(there.iterdir())
    assert eqxshard.Checkpointer(here / "run").steps() == [1, 2, 3]


@contextlib.contextmanager
def as_nobody():
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_without_permission_is_named(checkpoints, tmp_path, train_step):
    folder = copied(checkpoints, tmp_path)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    folder.chmod(0o555)
    checkpointer = eqxshard.Checkpointer(folder)
    says = rf"checkpoints cannot be written to {folder}: Permission denied; give a folder"
    state = checkpointer.restore(like())
    with as_nobody(), pytest.raises(ValueError, match=says):
        eqxshard.fit(state, train_step, make_loader(), steps=12, checkpointer=checkpointer)
    folder.chmod(0)
    with as_nobody(), pytest.raises(OSError, match=rf"{folder} cannot be .*denied"):
        eqxshard.Checkpointer(folder).restore(like())
    folder.chmod(0o755)


def test_a_checkpoint_is_read_from_a_disk_that_cannot_be_written_to(
    checkpoints, small_disk, train_step
):
    folder = small_disk / "run"
    shutil.copytree(checkpoints[0] / "10", folder / "10")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    checkpointer = eqxshard.Checkpointer(folder)
    state = checkpointer.restore(like())
    assert_equal(state, checkpoints[1])
    says = rf"cannot be written to {folder}: Read-only file system; give a folder"
    with pytest.raises(ValueError, match=says):
        eqxshard.fit(state, train_step, make_loader(), steps=12, checkpointer=checkpointer)
    checkpointer.save(new_state())
    with pytest.raises(OSError, match=says):
        checkpointer.wait()
    with pytest.raises(OSError, match=r"could not be written: Read-only file system; give"):
        eqxshard.save_weights(folder / "model.safetensors", state.model)
