import os
import re
import subprocess
import sys
from pathlib import Path

import optax
import pytest
from plan_helpers import BATCH
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard._errors import UsageTypeError
from eqxshard.planning._process import CHILD, explain_death


def die(key):
    os.abort()


@pytest.mark.slow
def test_a_process_that_dies_is_one_sentence():
    options = {"mesh_shape": {"data": 8}, "rule": eqxshard.replicate(), "backend": "cpu"}
    message = "XLA ended the process that compiles (signal SIGABRT: "
    with pytest.raises(RuntimeError, match=re.escape(message)):
        eqxshard.plan(die, next_token_losses, optax.sgd(0.1), BATCH, **options)


def forget(key):
    return {}["wide"]


@pytest.mark.slow
def test_a_mistake_in_the_model_is_said_to_be_one():
    options = {"mesh_shape": {"data": 8}, "rule": eqxshard.replicate(), "backend": "cpu"}
    message = "making the model and its step raised KeyError: 'wide' at test_process.py:"
    with pytest.raises(RuntimeError, match=re.escape(message)) as caught:
        eqxshard.plan(forget, next_token_losses, optax.sgd(0.1), BATCH, **options)
    assert str(caught.value).endswith("; correct the script.")
    (note,) = caught.value.__notes__
    assert "in forget" in note and os.path.join("eqxshard", "planning") not in note


def write(model, batch, key):
    return "text"


@pytest.mark.slow
def test_a_mistake_that_is_a_sentence_stays_one():
    options = {"mesh_shape": {"data": 8}, "rule": eqxshard.replicate(), "backend": "cpu"}
    with pytest.raises(UsageTypeError) as caught:
        eqxshard.plan(Transformer, write, optax.sgd(0.1), BATCH, **options)
    assert not hasattr(caught.value, "__notes__")


def test_the_remedy_is_that_for_what_it_said():
    fatal = "I0101 hello\nF0101 one.cc:3] Check failed: size mismatch when packing elements"
    message = explain_death(-6, fatal)
    assert message.startswith("XLA ended the process that compiles (signal SIGABRT: F0101 ")
    assert "memory ran out" in explain_death(-9, "")
    assert "(exit status 3: it said nothing); plan with backend='cpu'" in explain_death(
        3, ""
    )


def test_planning_does_not_plan(monkeypatch):
    monkeypatch.setenv(CHILD, "1")
    options = {"mesh_shape": {"data": 8}, "rule": eqxshard.replicate(), "backend": "cpu"}
    with pytest.raises(RuntimeError, match="put the call under `if __name__ =="):
        eqxshard.plan(die, next_token_losses, optax.sgd(0.1), BATCH, **options)


SCRIPT = """
import equinox as eqx, jax, jax.numpy as jnp, optax, eqxshard

class Net(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, key, width):
        self.layer = eqx.nn.Linear(width, width, key=key)

    def __call__(self, x):
        return jnp.tanh(self.layer(x))

def loss_fn(model, batch, key):
    return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)

if __name__ == "__main__":
    width = 64
    plan = eqxshard.plan(
        lambda key: Net(key, width),
        loss_fn,
        optax.adam(1e-3),
        {"x": jax.ShapeDtypeStruct((8, width), jnp.float32)},
        mesh_shape={"fsdp": 4},
        rule=eqxshard.fsdp(min_size=1),
        backend="cpu",
    )
    print(plan.memory.parameters, plan.memory.optimizer)
"""


@pytest.mark.slow
def test_a_script_may_define_the_model_itself(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    root = str(Path(eqxshard.__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    # A quarter of 64 x 64 weights and 64 biases, twice for Adam, which also counts.
    size = 4 * (64 * 64 + 64) // 4
    assert run.stdout.split() == [str(size), str(2 * size + 4)]
