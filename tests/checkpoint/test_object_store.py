"""Checkpoints in S3, by a real server of its protocol; `nox -s stores` installs it."""

import contextlib
import functools as ft
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_helpers import like, new_state, placed
from cluster_run import make_model
from helpers import arrays, assert_equal, lenient, make_loader, make_mesh
from process_helpers import started, workers_of

import eqxshard
from eqxshard.launch import _free_port

pytest.importorskip("moto", reason="the server is not installed; run nox -s stores")
pytest.importorskip("s3fs", reason="s3fs is not installed; run nox -s stores")
pytestmark = [
    pytest.mark.slow,
    # Of the server's client, in its own threads.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SCRIPT = Path(__file__).parent.parent / "cluster_run.py"


class Link:
    """A way to a server on this machine that can be closed and opened again."""

    def __init__(self, port: int):
        self._port = port
        self.port = _free_port()
        self.open()

    def open(self):
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def close(self):
        for each in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _listen(self, listener):
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def link():
    """A way to a server of S3."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(command, **quiet) as server, pytest.MonkeyPatch.context() as m:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.1)
        link = Link(port)
        m.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
        m.setenv("AWS_ACCESS_KEY_ID", "someone")
        m.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        m.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield link
        link.close()


@pytest.fixture
def bucket(link):
    """A new bucket."""
    name = f"bucket-{time.monotonic_ns()}"
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{name}"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
    return f"s3://{name}"


def names(folder):
    import fsspec

    files = fsspec.filesystem("s3", use_listings_cache=False).find(folder)
    return [file.removeprefix(folder.removeprefix("s3://")).strip("/") for file in files]


def train(checkpointer, train_step, *callbacks, steps=15):
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


def test_a_run_saves_and_resumes_on_any_mesh(bucket, train_step, tmp_path):
    folder = f"{bucket}/runs/one"
    checkpointer = eqxshard.Checkpointer(folder, max_to_keep=2, save_interval_steps=2)
    state = train(checkpointer, train_step, steps=6)
    assert checkpointer.steps() == [4, 6]
    # Nothing is left of step 2.
    tops = {name.split("/")[0] for name in names(folder)}
    assert tops == {"4", "6", "eqxshard.txt"}
    again = eqxshard.Checkpointer(folder)
    assert_equal(again.restore(like()), state)
    assert_equal(again.restore(like(**placed("data=2,fsdp=4", "fsdp"))), state)
    local = eqxshard.Checkpointer(tmp_path, save_interval_steps=2)
    assert_equal(train(checkpointer, train_step), train(local, train_step))


def test_every_dtype_and_shape(bucket):
    mesh = make_mesh("data=2,fsdp=4")
    there = jax.NamedSharding(mesh, jax.P("fsdp", None))
    big = jnp.arange(8 * 6, dtype=jnp.float32).reshape(8, 6)
    kinds = ("bfloat16", "float16", "int8", "uint8", "int32", "bool", "complex64")
    tree = {
        "step": jnp.int32(3),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(1),
        "half": jax.device_put(big[:, :3], jax.NamedSharding(mesh, jax.P(None, None))),
        **{kind: jax.device_put(big.astype(kind), there) for kind in kinds},
    }
    state = eqxshard.TrainState(
        step=jnp.int32(3), model=tree, opt_state=(), key=jax.random.key(0)
    )
    checkpointer = eqxshard.Checkpointer(bucket)
    checkpointer.save(state)
    checkpointer.wait()
    assert_equal(checkpointer.restore(state), state)


class At(eqxshard.callbacks.Callback):
    """Does something after a step."""

    every = 1

    def __init__(self, actions):
        self._actions = actions

    def after_step(self, run):
        self._actions.get(run.step, lambda: None)()


def test_a_server_that_dies_and_comes_back(bucket, link, train_step, caplog):
    checkpointer = eqxshard.Checkpointer(bucket, save_interval_steps=5)
    # The save of step 5 is finished, and step 10's begins without a server.
    events = At({6: lambda: (checkpointer.close(), link.close()), 12: link.open})
    with caplog.at_level(logging.ERROR):
        train(checkpointer, train_step, events)
    (line,) = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert line.startswith(f"the checkpoint of step 10 could not be written to {bucket}: ")
    assert "connect" in line and line.endswith("Training continues.")
    assert checkpointer.steps() == [5, 15]


def test_a_server_that_dies_during_a_save(bucket, link, train_step, caplog):
    checkpointer = eqxshard.Checkpointer(bucket, save_interval_steps=5)
    # The next save waits for that of step 5, which gives up after half a minute.
    events = At({5: link.close, 14: lambda: (checkpointer.close(), link.open())})
    with caplog.at_level(logging.ERROR):
        train(checkpointer, train_step, events)
    lines = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert [re.findall(r"step (\d+) could", line) for line in lines] == [["5"], ["10"]]
    assert checkpointer.steps() == [15]
    # Nothing is left of the one that was interrupted.
    assert {name.split("/")[0] for name in names(bucket)} == {"15", "eqxshard.txt"}


def test_an_error_may_end_the_run(bucket, link, train_step):
    checkpointer = eqxshard.Checkpointer(bucket, save_interval_steps=5, on_error="raise")
    reached: list[int] = []
    actions: dict[int, Any] = {n: ft.partial(reached.append, n) for n in range(1, 16)}
    actions[6] = lambda: (checkpointer.close(), link.close())
    try:
        with pytest.raises(OSError, match="the checkpoint of step 10 could not be written"):
            train(checkpointer, train_step, At(actions))
    finally:
        link.open()
    # When the next one was due.
    assert reached[-1] == 15
    assert checkpointer.steps() == [5]


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


def test_processes_killed_while_they_save(bucket, tmp_path):
    with start(tmp_path / "whole", tmp_path / "local") as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    folder = f"{bucket}/run"
    with start(tmp_path / "killed", folder, launch=["--restarts=1"]) as process:
        deadline = time.monotonic() + 300
        while not names(f"{folder}/5/checksums.txt"):
            assert time.monotonic() < deadline
        workers = workers_of(process)
        while not names(f"{folder}/10/arrays"):
            assert time.monotonic() < deadline
        os.kill(workers[1], signal.SIGKILL)
        assert "checksums.txt" not in names(f"{folder}/10"), "it was too late to kill"
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    # From 10 if the killed process had written its part: the other one completes it.
    assert re.search(r"resuming from step (5|10) in 2 processes", out), out
    assert eqxshard.Checkpointer(folder).steps() == [5, 10, 15]
    assert set(names(f"{folder}/10/written")) == {"0", "1"}
    ours, theirs = arrays_of(folder), arrays_of(tmp_path / "local")
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


def arrays_of(folder):
    where = {"mesh": make_mesh("data=1"), "rule": eqxshard.replicate()}
    optim, key = lenient(optax.adam(1e-2)), jax.random.key(0)
    like = eqxshard.abstract_state(make_model, optim, key=key, **where)
    return arrays(eqxshard.Checkpointer(folder).restore(like))


def set_open_requests(count):
    """From the next request on, the server checks credentials, which it does not know."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    text = {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, str(count).encode(), text, method="POST")
    urllib.request.urlopen(request).close()


def test_wrong_credentials_at_the_start(bucket, train_step):
    set_open_requests(0)
    try:
        with pytest.raises(OSError, match=f"{bucket}/x cannot be listed .*; check the ad"):
            eqxshard.Checkpointer(f"{bucket}/x").steps()
        says = f"checkpoints cannot be written to {bucket}/x: .*; give a folder"
        with pytest.raises(ValueError, match=says):
            eqxshard.fit(
                new_state(),
                train_step,
                make_loader(),
                steps=2,
                checkpointer=eqxshard.Checkpointer(f"{bucket}/x"),
            )
    finally:
        set_open_requests("inf")


def test_credentials_that_expire_in_mid_run(bucket, train_step, caplog):
    checkpointer = eqxshard.Checkpointer(bucket, save_interval_steps=5)
    lock = lambda: (checkpointer.close(), set_open_requests(0))  # noqa: E731
    events = At({6: lock, 12: lambda: set_open_requests("inf")})
    with caplog.at_level(logging.ERROR):
        train(checkpointer, train_step, events)
    (line,) = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert line.startswith(f"the checkpoint of step 10 could not be written to {bucket}: ")
    assert checkpointer.steps() == [5, 15]
