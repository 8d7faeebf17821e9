"""Out of memory: the error names what a step needs, and the state is left alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import step_helpers
from helpers import make_batch, make_mesh, squared_errors

import eqxshard
from eqxshard.training import _advice, _step

#: JAX's message on GPUs.
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
    return "\n".join(caught.value.__notes__)


@pytest.mark.versions
def test_a_step_that_does_not_fit_says_what_it_needs():
    state, step = step_helpers.make(*("data=8", "replicate", huge_loss))
    stats = step.lower(state, make_batch()).compile().memory_analysis()
    assert stats is not None and stats.temp_size_in_bytes > 10**12
    said = out_of_memory(step, state, make_batch())
    terabytes = stats.temp_size_in_bytes / 1e9
    needs = f"train_step of huge_loss needs {terabytes:,.2f} GB on each device: "
    # Four of 32 rows are on each device; Adam has two numbers for each of 420 parameters.
    needs += "parameters 1.71 kB, optimizer state 3.36 kB, batch 192 B, temporaries "
    assert said.startswith(f"{needs}{terabytes:,.2f} GB. To fit, use a smaller batch, ")


@pytest.mark.slow
def test_a_step_that_is_not_linted_says_what_it_is_given():
    state, step = step_helpers.make(*("data=8", "replicate", huge_loss), lint="off")
    said = out_of_memory(step, state, make_batch())
    needs = "train_step of huge_loss needs more than there is on each device: parameters "
    assert said.startswith(f"{needs}1.71 kB, optimizer state 3.36 kB, batch 192 B. To fit,")


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_says_what_it_needs():
    state, _ = step_helpers.make("data=8", "replicate")
    metric = lambda model, batch: {"huge": huge_loss(model, batch, jax.random.key(0))}  # noqa: E731
    said = out_of_memory(eqxshard.make_eval_step(metric), state.model, make_batch())
    assert "eval_step of <lambda> needs" in said and ": model 1.71 kB, batch 192 B" in said


def test_what_the_devices_have_is_said_and_the_state_is_left(monkeypatch):
    state, step = step_helpers.setup()

    def fails(*args):
        raise jax.errors.JaxRuntimeError(GPU)

    stats = {"bytes_limit": 10 * 2**20, "bytes_in_use": 30 * 2**20}
    with monkeypatch.context() as patch:
        patch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: stats)
        patch.setattr(_step, "call_jitted", fails)
        said = out_of_memory(step, state, make_batch())
    assert "train_step of squared_errors needs" in said
    assert "; a device has 10.5 MB, of which 31.5 MB are in use. To fit, use " in said
    step(state, make_batch())


def test_a_resident_dataset_counts_whole_on_each_device(monkeypatch):
    def fails(*args):
        raise jax.errors.JaxRuntimeError(GPU)

    source, mesh = eqxshard.data.ArraySource(make_batch(64)), make_mesh("data=8")
    loader = eqxshard.Loader(source, batch_size=32, mesh=mesh, placement="device")
    state, step = step_helpers.make("data=8", "replicate", lint="off")
    monkeypatch.setattr(_step, "call_jitted", fails)
    said = out_of_memory(step.many, state, loader.stacked(2))
    # 64 rows of 12 numbers, of four bytes each.
    assert "optimizer state 3.36 kB, dataset 3.07 kB. To fit, use " in said


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

    said = out_of_memory(run)
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
    assert _advice.is_out_of_memory(error) == expected
