"""Checkpoints in S3, by a real server of its protocol; `nox -s stores` installs it."""

import logging
import os
import re
import sys
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import new_state
from helpers import assert_equal, make_loader, make_mesh
from store_helpers import (
    At,
    arrays_of,
    kill_while_saving,
    linked,
    names,
    save_and_resume,
    start,
    train,
)

import eqxshard

pytest.importorskip("moto", reason="the server is not installed; run nox -s stores")
pytest.importorskip("s3fs", reason="s3fs is not installed; run nox -s stores")
pytestmark = [
    pytest.mark.slow,
    # The server's client warns in its own threads.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def link():
    """A way to a server of S3."""
    command = [sys.executable, "-m", "moto.server", "--host=127.0.0.1"]
    with linked(command) as link, pytest.MonkeyPatch.context() as m:
        m.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
        m.setenv("AWS_ACCESS_KEY_ID", "someone")
        m.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        m.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield link


@pytest.fixture
def bucket(link):
    """A new bucket."""
    name = f"bucket-{time.monotonic_ns()}"
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{name}"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
    return f"s3://{name}"


def test_a_run_saves_and_resumes_on_any_mesh(bucket, train_step, tmp_path):
    save_and_resume(f"{bucket}/runs/one", train_step, tmp_path)


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


def test_a_server_that_dies_and_comes_back(bucket, link, train_step, caplog):
    checkpointer = eqxshard.Checkpointer(bucket, save_every=5)
    # The save of step 5 is finished, and step 10's begins without a server.
    events = At({6: lambda: (checkpointer.close(), link.close()), 12: link.open})
    with caplog.at_level(logging.ERROR):
        train(checkpointer, train_step, events)
    (line,) = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert line.startswith(f"the checkpoint of step 10 could not be written to {bucket}: ")
    assert "connect" in line and line.endswith("Training continues.")
    assert checkpointer.steps() == [5, 15]


def test_a_server_that_dies_during_a_save(bucket, link, train_step, caplog):
    checkpointer = eqxshard.Checkpointer(bucket, save_every=5)
    # The next save waits for that of step 5, which gives up after half a minute.
    events = At({5: link.close, 14: lambda: (checkpointer.close(), link.open())})
    with caplog.at_level(logging.ERROR):
        train(checkpointer, train_step, events)
    lines = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert [re.findall(r"step (\d+) could", line) for line in lines] == [["5"], ["10"]]
    assert checkpointer.steps() == [15]
    # Nothing is left of the one that was interrupted.
    assert {name.split("/")[0] for name in names(bucket)} == {"15", "eqxshard.txt"}


def test_processes_killed_while_they_save(bucket, tmp_path):
    with start(tmp_path / "whole", tmp_path / "local") as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    folder = kill_while_saving(bucket, tmp_path)
    ours, theirs = arrays_of(folder), arrays_of(tmp_path / "local")
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


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
    checkpointer = eqxshard.Checkpointer(bucket, save_every=5)
    lock = lambda: (checkpointer.close(), set_open_requests(0))  # noqa: E731
    events = At({6: lock, 12: lambda: set_open_requests("inf")})
    with caplog.at_level(logging.ERROR):
        train(checkpointer, train_step, events)
    (line,) = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert line.startswith(f"the checkpoint of step 10 could not be written to {bucket}: ")
    assert checkpointer.steps() == [5, 15]
