"""The lock on a folder of checkpoints: one program at a time, and nothing stays locked."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import equinox as eqx
import jax.numpy as jnp
import pytest
from checkpoint_helpers import new_state
from helpers import make_loader

import eqxshard
from eqxshard.checkpoint._folder import CheckpointFolder

OTHER = """
import sys
from etils import epath
from eqxshard.checkpoint._folder import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
print(folder.claim(), flush=True)
sys.stdin.read()
"""


@contextmanager
def other_program(folder):
    """Another program that writes to a folder, until it is killed."""
    command = [sys.executable, "-c", OTHER, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def fit(folder, train_step):
    checkpointer = eqxshard.Checkpointer(folder)
    loader = make_loader()
    eqxshard.fit(new_state(), train_step, loader, steps=2, checkpointer=checkpointer)
    return checkpointer


def test_a_folder_is_one_programs_until_that_is_gone(tmp_path, train_step, monkeypatch):
    folder = tmp_path / "run"
    with other_program(folder) as process:
        host = re.escape(os.uname().nodename)
        says = rf"{folder} is in use by process {process.pid} on {host} since 20.*; wait"
        with pytest.raises(ValueError, match=says):
            fit(folder, train_step)
        # The files that the other is about to write are left alone.
        left = CheckpointFolder(folder)
        left.make(7)
        left.end()
        checkpointer = eqxshard.Checkpointer(folder)
        checkpointer.save(new_state())
        with pytest.raises(OSError, match=says.removesuffix("; wait")):
            checkpointer.wait()
        assert sorted(os.listdir(folder)) == ["7", "eqxshard.txt", "lock"]
    # It was killed, and its file is still there.
    assert (folder / "lock").exists()
    assert fit(folder, train_step).steps() == [2]
    assert sorted(os.listdir(folder)) == ["2", "eqxshard.txt"]


def test_a_run_that_fails_lets_go_of_its_folder(tmp_path, train_step):
    with pytest.raises(ZeroDivisionError):
        eqxshard.fit(
            new_state(),
            train_step,
            make_loader(),
            steps=2,
            checkpointer=eqxshard.Checkpointer(tmp_path),
            callbacks=[eqxshard.callbacks.Every(1, lambda run: 1 / 0)],
        )
    assert sorted(os.listdir(tmp_path)) == ["1", "eqxshard.txt"]


def test_a_program_has_its_folder_from_the_first_save_to_wait(tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(new_state())
    # A second one of the same program may save there, too.
    again = eqxshard.Checkpointer(tmp_path)
    state = new_state()
    again.save(eqx.tree_at(lambda s: s.step, state, state.step + 1))
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    again.wait()
    assert (tmp_path / "lock").exists()
    checkpointer.wait()
    assert not (tmp_path / "lock").exists() and checkpointer.steps() == [0, 1]


@pytest.mark.parametrize("was_ours", [False, True])
@pytest.mark.parametrize("kind", ["link", "text", "empty"])
def test_a_file_of_the_users_that_is_called_lock_stays(tmp_path, kind, was_ours):
    """It is not written to through a link either."""
    folder, thesis = tmp_path / "run", tmp_path / "thesis"
    text = "" if kind == "empty" else "all of it"
    thesis.write_text(text)
    checkpointer = eqxshard.Checkpointer(folder)
    if was_ours:
        checkpointer.save(new_state())
        checkpointer.wait()
    folder.mkdir(exist_ok=True)
    if kind == "link":
        (folder / "lock").symlink_to(thesis)
    else:
        (folder / "lock").write_text(text)
    state = eqx.tree_at(lambda s: s.step, new_state(), jnp.int32(1))
    checkpointer.save(state)
    if kind == "empty" and was_ours:
        # A full disk leaves a lock of ours empty, too.
        checkpointer.wait()
        return
    says = "has 'lock', which eqxshard did not write|; give a folder that can be written to"
    with pytest.raises(OSError, match=says):
        checkpointer.wait()
    assert (folder / "lock").read_text() == thesis.read_text() == text


@pytest.mark.slow
def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    """A forked data worker, for example, may outlive its parent."""
    code = OTHER.replace(
        "sys.stdin.read()", "import os; os.fork() or sys.stdin.read(); os._exit(0)"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=(pipe := os.pipe())[0],
        stdout=subprocess.PIPE,
        text=True,
    )
    with done:
        assert done.stdout is not None
        assert done.stdout.readline() == "None\n"
        done.wait()
        # The child still waits for its end of the pipe.
        with other_program(tmp_path):
            pass
        os.close(pipe[0])
        os.close(pipe[1])


@pytest.mark.slow
def test_the_lock_of_a_host_that_died_is_waited_for(tmp_path, monkeypatch, caplog):
    with other_program(tmp_path / "run") as process:
        # A file server keeps it a while.
        monkeypatch.setattr("platform.node", lambda: "elsewhere")
        monkeypatch.setattr("time.sleep", lambda seconds: process.kill() or process.wait())
        checkpointer = eqxshard.Checkpointer(tmp_path / "run")
        checkpointer.save(new_state())
        checkpointer.wait()
    assert "waiting 120 s, in case that host died" in caplog.text
    assert eqxshard.Checkpointer(tmp_path / "run").steps() == [0]
