"""The cost of a step in numbers that do not depend on the machine.

Operations, memory and communication are compared to what JAX makes of the same step
written by hand.
"""

import importlib
import os
import traceback
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_mesh

import eqxshard
from eqxshard.sharding import batch_sharding
from eqxshard.testing import collectives
from eqxshard.training._jit import cpu_options

OPTIM = lenient(optax.adam(1e-3))
KEY = jax.random.key(0)
WIDTH, ROWS = 64, 256
PACKAGE = os.path.dirname(eqxshard.__file__)
ROOT = Path(__file__).parents[2]


class MLP(eqx.Module):
    """Square layers, so that all arrays can be counted."""

    layers: list[eqx.nn.Linear]

    def __init__(self, depth, key):
        keys = jax.random.split(key, depth)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def losses(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def batch():
    x, y = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def start(depth, mesh="data=1", rule=None, loss_fn=losses, **options):
    where: dict[str, Any] = {"mesh": make_mesh(mesh), "rule": rule or eqxshard.replicate()}
    state = eqxshard.init_state(lambda key: MLP(depth, key), OPTIM, key=KEY, **where)
    return state, eqxshard.make_train_step(loss_fn, OPTIM, **where, **options)


def by_hand(depth):
    """The step that one would write with `jax.jit`, compiled."""
    params, static = eqx.partition(MLP(depth, KEY), eqx.is_array)

    def step(params, opt_state, batch):
        def mean(params):
            return jnp.mean(losses(eqx.combine(params, static), batch, None))

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    # With the same fusions: JAX's own need less memory on CPUs, and are wrong.
    lowered = jitted.lower(params, OPTIM.init(params), batch())
    return lowered.compile(compiler_options=cpu_options())


def peak(compiled):
    stats = compiled.memory_analysis()
    kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + kept


def flops(compiled):
    return compiled.cost_analysis()["flops"]


@pytest.fixture
def frames_of(monkeypatch):
    """The number of functions of ours that a call enters, and how deep they nest."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("_frames").frames_of


def test_a_call_is_short_and_does_not_grow_with_the_model(frames_of, unannotated):
    rows = jax.device_put(batch(), batch_sharding(make_mesh("data=1")))
    found = []
    for depth in (2, 12):
        state, train_step = start(depth)
        for _ in range(4):
            state, _ = train_step(state, rows)
        found.append(frames_of(lambda s=state, t=train_step: t(s, rows)))
    (entered, deepest), other = found
    assert (entered, deepest) == other
    # The call, what runs it, and helpers of that: no more stands in a stack trace.
    assert entered <= 12 and deepest <= 3


FSDP = {"mesh": "fsdp=8", "rule": eqxshard.fsdp(min_size=WIDTH**2)}


@pytest.mark.parametrize("options", [{}, FSDP, {**FSDP, "accumulate": 2}])
def test_few_frames_are_between_a_call_and_the_users_loss(options, unannotated):
    traces = []

    def seen(model, batch, key):
        frames = [frame for frame, _ in traceback.walk_stack(None)]
        files = [frame.f_code.co_filename for frame in frames]
        traces.append(sum(file.startswith(PACKAGE) for file in files))
        return losses(model, batch, key)

    state, train_step = start(2, loss_fn=seen, **options)
    train_step(state, batch())
    # The loop over microbatches adds one.
    assert max(traces) <= 11 + ("accumulate" in options)
    assert len(traces) == 1


def test_a_mistake_in_the_loss_shows_its_line_near_the_end(unannotated):
    def mistaken(model, batch, key):
        return jax.vmap(model)(batch["x"]) - batch["y"][:, :3]

    state, train_step = start(2, loss_fn=mistaken, **FSDP)
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        train_step(state, batch())
    frames = traceback.extract_tb(caught.tb)
    assert "mistaken" in [frame.name for frame in frames[-10:]]


def test_flops_are_those_of_the_step_written_by_hand():
    state, train_step = start(4)
    ours = train_step.lower(state, batch()).compile()
    # It also looks at what it writes, so that nothing is kept that is not finite.
    assert flops(ours) <= 1.03 * flops(by_hand(4))


def test_memory_is_that_of_the_state_and_activations():
    depth, layer, activation = 4, 4 * (WIDTH**2 + WIDTH), 4 * ROWS * WIDTH
    state, train_step = start(depth)
    count = 3 * depth * layer + 2 * activation
    count += max(i * activation + (depth - i) * layer for i in range(depth + 1))
    count += 2 * activation
    compiled = train_step.lower(state, batch()).compile()
    assert peak(compiled) <= 1.05 * count
    # From JAX 0.11 on, XLA:CPU keeps one more matrix where a step is guarded.
    more = layer if jax.__version_info__ >= (0, 11) else 0
    assert peak(compiled) <= 1.02 * peak(by_hand(depth)) + more


def test_data_parallel_steps_send_each_gradient_once():
    state, train_step = start(4, mesh="data=8")
    found = collectives(train_step.lower(state, batch()).compile())
    assert set(found.counts) == {"all-reduce"}
    params = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(state.model, eqx.is_array)))
    # Besides the gradients, sums of losses and weights.
    assert params <= found.bytes["all-reduce"] <= params + 64


def test_fully_sharded_steps_gather_each_weight_once_each_way():
    state, train_step = start(4, mesh="fsdp=8", rule=eqxshard.fsdp(min_size=WIDTH**2))
    found = collectives(train_step.lower(state, batch()).compile())
    gathers = [op for op in found if op.kind == "all-gather"]
    assert len(gathers) <= 2 * 4
