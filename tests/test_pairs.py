"""Pairs of options of a train step: each case trains as one writes it by hand.

By hand is plain JAX on one device, without microbatches. The cases hold every pair of two
options' values, but for those in `LEFT_OUT`. With the precision `float64`, errors show that
the rounding of float32 would hide.
"""

import collections
import contextlib
import functools as ft
import itertools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import compiles, lenient, stack
from jax.sharding import AxisType

import eqxshard
from eqxshard.parallel import mixture_of_experts
from eqxshard.sharding import batch_sharding, name_batch_axes
from eqxshard.training import Metrics

KEY = jax.random.key(0)
ROWS, TIMES, DIM, STEPS = 16, 4, 8, 3
#: The step of which a loss is not finite, under `nonfinite="skip"`.
BAD_STEP = 1
#: The step before which a run is saved and restored.
RESUME_STEP = 2


# Models: from a batch of sequences to a batch of vectors


class Mlp(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key, dtype=None):
        self.mlp = eqx.nn.MLP(DIM, DIM, 16, 1, dtype=dtype, key=key)

    def __call__(self, batch):
        x = jnp.mean(batch["x"], axis=1).astype(self.mlp.layers[0].weight.dtype)
        return jax.vmap(self.mlp)(x)


class Convolved(eqx.Module):
    conv: eqx.nn.Conv1d

    def __init__(self, key, **options):
        self.conv = eqx.nn.Conv1d(DIM, DIM, key=key, **options)

    def __call__(self, batch):
        return jnp.mean(jnp.tanh(jax.vmap(self.conv)(batch["x"].mT)), axis=2)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        # A bias would have a gradient of rounding alone.
        self.linear = eqx.nn.Linear(DIM, DIM, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(DIM, "rows", mode="batch")

    def __call__(self, batch, state):
        def one(x, state):
            return self.norm(self.linear(x), state)

        over_rows = jax.vmap(one, (0, None), (0, None), axis_name="rows")
        # Equinox itself mixes the types of the input and of its averages.
        with jax.numpy_dtype_promotion("standard"):
            return over_rows(jnp.mean(batch["x"], axis=1), state)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(DIM, DIM, key=key)

    def __call__(self, batch):
        def one(x):
            step = lambda hidden, x: (self.cell(x, hidden), None)  # noqa: E731
            return jax.lax.scan(step, jnp.zeros(DIM, x.dtype), x)[0]

        return jax.vmap(one)(batch["x"])


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        table = eqx.nn.Embedding(DIM, DIM, key=key)
        head = eqx.nn.Linear(DIM, DIM, key=key)
        self.shared = eqx.nn.Shared(
            (table, head), lambda both: both[1].weight, lambda both: both[0].weight
        )

    def __call__(self, batch):
        table, head = self.shared()
        x = jnp.mean(batch["x"] + jax.vmap(jax.vmap(table))(batch["ids"]), axis=1)
        return jax.vmap(head)(jnp.tanh(x))


class Experts(eqx.Module):
    router: eqx.nn.Linear
    experts: eqx.nn.Linear

    def __init__(self, key):
        make = lambda key: eqx.nn.Linear(DIM, DIM, key=key)  # noqa: E731
        self.router = eqx.nn.Linear(DIM, 4, key=key)
        self.experts = eqx.filter_vmap(make)(jax.random.split(key, 4))

    def __call__(self, batch):
        x, logits = batch["x"], jax.vmap(jax.vmap(self.router))(batch["x"])
        # In 16 bits, rounding may choose another expert, unless all four are chosen.
        k = 4 if x.dtype.itemsize == 2 else 2
        mixture = mixture_of_experts(self.experts, x, logits, k=k)
        return jnp.mean(mixture.output, axis=1)


class Complex(eqx.Module):
    weight: jax.Array
    scale: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (DIM, DIM), complex)
        self.scale = jnp.ones(DIM)

    def __call__(self, batch):
        x = jnp.mean(batch["x"], axis=1).astype(self.weight.dtype) @ self.weight
        scale = self.scale.astype(jnp.real(x).dtype)
        return jnp.abs(x) + jax.vmap(lambda x: jnp.real(x) * scale)(x)


class Layer(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(DIM, DIM, key=key)

    def __call__(self, x):
        return x + jnp.tanh(jax.vmap(self.linear)(x))


class Layered(eqx.Module):
    """Stacked layers; `around` is a transformation of the function that applies them."""

    layers: Layer
    remat: Any = eqx.field(static=True)
    around: Any = eqx.field(static=True)

    def __init__(self, key, remat="full", around=lambda apply: apply):
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(key, 3))
        self.remat, self.around = remat, around

    def __call__(self, batch):
        apply = self.around(ft.partial(eqxshard.scan_layers, remat=self.remat))
        return apply(self.layers, jnp.mean(batch["x"], axis=1))


def row_by_row(apply):
    return jax.vmap(lambda layers, x: apply(layers, x[None])[0], (None, 0))


class Listed(eqx.Module):
    layers: list[Layer]

    def __init__(self, key):
        self.layers = [Layer(key) for key in jax.random.split(key, 3)]

    def __call__(self, batch):
        x = jnp.mean(batch["x"], axis=1)
        for layer in self.layers:
            x = layer(x)
        return x


MODELS: dict[str, Any] = {
    "mlp": Mlp,
    "groups": ft.partial(Convolved, kernel_size=3, groups=2, padding=1),
    "causal": ft.partial(Convolved, kernel_size=4, groups=DIM, padding=[(3, 0)]),
    "batch norm": eqx.nn.make_with_state(Normed),
    "gru": Recurrent,
    "tied": Tied,
    "experts": Experts,
    "complex": Complex,
    "bfloat16": ft.partial(Mlp, dtype=jnp.bfloat16),
    "list": Listed,
    "layers": Layered,
    "layers, none": ft.partial(Layered, remat="none"),
    "layers, dots": ft.partial(Layered, remat="dots"),
    "layers, jit": ft.partial(Layered, around=eqx.filter_jit),
    "layers, checkpoint": ft.partial(Layered, around=eqx.filter_checkpoint),
    "layers, vmap": ft.partial(Layered, around=row_by_row),
}


def widened(x):
    return x.astype(np.promote_types(x.dtype, np.float32))


def loss_fn(pair, batch, key, teacher=None):
    """Losses and a metric, one of each per example, and the state of a model with state."""
    model, *state = pair if isinstance(pair, tuple) else (pair,)
    out = model(batch, *state)
    out, *new = out if state else (out,)
    losses = jnp.sum((widened(out) - widened(batch["y"])) ** 2, axis=-1)
    if teacher is not None:
        taught = teacher(batch, *state)
        taught = taught[0] if state else taught
        losses += jnp.sum((widened(out) - 2 * widened(taught)) ** 2, axis=-1)
    return losses, {"first": widened(out[:, 0]) ** 2}, *new


# Options


def foreign():
    mesh = jax.make_mesh((2, 4), ("rows", "parts"), axis_types=(AxisType.Auto,) * 2)
    return name_batch_axes(mesh, ("rows", "parts"))


MESHES: dict[str, Any] = {
    "data=8": ft.partial(eqxshard.make_mesh, data=8),
    "fsdp=8": ft.partial(eqxshard.make_mesh, data=1, fsdp=8),
    "data=2,tensor=4": ft.partial(eqxshard.make_mesh, data=2, tensor=4),
    "data=2,fsdp=2,context=2": ft.partial(eqxshard.make_mesh, data=2, fsdp=2, context=2),
    "explicit": ft.partial(eqxshard.make_mesh, data=2, fsdp=4, explicit=True),
    "foreign": foreign,
    "data=4": lambda: eqxshard.make_mesh(data=4, devices=jax.devices()[:4]),
    "data=1": lambda: eqxshard.make_mesh(data=1, devices=jax.devices()[:1]),
}
#: Another one, of other devices, on which a run may go on.
OTHER_MESH = ft.partial(eqxshard.make_mesh, data=1, fsdp=2, tensor=2)
#: By name: the optimizer's own options are mild, so that they do not amplify rounding.
OPTIMS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-2, eps=1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "ema": optax.chain(optax.sgd(0.1), eqxshard.ema_weights(0.9)),
}
#: By name, of which the first is the default.
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "mesh": tuple(MESHES),
    "rule": ("replicate", "fsdp", "zero1", "offload", "tensor"),
    "optim": tuple(OPTIMS),
    "weights": ("none", "__weight__", "__loss_weight__"),
    "precision": ("none", "float64", "bfloat16", "bfloat16, but y", "float16"),
    "trainable": ("all", "matrices"),
    "accumulate": (1, 2),
    "nonfinite": ("skip", "ignore", "raise"),
    "resume": ("no", "same mesh", "other mesh"),
    "grad_norms": (False, True),
    "many": (False, True),
    "extra": (False, True),
    "placed": (False, True),
}


#: Pairs of values that a step refuses.
REFUSED: tuple[dict[str, Any], ...] = (
    # A loss scale is found by steps that are not finite.
    {"precision": "float16", "nonfinite": "ignore"},
    {"precision": "float16", "nonfinite": "raise"},
    # Padded rows would be in the statistics.
    {"model": "batch norm", "weights": "__weight__"},
)
#: Pairs that no case has.
LEFT_OUT: tuple[dict[str, Any], ...] = (
    *REFUSED,
    # JAX refuses a lookup on Explicit axes without `out_sharding=`, which Equinox's
    # Embedding does not give.
    {"model": "tied", "mesh": "explicit"},
)


def fits(case):
    return not any(pair.items() <= case.items() for pair in LEFT_OUT)


def pairs_of(case):
    """The pairs of values in a case."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def all_pairs():
    """Cases that hold every pair of values that fits: a greedy choice, always the same."""
    every = [(name, value) for name in FACTORS for value in FACTORS[name]]
    two = map(dict, itertools.combinations(every, 2))
    left = {frozenset(pair.items()): pair for pair in two if len(pair) == 2 and fits(pair)}
    cases, used = [], collections.Counter()

    def value_of(case):
        pairs = pairs_of(case)
        # Of cases with as many new pairs, take the one whose other pairs were seen least.
        return len(pairs & left.keys()), -sum(used[pair] for pair in pairs)

    while left:
        case = next(iter(left.values()))
        for name in FACTORS:
            if name not in case:
                options = (case | {name: value} for value in FACTORS[name])
                case = max(filter(fits, options), key=value_of)
        for pair in pairs_of(case):
            used[pair] += 1
            left.pop(pair, None)
        cases.append({name: case[name] for name in FACTORS})
    return cases


CASES = {
    f"{i}, {case['model']}, {case['mesh']}": case for i, case in enumerate(all_pairs())
}


def make_rule(name, mesh):
    ours = "data" in mesh.axis_names
    split = eqxshard.fsdp(min_size=1, axis="fsdp" if ours else "parts")
    features = eqxshard.fsdp(min_size=1, axis="tensor" if ours else "parts")
    return {
        "replicate": eqxshard.replicate(),
        "fsdp": split,
        "zero1": eqxshard.zero1(min_size=1, axis="data" if ours else "rows"),
        "offload": eqxshard.offload(split),
        "tensor": eqxshard.combine(features, split),
    }[name]


def make_precision(case):
    name = case["precision"]
    if name == "none":
        return None
    if name == "float64":
        return eqxshard.Precision(jnp.float64, jnp.float64)
    params = jnp.bfloat16 if case["model"] == "bfloat16" else jnp.float32
    dtype, *but = name.split(", ")
    kept = (r"^batch\.y$",) if but else ()
    # With a scale at which no gradient of these overflows.
    return eqxshard.Precision(dtype, params, initial_scale=2.0**6, compute_except=kept)


def is_trained(case):
    """The filter spec of trained parameters."""
    if case["trainable"] == "all":
        return eqx.is_inexact_array
    return lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim > 1


def make_batch(case, step):
    rng = np.random.default_rng(step)
    batch = {
        "x": rng.normal(size=(ROWS, TIMES, DIM)).astype(np.float32),
        "y": rng.normal(size=(ROWS, DIM)).astype(np.float32),
        "ids": rng.integers(0, DIM, (ROWS, TIMES), np.int32),
    }
    if case["nonfinite"] == "skip" and step == BAD_STEP:
        batch["y"][5] = np.inf
    if case["weights"] == "__weight__":
        weight = np.where(np.arange(ROWS) < 13, 1 + np.arange(ROWS) / 8, 0)
        batch["__weight__"] = weight.astype(np.float32)
        batch["x"][13:] = np.nan
    if case["weights"] == "__loss_weight__":
        batch["__loss_weight__"] = np.arange(ROWS, dtype=np.float32) % 3
    if case["precision"] == "float64":
        batch = {name: x if name == "ids" else x.astype(float) for name, x in batch.items()}
    return batch


def calls(case):
    """The steps of each run, and of each call in it."""
    runs = [range(STEPS)]
    if case["resume"] != "no":
        runs = [range(RESUME_STEP), range(RESUME_STEP, STEPS)]
    return [[run] if case["many"] else [[step] for step in run] for run in runs]


def train(case, folder):
    """The metrics of each step, and the states before and after them."""
    optim, mesh = lenient(OPTIMS[case["optim"]]), MESHES[case["mesh"]]()
    given: dict[str, Any] = {
        "make_model": MODELS[case["model"]],
        "optim": optim,
        "key": KEY,
        "trainable": is_trained(case),
        "precision": make_precision(case),
    }
    state = eqxshard.init_state(**given, mesh=mesh, rule=make_rule(case["rule"], mesh))
    before = arrays_of(state.model, state.model_state, state.opt_state)
    before = {path: np.array(x) for path, x in before.items()}
    first, *rest = calls(case)
    state, found = take_steps(case, optim, mesh, state, first)
    for run in rest:
        with contextlib.closing(eqxshard.Checkpointer(folder)) as checkpointer:
            checkpointer.save(state)
            checkpointer.wait()
            if case["resume"] == "other mesh":
                mesh = OTHER_MESH(devices=jax.devices()[4:])
            rule = make_rule(case["rule"], mesh)
            like = eqxshard.abstract_state(**given, mesh=mesh, rule=rule)
            state = checkpointer.restore(like)
        state, more = take_steps(case, optim, mesh, state, run)
        found += more
    after = arrays_of(state.model, state.model_state, state.opt_state)
    return Metrics.stack(found), before, after


def take_steps(case, optim, mesh, state, run):
    """The state after some calls of a step, and the metrics of each."""
    options = {name: case[name] for name in ("accumulate", "nonfinite", "grad_norms")}
    step = eqxshard.make_train_step(loss_fn, optim, lint="off", **options)
    found = []
    with compiles("train_steps" if case["many"] else "train_step") as events:
        for steps in run:
            batches: Any = [make_batch(case, number) for number in steps]
            batch = stack(batches) if case["many"] else batches[0]
            if case["placed"]:
                batch = jax.device_put(batch, batch_sharding(mesh, stacked=case["many"]))
            extra = (state.model,) if case["extra"] else ()
            state, metrics = (step.many if case["many"] else step)(state, batch, *extra)
            found.append(jax.device_get(metrics))
    assert events.count("backend_compile_duration") == 1
    return state, found


def arrays_of(*trees):
    """The arrays by path."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(trees, eqx.is_array))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# By hand


def train_by_hand(case):
    """Like `train`; the metrics are a list of dicts."""
    pair = MODELS[case["model"]](KEY)
    model, state = pair if isinstance(pair, tuple) else (pair, None)
    precision = make_precision(case)
    if precision is not None:
        model = cast(model, precision.params)
    optim = lenient(OPTIMS[case["optim"]])
    opt_state, found = optim.init(eqx.filter(model, is_trained(case))), []
    update, teacher = eqx.filter_jit(ft.partial(update_by_hand, case, optim)), model
    firsts = {call[0] for run in calls(case) for call in run}
    for step in range(STEPS):
        if step in firsts:
            teacher = model
        batch = make_batch(case, step)
        new, metrics = update((model, opt_state, state), batch, teacher)
        found.append(metrics)
        if case["nonfinite"] != "skip" or step != BAD_STEP:
            model, opt_state, state = new
    return found, arrays_of(model, state, opt_state)


def update_by_hand(case, optim, state, batch, teacher):
    model, opt_state, model_state = state
    params, rest = eqx.partition(model, is_trained(case))
    weight = batch.get("__weight__", jnp.ones(ROWS))
    loss_weight = batch.get("__loss_weight__", weight)
    # Padded rows are nan.
    batch = {
        name: jnp.nan_to_num(batch[name], posinf=jnp.inf) for name in ("x", "y", "ids")
    }
    given = batch, teacher if case["extra"] else None
    # A model with state sees microbatches, each of every second row.
    count = case["accumulate"] if model_state is not None else 1

    def mean_loss(params):
        model, (whole, extra) = eqx.combine(params, rest), given
        if case["precision"] not in ("none", "float64"):
            dtype, *but = case["precision"].split(", ")
            kept = whole["y"]
            model, whole, extra = cast((model, whole, extra), dtype)
            whole = {**whole, "y": kept} if but else whole
        state, loss, first = model_state, 0, 0
        for i in range(count):
            part = {name: x[i::count] for name, x in whole.items()}
            pair = model if state is None else (model, state)
            losses, metrics, *new = loss_fn(pair, part, KEY, extra)
            state = new[0] if new else None
            loss += jnp.sum(losses * loss_weight[i::count]) / jnp.sum(loss_weight)
            first += jnp.sum(metrics["first"] * weight[i::count]) / jnp.sum(weight)
        return loss, ({"loss": loss, "first": first}, state)

    grads, (metrics, model_state) = jax.grad(mean_loss, has_aux=True)(params)
    # JAX's gradient of a complex number is the conjugate of the direction of ascent.
    grads = jax.tree.map(jnp.conj, grads)
    norm = optax.tree.norm(jax.tree.map(lambda x: widened(jnp.abs(x)), grads))
    updates, opt_state = optim.update(grads, opt_state, params)
    model = eqx.combine(optax.apply_updates(params, updates), rest)
    return (model, opt_state, model_state), metrics | {"grad_norm": norm}


def cast(tree, dtype):
    def one(leaf):
        real = eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if real else leaf

    return jax.tree.map(one, tree)


def check(case, folder):
    with jax.enable_x64(case["precision"] == "float64"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            metrics, start, now = train(case, folder)
        expected, end = train_by_hand(case)
    by_precision = {"none": 16 if case["model"] == "bfloat16" else 32, "float64": 64}
    bits = by_precision.get(case["precision"], 16)
    bad = np.arange(STEPS) == (BAD_STEP if case["nonfinite"] == "skip" else STEPS)
    np.testing.assert_array_equal(metrics.nonfinite, bad)
    names = {"loss", "first"} | ({"grad_norm"} if case["grad_norms"] else set())
    assert metrics.totals.keys() == names
    rtol = {16: 3e-2, 32: 1e-4, 64: 1e-10}[bits]
    for name in names:
        values = np.array([each[name] for each in expected])[~bad]
        atol = rtol * np.max(np.abs(values))
        np.testing.assert_allclose(metrics[name][~bad], values, 0, atol, err_msg=name)
    assert now.keys() == start.keys() == end.keys()
    rtol = {16: 1e-1, 32: 1e-3, 64: 1e-9}[bits]
    rounding = {16: 1e-6, 32: 1e-6, 64: 1e-14}[bits]
    for path, array in now.items():
        # The error in the norm, relative to the change by the steps.
        found, was, wanted = map(wide, (array, start[path], end[path]))
        assert array.dtype == end[path].dtype
        limit = rtol * size(wanted - was) + rounding
        limit += size(wanted) * (2**-8 if array.dtype == jnp.bfloat16 else rounding)
        assert size(found - wanted) <= limit, path


def wide(x):
    return np.asarray(x).astype(complex)


def size(x):
    return np.linalg.norm(x.ravel())


@pytest.mark.parametrize("name", graded(CASES, slow=[*CASES][1::40]))
def test_pairs_of_options_train_as_by_hand(name, tmp_path):
    check(CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: ", ".join(pair.values()))
def test_other_pairs_are_refused_in_a_sentence(pair, tmp_path):
    with pytest.raises(ValueError, match="; "):
        train(next(iter(CASES.values())) | pair, tmp_path)
