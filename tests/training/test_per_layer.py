"""Optimizers on stacked layers, against the same optimizers on lists of layers."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient
from jax.sharding import PartitionSpec as P

import eqxshard

KEY = jax.random.key(0)
DEPTH, WIDTH = 3, 8


def by_rank(params):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def by_path(params):
    def label(path, _):
        return "matrix" if path[-1].name == "weight" else "other"

    return jax.tree_util.tree_map_with_path(label, params)


#: Those that treat stacked layers otherwise than a list, unless applied layer by layer.
LOOKING: dict[str, Any] = {
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "adamw, decays matrices": optax.adamw(1e-2, weight_decay=0.5, mask=by_rank),
    "sm3": optax.sm3(1e-2, 0.9),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.01),
    "MultiSteps": optax.MultiSteps(optax.lamb(1e-2), 2).gradient_transformation(),
    "by path": optax.multi_transform(
        {"matrix": optax.contrib.muon(1e-2), "other": optax.adam(1e-2)}, by_path
    ),
    "schedule": optax.lamb(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 8)),
}
#: Those that look at each number alone.
ELEMENTWISE: dict[str, Any] = {
    "adam": optax.adam(1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
}
#: Those that look at all parameters at once.
GLOBAL: dict[str, Any] = {
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "momo": optax.contrib.momo(),
    "prodigy": optax.contrib.prodigy(),
    "lbfgs": optax.lbfgs(1e-2, linesearch=None),
}
QUICK = ("muon", "adafactor", "lamb", "by path", "adam", "clipped")


def cases(optims):
    return [
        pytest.param(optim, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, optim in optims.items()
    ]


class Model(eqx.Module):
    head: eqx.nn.Linear
    layers: Any

    def __call__(self, x):
        """A model may be called, as a function of labels is by optax."""
        raise NotImplementedError


def make(listed, key=KEY):
    """Layers of unlike sizes, so that what looks at all of them sees something else."""
    last, *keys = jax.random.split(key, DEPTH + 1)
    layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]
    scales = [0.1, 1.0, 10.0]
    layers = [jax.tree.map(lambda x, c=c: c * x, x) for c, x in zip(scales, layers)]
    model = Model(eqx.nn.Linear(WIDTH, 4, key=last), layers)
    return model if listed else stack(model)


def stack(model):
    return Model(model.head, jax.tree.map(lambda *x: jnp.stack(x), *model.layers))


def updated(optim, listed, steps=4):
    """The model after some updates by made-up gradients."""
    optim = optax.with_extra_args_support(optim)

    @jax.jit
    def step(params, state, key):
        grads: Any = make(True, key)
        grads = grads if listed else stack(grads)
        updates, state = optim.update(grads, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = make(listed)
        state = jax.jit(optim.init)(params)
        for seed in range(steps):
            params, state = step(params, state, jax.random.key(seed + 1))
    return stack(params) if listed else params


def distance(one, other):
    """The largest difference, relative to numbers above 1."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(jnp.max(jnp.abs(a - b) / jnp.maximum(jnp.abs(b), 1))) for a, b in pairs
    )


@pytest.mark.slow
@pytest.mark.parametrize("optim", cases(LOOKING | ELEMENTWISE))
def test_stacked_layers_are_updated_as_a_list_of_layers_is(optim):
    found = updated(eqxshard.per_layer(optim, "layers"), listed=False)
    assert distance(found, updated(optim, listed=True)) < 1e-5


@pytest.mark.parametrize("optim", cases(GLOBAL))
def test_one_that_looks_at_all_parameters_takes_them_stacked(optim):
    assert distance(updated(optim, listed=False), updated(optim, listed=True)) < 1e-5
    assert noted(optim) == []


def noted(optim):
    """The findings of lint in the optimizer of a step."""
    mesh = eqxshard.make_mesh(data=1, fsdp=8)
    kw: Any = dict(mesh=mesh, rule=eqxshard.fsdp(min_size=1))
    state = eqxshard.abstract_state(ft.partial(make, False), optim, key=KEY, **kw)

    def loss_fn(model, batch, key):
        hidden = jax.vmap(lambda x: eqxshard.scan_layers(Tanh(model.layers), x))(batch)
        return jnp.sum(jax.vmap(model.head)(hidden) ** 2, -1)

    step = eqxshard.make_train_step(loss_fn, optim)
    # Optax itself mixes dtypes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = eqxshard.lint(step, state, np.ones((8, WIDTH), np.float32))
    return [each for each in found if each.kind == "per-layer"]


#: These two read no matrix and take no norm of stacked layers: the first decays biases, the
#: second hands Adam their weights.
UNSEEN = {"adamw, decays matrices", "by path"}


@pytest.mark.parametrize(
    "optim", cases({k: v for k, v in LOOKING.items() if k not in UNSEEN})
)
def test_an_optimizer_that_looks_at_whole_stacks_is_noted(optim):
    (finding,) = noted(optim)
    assert str(finding.leaf).startswith("layers.")
    assert "write eqxshard.per_layer(optim, 'layers')" in finding.message


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["muon", "lamb"])
def test_what_is_applied_layer_by_layer_is_not_noted(optim):
    inside = eqxshard.per_layer(LOOKING[optim], "layers")
    assert noted(optax.chain(CLIP, inside)) == []
    (finding,) = noted(optax.chain(CLIP, LOOKING[optim]))
    assert finding.kind == "per-layer"


@pytest.mark.parametrize("optim", cases(ELEMENTWISE))
def test_an_optimizer_that_looks_at_each_number_alone_is_not_noted(optim):
    assert noted(optim) == []


CLIP = optax.clip_by_global_norm(1.0)


def test_clipping_by_the_global_norm_is_not_for_one_layer():
    outside = optax.chain(CLIP, eqxshard.per_layer(LOOKING["lamb"], "layers"))
    listed = optax.chain(CLIP, LOOKING["lamb"])
    assert distance(updated(outside, False), updated(listed, True)) < 1e-5


class Stacks(eqx.Module):
    """Two stacks of unlike depth, one inside of another module, and a list of layers."""

    first: eqx.nn.Linear
    inner: dict[str, Any]
    layers: list[eqx.nn.Linear]
    frozen: eqx.nn.Linear

    def __init__(self, key):
        def stacked(depth):
            layer = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key)  # noqa: E731
            return eqx.filter_vmap(layer)(jax.random.split(key, depth))

        self.first, self.inner = stacked(4), {"second": stacked(2)}
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key)]
        self.frozen = stacked(5)

    def __call__(self, x):
        for layers in (self.first, self.inner["second"], self.frozen):
            x = eqxshard.scan_layers(Tanh(layers), x)
        return self.layers[0](x)


class Tanh(eqx.Module):
    inner: eqx.nn.Linear

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


def trained(mesh, rule):
    stacks = ("first", r"inner\.\w+", "frozen")
    optim = lenient(eqxshard.per_layer(LOOKING["muon"], *stacks))
    trainable = eqx.tree_at(
        lambda m: m.frozen, jax.tree.map(lambda _: True, Stacks(KEY)), replace=False
    )
    options = dict(mesh=mesh, rule=rule)
    state = eqxshard.init_state(Stacks, optim, key=KEY, trainable=trainable, **options)
    step = eqxshard.make_train_step(
        lambda model, batch, _: jnp.sum(jax.vmap(model)(batch) ** 2, -1), optim
    )
    batch = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
    for _ in range(3):
        state, _ = step(state, batch)
    return state


@pytest.mark.slow
def test_on_a_mesh_it_is_as_on_one_device_and_its_state_is_split_like_the_layers():
    rule = eqxshard.combine(eqxshard.by_dim({"out": "tensor"}), eqxshard.fsdp(min_size=16))
    state = trained(eqxshard.make_mesh(data=2, fsdp=2, tensor=2), rule)
    one = trained(eqxshard.make_mesh(devices=jax.devices()[:1]), eqxshard.replicate())
    weights = [eqx.filter(each.model, eqx.is_array) for each in (state, one)]
    assert distance(*map(jax.device_get, weights)) < 1e-5
    assert distance(*map(jax.device_get, (one.model.frozen, Stacks(KEY).frozen))) < 1e-6
    states = state.opt_state.inner_states
    first, second = states["first"], states["inner.second"]
    split = {
        jax.tree_util.keystr(path): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path((first, second))
        if leaf.ndim == 3
    }
    assert len(split) == 2 and set(split.values()) == {P(None, "tensor", "fsdp")}


@pytest.mark.parametrize(
    "stacks, message",
    [
        (("layrs",), "no layers at 'layrs'; did you mean 'layers'"),
        (("lay",), "no layers at 'lay'; "),
        (("inner",), "is a list, whose layers are not stacked; leave it out"),
        (("odd",), "without a common leading dim; stack the layers"),
        (("(",), "not all regular expressions .*; escape"),
        ((), "paths of the stacked layers; give them as text"),
        (("",), "no layers at ''; "),
    ],
)
def test_paths_that_name_no_stack_are_refused(stacks, message):
    odd = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 4))}
    params = {"layers": make(False).layers, "inner": make(True).layers, "odd": odd}
    with pytest.raises((ValueError, TypeError), match=message):
        eqxshard.per_layer(optax.lamb(1e-2), *stacks).init(params)
