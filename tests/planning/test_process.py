"""The process that compiles: its errors for a user's mistake, and when it fails."""

import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from plan_helpers import BATCH
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard._errors import UsageTypeError
from eqxshard.planning._child import CompilerError, describe_error, explain_death


def plan(make_model: Any = Transformer, loss_fn: Any = next_token_losses):
    options: dict[str, Any] = {
        "mesh_shape": {"data": 8},
        "rule": eqxshard.replicate(),
        "backend": "cpu",
    }
    return eqxshard.plan(make_model, loss_fn, optax.sgd(0.1), BATCH, **options)


@pytest.mark.slow
def test_a_process_that_dies_is_one_sentence(monkeypatch):
    jnp.zeros(1).block_until_ready()  # XLA has read the flags of this process.
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")
    message = "XLA ended the process that compiles ("
    with pytest.raises(RuntimeError, match=re.escape(message)):
        plan()


def forget(key):
    return {}["wide"]


def test_a_mistake_in_the_model_is_raised_at_its_line():
    with pytest.raises(KeyError, match="wide") as caught:
        plan(forget)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "forget"


def test_a_mistake_that_is_a_sentence_stays_one():
    with pytest.raises(UsageTypeError, match="loss is str; return an array"):
        plan(loss_fn=lambda model, batch, key: "text")


def test_the_remedy_is_that_for_what_it_said():
    fatal = "I0101 hello\nF0101 one.cc:3] Check failed: size mismatch when packing elements"
    message = explain_death(-6, fatal)
    assert message.startswith("XLA ended the process that compiles (signal SIGABRT: F0101 ")
    assert "memory ran out" in explain_death(-9, "")
    assert "(exit status 3: it said nothing); plan with backend='cpu'" in explain_death(
        3, ""
    )


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (
            jax.errors.JaxRuntimeError("UNIMPLEMENTED: a kernel.\nmore"),
            CompilerError,
            "could not be compiled (JaxRuntimeError: UNIMPLEMENTED: a kernel); use",
        ),
        (KeyError("x"), RuntimeError, "cannot be read (KeyError: 'x'); please report"),
        (eqxshard.UsageError("no text; use another."), eqxshard.UsageError, "no text; use"),
    ],
)
def test_errors_of_the_process_say_what_to_do(error, kind, message):
    failure = describe_error(error)
    assert failure.kind is kind and message in failure.message
