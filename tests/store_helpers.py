"""Servers of object stores on this machine, and runs whose checkpoints are in them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import optax
from checkpoint_helpers import like, new_state, placed
from cluster_run import make_model
from helpers import arrays, assert_equal, lenient, make_loader, make_mesh
from process_helpers import started, workers_of

import eqxshard
from eqxshard.launch import _free_port

SCRIPT = Path(__file__).parent / "cluster_run.py"


class Link:
    """A way to a server on this machine that can be closed and opened again."""

    def __init__(self, port: int):
        self._port = port
        self.port = _free_port()
        self.open()

    def open(self):
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        listen = (self._listener, self._open)
        threading.Thread(target=self._listen, args=listen, daemon=True).start()

    def close(self):
        for each in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self, listener, connections):
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                relay = (near, connections)
                threading.Thread(target=self._relay, args=relay, daemon=True).start()

    def _relay(self, near, connections):
        """Pass data on in both directions; close both ends, of which there are many."""
        server = ("127.0.0.1", self._port)
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(server) as far,
        ):
            connections |= {near, far}
            back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
            back.start()
            self._copy(near, far)
            back.join()
            connections -= {near, far}

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
        # Otherwise a reader of the target would wait forever.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def linked(command: Sequence[str]) -> Iterator[Link]:
    """A way to a server that a command starts, given `--port`."""
    port = _free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started([*command, f"--port={port}"], **quiet) as server:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.1)
        link = Link(port)
        yield link
        link.close()


def names(folder):
    """The objects in a folder of a store."""
    import fsspec

    files, path = fsspec.url_to_fs(folder, use_listings_cache=False)
    return [file.removeprefix(path).strip("/") for file in files.find(path)]


def train(checkpointer, train_step, *callbacks, steps=15):
    """Train from the last checkpoint, if there is one."""
    state = new_state()
    if checkpointer.steps():
        state = checkpointer.restore(like())
    return eqxshard.fit(
        state,
        train_step,
        make_loader(),
        steps=steps,
        log_every=1,
        checkpointer=checkpointer,
        callbacks=callbacks,
    )


def save_and_resume(folder, train_step, local):
    """Train in a store, restore on two meshes, and go on as a local run does."""
    checkpointer = eqxshard.Checkpointer(folder, max_to_keep=2, save_every=2)
    state = train(checkpointer, train_step, steps=6)
    assert checkpointer.steps() == [4, 6]
    # Nothing is left of step 2.
    assert {name.split("/")[0] for name in names(folder)} == {"4", "6", "eqxshard.txt"}
    again = eqxshard.Checkpointer(folder)
    assert_equal(again.restore(like()), state)
    assert_equal(again.restore(like(**placed("data=2,fsdp=4", "fsdp"))), state)
    whole = train(eqxshard.Checkpointer(local, save_every=2), train_step)
    assert_equal(train(checkpointer, train_step), whole)


class At(eqxshard.callbacks.Callback):
    """Does something after a step."""

    every = 1

    def __init__(self, actions):
        self._actions = actions

    def after_step(self, loop):
        self._actions.get(loop.step, lambda: None)()


def start(folder, checkpoints, *, launch=()):
    """Two processes of two devices each, whose checkpoints are in a bucket."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "eqxshard.launch", "--processes=2", *launch),
        *("--devices-per-process=2", SCRIPT, folder, f"--checkpoints={checkpoints}"),
        *("--mesh=data=2,fsdp=2", "--rule=fsdp", "--seconds-per-step=0.5"),
    ]
    settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return started(command, env=settings, stderr=subprocess.STDOUT)


def kill_while_saving(bucket, tmp_path):
    """The folder of a run of two processes, after one was killed in a save."""
    folder = f"{bucket}/run"
    with start(tmp_path / "killed", folder, launch=["--restarts=1"]) as process:
        deadline = time.monotonic() + 300
        while not names(f"{folder}/5/checksums.txt"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = workers_of(process)
        while not names(f"{folder}/10/state"):
            assert time.monotonic() < deadline
        os.kill(workers[1], signal.SIGKILL)
        assert "checksums.txt" not in names(f"{folder}/10"), "it was too late to kill"
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    # From 10 if the killed process had written its part: the other one completes it.
    assert re.search(r"resuming from step (5|10) in 2 processes", out), out
    assert eqxshard.Checkpointer(folder).steps() == [5, 10, 15]
    # Below the name of the save, whose second try replaced the first.
    written = [name.split("/") for name in names(f"{folder}/10/written")]
    assert len({save for save, _ in written}) == 1
    assert {process for _, process in written} == {"0", "1"}
    return folder


def arrays_of(folder):
    """The arrays of the last checkpoint, whole."""
    where = {"mesh": make_mesh("data=1"), "rule": eqxshard.replicate()}
    optim, key = lenient(optax.adam(1e-2)), jax.random.key(0)
    like = eqxshard.abstract_state(make_model, optim, key=key, **where)
    return arrays(eqxshard.Checkpointer(folder).restore(like))
