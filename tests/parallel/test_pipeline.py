import functools as ft
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard import testing
from eqxshard.parallel import pipeline, pipeline_loss

WIDTH, LAYERS, ROWS = 16, 8, 32
KEY = jax.random.key(7)
#: Programs that run for milliseconds should not compile for seconds.
UNOPTIMISED: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
RULE = eqxshard.first_match(
    eqxshard.by_path({r"^layers\.": P("stage")}), eqxshard.replicate()
)


class Layer(eqx.Module):
    """Hard for a schedule: not defined at zero, dropout, an array of integers."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    order: jax.Array
    activation: Callable[..., Any]

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key)
        self.dropout = eqx.nn.Dropout(0.2)
        self.order = jnp.arange(WIDTH)[::-1]
        self.activation = jnp.tanh

    def __call__(self, h, key=None):
        unit = h[self.order] / jnp.linalg.norm(h)
        return h + self.dropout(self.activation(self.linear(unit)), key=key)


class Apply(eqx.Module):
    """A layer that is a function of its parameter and the activations."""

    param: jax.Array
    fn: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, h):
        return self.fn(self.param, h)


class Head(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, 4, use_bias=False, key=key)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, h, key=None):
        return self.linear(self.dropout(h, key=key))


class Model(eqx.Module):
    embed: eqx.nn.Linear
    layers: Layer
    head: Head

    def __init__(self, key, layers=LAYERS):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(8, WIDTH, key=k1)
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(k2, layers))
        self.head = Head(k3)


@ft.cache
def make_model():
    return eqx.filter_jit(Model)(KEY)


def squared_error(head, h, target, key=None):
    return jnp.sum((head(h, key=key) - target) ** 2)


def gpipe(model, batch, key, microbatches):
    h = pipeline(
        model.layers, jax.vmap(model.embed)(batch["x"]), microbatches=microbatches, key=key
    )
    keys = None
    if key is not None:
        # The keys of pipeline_loss, so that both schedules compute the same.
        key = jax.random.fold_in(key, LAYERS)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(h)))
    return jax.vmap(ft.partial(squared_error, model.head))(h, batch["y"], keys)


def one_f_one_b(model, batch, key, microbatches):
    return pipeline_loss(
        squared_error,
        model.layers,
        model.head,
        jax.vmap(model.embed)(batch["x"]),
        batch["y"],
        microbatches=microbatches,
        weight=batch["weight"],
        key=key,
    )


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def mean_loss(schedule, model, batch, key, microbatches):
    """The mean that a step takes."""
    losses = SCHEDULES[schedule](model, batch, key, microbatches)
    if losses.ndim == 0:
        return losses
    return jnp.sum(losses * batch["weight"]) / jnp.sum(batch["weight"])


def make_mesh(**sizes):
    sizes = {"data": 1, **sizes}
    return eqxshard.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def make_batch(rows=ROWS, seed=0):
    # Some examples count twice, some not at all.
    return helpers.make_batch(rows, seed, weight=np.arange(rows) % 3)


def on(mesh, fn):
    """Call `fn` as in a step on a mesh, or without one."""
    if mesh is None:
        return fn

    def inside(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args)

    return inside


def place(model, batch, mesh, rule=RULE):
    if mesh is None:
        return model, batch
    model = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, rule))
    return model, jax.device_put(batch, eqxshard.batch_sharding(mesh))


def compile_grad(schedule, mesh, microbatches, *, model, batch, key, rule=RULE):
    """The compiled gradient, and a function that runs it."""
    model, batch = place(model, batch, mesh, rule)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch, key):
        model = eqx.combine(params, static)
        # Squared, so that the gradient that comes back is not 1.
        return mean_loss(schedule, model, batch, key, microbatches) ** 2

    grad = jax.jit(jax.value_and_grad(on(mesh, loss)))
    compiled = grad.lower(params, batch, key).compile(UNOPTIMISED)
    return compiled, lambda: compiled(params, batch, key)


@ft.cache
def expected():
    """The loss and gradients on one device, where the schedule makes no difference."""
    _, run = compile_grad(
        "gpipe", None, 1, model=make_model(), batch=make_batch(), key=jax.random.key(1)
    )
    return run()


@ft.cache
def pipelined(schedule, microbatches, **sizes):
    compiled, run = compile_grad(
        schedule,
        make_mesh(**sizes),
        microbatches,
        model=make_model(),
        batch=make_batch(),
        key=jax.random.key(1),
    )
    return compiled, run()


def relative(tree, other):
    """The largest difference in a PyTree, relative to the largest value of its leaf.

    Over the shards of all devices, because replicas could differ.
    """
    found = []
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    for leaf, expected in pairs:
        expected = np.asarray(expected)
        for part in jnp.asarray(leaf).addressable_shards:
            difference = np.abs(np.asarray(part.data) - expected[part.index])
            found.append(np.max(difference) / np.max(np.abs(expected)))
    return np.max(found)  # nan if one of them is


# The same on every mesh


def test_without_a_mesh_layers_are_applied_in_turn():
    model, batch = eqx.nn.inference_mode(make_model()), make_batch()

    def by_hand(model):
        arrays, static = eqx.partition(model.layers, eqx.is_array)

        def apply(h, layer):
            return jax.vmap(eqx.combine(layer, static))(h), None

        h, _ = jax.lax.scan(apply, jax.vmap(model.embed)(batch["x"]), arrays)
        losses = jnp.sum((jax.vmap(model.head)(h) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(losses * batch["weight"]) / jnp.sum(batch["weight"])

    def pipelined(schedule, model):
        return mean_loss(schedule, model, batch, None, 4)

    fns = (by_hand, *(ft.partial(pipelined, schedule) for schedule in SCHEDULES))
    grads = eqx.filter_jit(lambda model: [eqx.filter_value_and_grad(f)(model) for f in fns])
    expected, *results = grads(model)
    for result in results:
        assert relative(result, expected) < 1e-6


FAST = [("gpipe", 4, dict(stage=4, data=2)), ("1f1b", 8, dict(stage=4, data=2))]
SLOW = [
    (schedule, microbatches, sizes)
    for sizes in (
        dict(stage=1),
        dict(stage=2),
        dict(stage=4),
        dict(stage=8),
        dict(stage=2, data=2),
        dict(stage=4, data=2),
        dict(stage=2, data=2, fsdp=2),
    )
    for microbatches in (4, 8)
    for schedule in SCHEDULES
    if (schedule, microbatches, sizes) not in FAST
]


@pytest.mark.parametrize(
    "schedule, microbatches, sizes",
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_loss_and_gradients_equal_one_device(schedule, microbatches, sizes):
    _, (loss, grads) = pipelined(schedule, microbatches, **sizes)
    expected_loss, expected_grads = expected()
    assert relative(loss, expected_loss) < 1e-6
    assert relative(grads, expected_grads) < 1e-6


class Draw(eqx.Module):
    """A layer that draws a number from its key, and writes it to its own entry."""

    entry: jax.Array

    def __call__(self, h, key):
        return h + jnp.where(self.entry, jax.random.uniform(key), 0)


def test_each_layer_and_example_has_its_own_key_on_any_mesh():
    layers, x, key = Draw(jnp.eye(4, dtype=bool)), jnp.zeros((16, 4)), jax.random.key(0)

    def drawn(mesh, microbatches):
        placed = x if mesh is None else jax.device_put(x, eqxshard.batch_sharding(mesh))
        draw = ft.partial(pipeline, microbatches=microbatches, key=key)
        return np.asarray(jax.jit(on(mesh, lambda x: draw(layers, x)))(placed))

    values = drawn(None, 1)
    assert len(np.unique(values)) == values.size
    np.testing.assert_array_equal(drawn(make_mesh(stage=2, data=2), 4), values)


@pytest.mark.slow
def test_other_mesh_axes_are_left_to_the_compiler():
    weights = eqxshard.by_path({r"^layers.*weight": P("stage", "tensor")})
    rule = eqxshard.first_match(weights, RULE)
    mesh = make_mesh(stage=2, data=2, tensor=2)
    model, batch, key = make_model(), make_batch(), jax.random.key(1)
    _, run = compile_grad("1f1b", mesh, 4, model=model, batch=batch, key=key, rule=rule)
    loss, grads = run()
    assert relative((loss, grads), expected()) < 1e-6
    assert grads.layers.linear.weight.sharding.spec[:2] == ("stage", "tensor")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_may_use_collectives_along_other_axes(schedule):
    # If stages did different things at a time, their layers' messages would get mixed up.
    def ring(h):
        size = jax.lax.axis_size("context")
        ahead = [(i, (i + 1) % size) for i in range(size)]
        return jax.lax.ppermute(h, "context", ahead)

    def on_ring(scale, h):
        spec = P("context")
        send = jax.shard_map(ring, in_specs=spec, out_specs=spec, axis_names={"context"})
        return jnp.sin(scale * h + send(h))

    def rolled(scale, h):
        return jnp.sin(scale * h + jnp.roll(h, 2))

    def grad(fn, mesh):
        def loss(scales, x):
            layers = Apply(scales, fn)
            if schedule == "gpipe":
                return jnp.mean(pipeline(layers, x, microbatches=4) ** 2)
            loss_fn = lambda head, h, target: jnp.mean(h**2)  # noqa: E731
            return pipeline_loss(loss_fn, layers, None, x, None, microbatches=4)

        scales, x = jnp.linspace(1, 2, 4), jax.random.normal(KEY, (8, 8))
        if mesh is not None:
            scales = jax.device_put(scales, NamedSharding(mesh, P("stage")))
            x = jax.device_put(x, eqxshard.batch_sharding(mesh))
        return jax.jit(jax.value_and_grad(on(mesh, loss), (0, 1)))(scales, x)

    mesh = make_mesh(stage=2, context=4)
    assert relative(grad(on_ring, mesh), grad(rolled, None)) < 1e-6


def train(schedule, mesh, steps=20):
    # Made here, not while tracing, because it is cached.
    model, optim = make_model(), helpers.lenient(optax.sgd(0.02))
    state = eqxshard.init_state(lambda key: model, optim, key=KEY, mesh=mesh, rule=RULE)
    train_step = eqxshard.make_train_step(
        ft.partial(SCHEDULES[schedule], microbatches=4), optim, mesh=mesh, rule=RULE
    )
    losses = []
    for step in range(steps):
        state, metrics = train_step(state, make_batch(seed=step % 4))
        losses.append(metrics["loss"])
    return np.array(losses), eqx.filter(state.model, eqx.is_inexact_array)


@ft.cache
def trained_on_one_device():
    return train("gpipe", make_mesh())


@pytest.mark.parametrize(
    "schedule, sizes",
    [
        ("1f1b", dict(stage=4, data=2)),
        pytest.param("gpipe", dict(stage=4, data=2), marks=pytest.mark.slow),
        *(
            pytest.param(schedule, sizes, marks=pytest.mark.slow)
            for sizes in (dict(stage=2), dict(stage=8), dict(stage=2, data=2))
            for schedule in SCHEDULES
        ),
    ],
)
def test_training_equals_one_device(schedule, sizes):
    losses, model = train(schedule, make_mesh(**sizes))
    expected_losses, expected_model = trained_on_one_device()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert losses[-1] < 0.9 * losses[3]
    assert relative(model, expected_model) < 1e-5
    weight = model.layers.linear.weight
    assert {part.data.shape[0] for part in weight.addressable_shards} == {
        LAYERS // sizes["stage"]
    }


def test_without_gradients_the_loss_is_the_same():
    mesh = make_mesh(stage=4, data=2)
    model, batch = place(make_model(), make_batch(), mesh)
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, batch, key):
        return one_f_one_b(eqx.combine(arrays, static), batch, key, 4)

    value = jax.jit(on(mesh, loss))(arrays, batch, jax.random.key(1))
    assert relative(value**2, expected()[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_activations(schedule):
    def to(dtype, tree):
        return jax.tree.map(
            lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, tree
        )

    batch = jax.tree.map(jnp.asarray, make_batch())
    model = to(jnp.bfloat16, eqx.nn.inference_mode(make_model()))
    batch |= to(jnp.bfloat16, {"x": batch["x"], "y": batch["y"]})

    def run(schedule, mesh):
        compiled = compile_grad(schedule, mesh, 4, model=model, batch=batch, key=None)
        return to(jnp.float32, compiled[1]())

    with jax.numpy_dtype_promotion("standard"):
        result, expected = run(schedule, make_mesh(stage=4, data=2)), run("1f1b", None)
    assert relative(result, expected) < 0.03


# Communication and memory


@pytest.mark.parametrize("schedule, microbatches, sizes", FAST)
def test_collectives(schedule, microbatches, sizes):
    compiled, _ = pipelined(schedule, microbatches, **sizes)
    stages, data = sizes["stage"], sizes["data"]
    found = testing.collectives(compiled)
    # The activations of a microbatch, once for each tick forward and each tick backward.
    sent = [op for op in found.ops if op.kind == "collective-permute"]
    for op in sent:
        assert op.shapes == (f"f32[{ROWS // data // microbatches},{WIDTH}]",)
    ticks = [op.times for op in sent]
    if schedule == "gpipe":
        assert ticks == [microbatches + stages - 1] * 2
    else:
        assert Counter(ticks) == Counter([stages - 1] * 2 + [microbatches] * 2)
    # Weights stay where they are. Activations and gradients are summed once, at the end.
    assert found.counts.keys() == {"collective-permute", "all-reduce"}
    assert all(op.times == 1 for op in found.ops if op.kind == "all-reduce")


def temporary_bytes(schedule, rows, microbatches, width=64, layers=16):
    """The temporary memory of gradients on 4 stages."""

    def struct(spec, *shape):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    mesh = make_mesh(stage=4)
    param = struct(P("stage"), layers, width, width)
    stack: Any = Apply(param, lambda weight, h: jax.nn.gelu(weight @ h))  # pyright: ignore
    x = struct(P(("data", "fsdp")), rows, width)

    def gpipe(stack, x):
        return jnp.mean(pipeline(stack, x, microbatches=microbatches))

    def one_f_one_b(stack, x):
        return pipeline_loss(
            lambda head, h, target: jnp.mean(h),
            stack,
            None,
            x,
            None,
            microbatches=microbatches,
        )

    loss = {"gpipe": gpipe, "1f1b": one_f_one_b}[schedule]
    grad = jax.jit(jax.grad(on(mesh, loss), (0, 1)))
    memory = grad.lower(stack, x).compile(UNOPTIMISED).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_per_microbatch():
    microbatch = 16 * 64 * 4

    def growth(schedule):
        """Of memory per additional microbatch, in units of its activations."""
        few, many = (temporary_bytes(schedule, 16 * n, n) for n in (4, 16))
        return (many - few) / 12 / microbatch

    # GPipe keeps the input of each of a stage's 4 layers, the stage's input and output,
    # and their gradient; 1F1B at most the gradient of the input.
    assert 5 <= growth("gpipe") < 8
    assert growth("1f1b") <= 1


# Mistakes


def trace(fn, **sizes):
    """Mistakes are found before anything is compiled."""
    return jax.eval_shape(on(make_mesh(**sizes), fn))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_that_do_not_divide(schedule):
    def run(rows=ROWS, microbatches=4, **sizes):
        batch = jax.tree.map(jnp.asarray, make_batch(rows))
        model = make_model()
        trace(lambda: SCHEDULES[schedule](model, batch, KEY, microbatches), **sizes)

    with pytest.raises(ValueError, match=r"8 layers do not divide over stage=3; use a mu"):
        run(stage=3)
    message = (
        r"a batch of 24 does not divide over data=2 x fsdp=2 = 4 devices, each with "
        r"microbatches=4; use a multiple of 16 examples, or fewer microbatches"
    )
    with pytest.raises(ValueError, match=message):
        run(rows=24, stage=2, data=2, fsdp=2)
    with pytest.raises(ValueError, match="microbatches=0 must be at least 1"):
        run(microbatches=0, stage=1)
    # With one stage, there are no microbatches.
    run(rows=7, microbatches=4, stage=1)


X = jnp.ones((8, 4))
SCALE = Apply(jnp.ones(2), lambda scale, h: scale * h)


@pytest.mark.parametrize(
    "layers, shapes",
    [
        ([SCALE, Apply(jnp.ones(3), SCALE.fn)], r"{'0.param': \(2,\), '1.param': \(3,\)}"),
        (Apply(jnp.ones(()), SCALE.fn), r"{'param': \(\)}"),
        (jnp.tanh, "{}"),
    ],
)
def test_layers_that_are_not_stacked(layers, shapes):
    message = (
        rf"shapes {shapes}, without a common .*; stack the layers with eqx.filter_vmap"
    )
    with pytest.raises(ValueError, match=message):
        pipeline(layers, X, microbatches=1)


@pytest.mark.parametrize(
    "fn, kind",
    [
        (lambda scale, h: scale * h[:3], r"float32\[3\]"),
        (lambda scale, h: h.astype(jnp.bfloat16), r"bfloat16\[4\]"),
        (lambda scale, h: (h, h), "a tuple"),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_layers_that_change_the_shape_or_dtype(fn, kind, stage):
    message = rf"a layer takes float32\[4\] for each example and returns {kind}; have it"
    with pytest.raises(ValueError, match=message):
        layers = Apply(jnp.ones(2), fn)
        trace(lambda: pipeline(layers, X, microbatches=2), stage=stage)


def test_losses_and_targets_of_the_wrong_shape():
    def run(fn, target=None, stage=1):
        def loss(x):
            return pipeline_loss(fn, SCALE, None, x, target, microbatches=2)

        trace(lambda: jax.grad(loss)(X), stage=stage)

    message = r"loss_fn returns float32\[4\] for each example; have it return a scalar"
    for stage in (1, 2):
        with pytest.raises(ValueError, match=message):
            run(lambda head, h, target: h, stage=stage)
    with pytest.raises(ValueError, match=r"target.y has the shape \(3,\) for a batch of 8"):
        run(lambda head, h, target: jnp.sum(h), {"y": jnp.ones(3)})


def test_a_batch_without_weight_has_no_loss():
    loss_fn = lambda head, h, target: jnp.sum(h)  # noqa: E731
    x, weight = jnp.full((8, 4), jnp.inf), np.zeros(8)
    assert pipeline_loss(loss_fn, SCALE, None, x, None, microbatches=2, weight=weight) == 0


# Any kind of layer


@pytest.mark.parametrize(
    "fn",
    [
        # A scan that starts from zeros, as in a recurrent network.
        lambda scale, h: jax.lax.scan(lambda c, u: (c + scale * u, c), jnp.zeros(()), h)[1],
        lambda scale, h: eqxshard.constrain(scale * h, P("tensor")),
    ],
    ids=["scan", "constrain"],
)
def test_layers_may_use_scan_and_constrain(fn):
    layers = Apply(jnp.ones(2), fn)

    def gpipe(x):
        return jnp.sum(pipeline(layers, x, microbatches=2))

    def one_f_one_b(x):
        loss_fn = lambda head, h, target: jnp.sum(h)  # noqa: E731
        return pipeline_loss(loss_fn, layers, None, x, None, microbatches=2)

    for loss in (gpipe, one_f_one_b):
        trace(lambda loss=loss: jax.grad(loss)(X), stage=2, data=2, tensor=2)
