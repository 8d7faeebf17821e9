"""Out of memory: what a step says that it needs, and when it tries once more."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import step_helpers
from helpers import assert_equal, make_batch, squared_errors

import eqxshard
from eqxshard.training import _memory, _step
from eqxshard.training._inputs import ONE_BATCH

#: What JAX says on GPUs.
GPU = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.\n"
    "BufferAssignment OOM Debugging."
)


def huge_loss(model, batch, key):
    """Losses that take 32 TB on the way."""
    losses = squared_errors(model, batch, key)
    wide = jnp.broadcast_to(losses[:, None], (len(losses), 10**11))
    return losses + jnp.cumsum(wide.reshape(len(losses), -1, 1000), axis=1)[:, -1, -1]


class Wide(eqx.Module):
    """A model of which fsdp() splits an array."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first = eqx.nn.Linear(8, 2**16, key=key)
        self.last = eqx.nn.Linear(2**16, 4, key=key)

    def __call__(self, x, key=None):
        return self.last(jnp.tanh(self.first(x)))


def out_of_memory(call, *args):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Oo]ut of memory") as caught:
        call(*args)
    return caught.value, "\n".join(caught.value.__notes__)


@pytest.mark.versions
@pytest.mark.parametrize("lint", ["warn", pytest.param("off", marks=pytest.mark.slow)])
def test_a_step_that_does_not_fit_says_what_it_needs(lint):
    state, step = step_helpers.make(*("data=8", "replicate", huge_loss), lint=lint)
    stats = step.lower(state, make_batch()).compile().memory_analysis()
    assert stats is not None and stats.temp_size_in_bytes > 10**12
    error, said = out_of_memory(step, state, make_batch())
    terabytes = stats.temp_size_in_bytes / 1e9
    needs = f"train_step of huge_loss needs {terabytes:,.2f} GB on each device: "
    # Of 32 rows, four on each device; 420 parameters, and Adam has two numbers for each.
    needs += "parameters 1.71 kB, optimizer state 3.36 kB, batch 192 B, temporaries "
    assert said.startswith(f"{needs}{terabytes:,.2f} GB")
    for remedy in ("remat= of scan_layers", "accumulate=2", "Precision('bfloat16')"):
        assert remedy in said
    assert not error.is_passing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_says_what_it_needs():
    state, _ = step_helpers.make("data=8", "replicate")
    metric = lambda model, batch: {"huge": huge_loss(model, batch, jax.random.key(0))}  # noqa: E731
    _, said = out_of_memory(eqxshard.make_eval_step(metric), state.model, make_batch())
    assert "eval_step of <lambda> needs" in said and "a batch of 1/2 of the rows" in said
    assert "accumulate" not in said


def test_remedies_are_ranked_by_what_they_save(monkeypatch):
    stats = {"bytes_limit": 10 * 2**20, "bytes_in_use": 30 * 2**20}
    monkeypatch.setattr(_memory, "_stats", lambda mesh: stats)
    said = {}
    for rule in ("replicate", "fsdp"):
        options: dict = {"make_model": Wide}
        rule = eqxshard.fsdp(min_size=2**18) if rule == "fsdp" else rule
        mesh = "data=2,fsdp=4" if rule != "replicate" else "data=8"
        state, step = step_helpers.make(mesh, rule, **options)
        call = step.machine.look_up(state, None, ONE_BATCH)
        program = step.machine.compile(call, make_batch())
        said[mesh] = _memory.Memory.of("it", call, make_batch(), program)
    whole, split = said.values()
    # 2**16 * (8 + 1 + 4) + 4 parameters, of 4 bytes, and three times with Adam's.
    count = 2**16 * 13 + 4
    assert whole.parts["parameters"] == 4 * count
    assert whole.parts["optimizer state"] == 8 * count + 4
    text = whole.describe()
    # All but a bias, and what is small.
    saved = 12 * 7 / 8 * 2**16 * 12 / 1e6
    assert f"split the state over all 8 devices: fsdp() (saves up to {saved:.2f} MB" in text
    assert "delete other arrays, such as a second state (saves up to 2" in text
    assert "a device has 10.5 MB, of which 31.5 MB are in use" in text
    numbers = [float(x.split()[0]) for x in text.split("saves up to ")[1:]]
    assert len(numbers) == 3 and numbers == sorted(numbers, reverse=True)
    # What is split over fsdp could be split over data, too.
    assert split.parts["parameters"] < 0.4 * whole.parts["parameters"]


@pytest.fixture
def fails(monkeypatch):
    """Let the next calls of compiled steps fail, as on GPUs; returns all calls."""

    def fail(times, takes=False):
        calls, call_jitted = [], _step.call_jitted

        def call(*args):
            calls.append(args)
            if len(calls) <= times:
                if takes:
                    jax.tree.map(lambda x: x.delete(), args[1])
                raise jax.errors.JaxRuntimeError(GPU)
            return call_jitted(*args)

        monkeypatch.setattr(_step, "call_jitted", call)
        return calls

    return fail


def test_a_step_is_tried_once_more_if_its_state_is_still_there(fails):
    expected, step = step_helpers.setup()
    expected, _ = step(expected, make_batch())
    state, _ = step_helpers.setup()
    calls = fails(1)
    state, _ = step(state, make_batch())
    assert len(calls) == 2
    assert_equal(state, expected)


def test_a_step_that_fails_twice_leaves_the_state(fails):
    state, step = step_helpers.setup()
    calls = fails(2)
    _, said = out_of_memory(step, state, make_batch())
    assert len(calls) == 2 and "train_step of squared_errors needs" in said
    assert not state.step.is_deleted()
    step(state, make_batch())


@pytest.mark.parametrize("why", ["taken", "too large"])
def test_a_step_that_would_fail_again_is_not_tried_again(fails, monkeypatch, why):
    state, step = step_helpers.setup()
    calls = fails(1, takes=why == "taken")
    if why == "too large":
        monkeypatch.setattr(_memory, "_stats", lambda mesh: {"bytes_limit": 1000})
    out_of_memory(step, state, make_batch())
    assert len(calls) == 1


@pytest.mark.slow
def test_a_state_that_cannot_be_made_is_not_the_steps_fault():
    def make_model(key):
        model = Wide(key)
        huge = jnp.broadcast_to(model.first.weight[0, 0], (10**10, 1000))
        weight = model.first.weight + jnp.cumsum(huge, axis=0)[-1, 0]
        return eqx.tree_at(lambda model: model.first.weight, model, weight)

    def run():
        state, step = step_helpers.make(*("data=8", "replicate"), make_model=make_model)
        step(state, make_batch())

    _, said = out_of_memory(run)
    assert said.startswith("The state could not be made: it takes parameters 3.41 MB, ")


@pytest.mark.parametrize(
    "error, expected",
    [
        (jax.errors.JaxRuntimeError(GPU), True),
        (jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Error: Out of memory allocating 8"), True),
        (MemoryError(), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: No space left on device"), False),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), False),
        (ValueError("Out of memory"), False),
    ],
)
def test_errors_of_memory_are_known(error, expected):
    assert _memory.is_out_of_memory(error) == expected
