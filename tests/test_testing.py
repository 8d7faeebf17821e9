import itertools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RULES, Model, lenient, make_batch, make_mesh, squared_errors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard import testing

#: As Adam, it divides by each element of a gradient; and by norms besides.
LAMB = lenient(optax.lamb(1e-2))
SGD = optax.sgd(0.1)
TWO = [{"data": 2}]


class Affine(eqx.Module):
    """The softmax of its outputs does not depend on `shift`, whose gradient is rounding."""

    weight: jax.Array
    bias: jax.Array
    shift: jax.Array

    def __init__(self, key, width=4):
        # Random numbers take long to compile.
        self.weight = jnp.sin(jnp.arange(8.0 * width).reshape(width, 8))
        self.bias = jnp.zeros(width)
        self.shift = jnp.zeros(8)

    def __call__(self, x):
        return self.weight @ x + self.bias + jnp.sum(self.shift)


def likelihoods(model, batch, key):
    """Minus their logarithms, one for each example."""
    chosen = jnp.argmax(batch["y"], axis=-1)
    logits = jax.vmap(model)(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, chosen)


def squares(model, batch, key):
    return jnp.sum((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def check(**options: Any):
    """With defaults: a model that is right, on two devices."""
    right = {"make_model": Affine, "loss_fn": squares, "batch": make_batch(), "optim": SGD}
    small = {"rules": eqxshard.replicate(), "meshes": TWO, "steps": 2}
    return testing.assert_mesh_invariant(**{**right, **small, **options})


# assert_mesh_invariant: models that are right


def test_a_model_that_is_right_passes_and_the_report_says_how_closely():
    report = check(
        loss_fn=likelihoods,
        optim=LAMB,
        batch=[make_batch(seed=seed) for seed in range(2)],
        rules={"whole": eqxshard.replicate(), "split": eqxshard.fsdp(min_size=8)},
        meshes=[{"data": 2, "fsdp": 4}],
        steps=3,
        accumulate=2,
    )
    assert (report.steps, report.rtol) == (3, 2e-5)
    whole, split = report.rows
    assert (whole.mesh, whole.rule, whole.devices) == ("data=2, fsdp=4", "whole", 8)
    assert (whole.split, split.split, split.arrays) == (0, 2, 3)
    for row in report.rows:
        assert 0 < row.gradients < 2e-6
        assert row.loss < 2e-6
        # The optimizer takes whole steps along a gradient that is nothing but rounding.
        assert row.parameters > 1e-3
    table = str(report)
    assert "data=2, fsdp=4" in table and "2 of 3" in table
    assert f"{split.gradients:.1e}" in table


def test_what_bfloat16_itself_costs_is_no_difference():
    """XLA on CPU adds up the gradient of a bias over two dims in bfloat16, and badly."""

    def loss_fn(model, batch, key):
        errors = jax.vmap(jax.vmap(model))(batch["x"]) - batch["y"]
        return jnp.mean(jnp.sum(errors**2, axis=-1), axis=-1)

    rng = np.random.default_rng(0)
    report = check(
        loss_fn=loss_fn,
        batch={
            "x": rng.normal(size=(32, 32, 8)).astype(np.float32),
            "y": rng.normal(size=(32, 32, 4)).astype(np.float32) + 10,
        },
        optim=optax.sgd(1e-4),
        rules=eqxshard.fsdp(min_size=1),
        meshes={"four": {"data": 2, "fsdp": 2}},
        precision=eqxshard.Precision(compute=jnp.bfloat16),
    )
    (row,) = report.rows
    assert (row.mesh, row.rule, row.devices) == ("four", "fsdp()", 4)
    assert report.rtol == 2e-2 < row.gradients
    assert row.loss < 2e-2


@pytest.mark.slow
def test_the_default_meshes_have_two_to_eight_devices():
    rules = [eqxshard.replicate(), eqxshard.fsdp(min_size=1)]
    report = testing.assert_mesh_invariant(
        Model, squared_errors, make_batch(), LAMB, rules=rules
    )
    assert [row.devices for row in report.rows] == [2, 2, 4, 4, 8, 8, 8, 8, 8, 8]
    assert max(row.split for row in report.rows) == 5
    assert max(row.loss for row in report.rows) < 1e-6


class Attending(eqx.Module):
    """Softmax does not see the bias of the keys, and its gradient is rounding, too."""

    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 8, use_key_bias=True, key=key)

    def __call__(self, x):
        return self.attention(x, x, x)


@pytest.mark.slow
def test_optimizers_that_divide_by_the_size_of_a_gradient_may_divide_by_rounding():
    def loss_fn(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=(1, 2))

    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(32, 8, 8)).astype(np.float32) for name in "xy"}
    report = check(make_model=Attending, loss_fn=loss_fn, batch=batch, optim=LAMB, steps=4)
    assert report.rows[0].gradients < 2e-6


@pytest.mark.slow
def test_the_least_precise_type_says_what_rounding_is():
    assert check(steps=1, precision=eqxshard.Precision(compute="float16")).rtol == 1e-2
    half = lambda key: jax.tree.map(lambda x: x.astype("bfloat16"), Affine(key))  # noqa: E731
    batch = jax.tree.map(lambda x: x.astype("bfloat16"), make_batch())
    assert check(make_model=half, loss_fn=likelihoods, batch=batch, steps=1).rtol == 2e-2


# assert_mesh_invariant: models that are wrong


def random_by_numpy():
    rng = np.random.default_rng()

    def make_model(key):
        weight = rng.normal(size=(4, 8)).astype(np.float32)
        return eqx.tree_at(lambda m: m.weight, Affine(key), jnp.asarray(weight))

    return {"make_model": make_model}


def wider_each_time():
    # Making a state traces twice, for shapes and for values.
    calls = itertools.count()
    return {
        "make_model": lambda key: Affine(key, width=4 + next(calls) // 2),
        "loss_fn": lambda model, batch, key: jnp.sum(model.weight) + batch["x"][:, 0],
    }


def optimizer_that_starts_elsewhere():
    calls = itertools.count()

    def init(params):
        return jax.tree.map(lambda x: jnp.full(x.shape, next(calls), x.dtype), params)

    return {"optim": optax.GradientTransformation(init, optax.identity().update)}


def loss_of_a_counter():
    calls = itertools.count(1)
    return {"loss_fn": lambda m, batch, key: next(calls) * squares(m, batch, key)}


def loss_of_a_counter_that_hardly_counts():
    calls = itertools.count()
    factor = lambda: 1 + 1e-4 * next(calls)  # noqa: E731
    return {"loss_fn": lambda m, batch, key: factor() * squares(m, batch, key)}


def per_device(fn, *args):
    """The first device's result, as if all had the same: what a psum is for."""
    specs = (P(), *[P("data")] * (len(args) - 1))
    return eqxshard.filter_shard_map(fn, None, specs, P(), check_vma=False)(*args)


def mean_of_each_device():
    """In the second batch only does a device's mean differ from that of all."""

    def loss_fn(model, batch, key):
        mean = per_device(lambda model, z: jnp.mean(z), model, batch["z"])
        return squares(model, batch, key) * (1 + mean)

    first, second = make_batch(), make_batch(seed=1)
    return {
        "loss_fn": loss_fn,
        "batch": [{**first, "z": 0 * first["x"]}, {**second, "z": second["x"]}],
    }


def dropout_with_one_key():
    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    def loss_fn(model, batch, key):
        split = eqxshard.filter_shard_map(dropped, None, (P(), P("data")), P("data"))
        return squares(model, {**batch, "x": split(key, batch["x"])}, key)

    return {"loss_fn": loss_fn}


def mask_of_each_device():
    """The rows of the first device do not count, so that its mean is one of nothing."""

    def mean(model, mask):
        return jnp.sum(mask) / jnp.sum(mask)

    def loss_fn(model, batch, key):
        return squares(model, batch, key) * per_device(mean, model, batch["mask"])

    mask = (np.arange(32) >= 16).astype(np.float32)
    return {"loss_fn": loss_fn, "batch": {**make_batch(), "mask": mask}}


def gradient_that_is_not_summed():
    @jax.custom_vjp
    def apply(weight, x):
        return x @ weight.T

    def back(saved, grad):
        weight, x = saved
        summed = per_device(lambda _, grad, x: grad.T @ x, weight, grad, x)
        return summed, grad @ weight

    apply.defvjp(lambda weight, x: (apply(weight, x), (weight, x)), back)

    def loss_fn(model, batch, key):
        return jnp.sum((apply(model.weight, batch["x"]) - batch["y"]) ** 2, axis=-1)

    return {"loss_fn": loss_fn}


def derivative_of_a_counter():
    calls = itertools.count(1)

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, grad: (next(calls) * grad,))
    return {"loss_fn": lambda *args: same(squares(*args))}


def rate_of_a_counter():
    calls = itertools.count(1)

    def update(updates, params):
        rate = -0.01 * next(calls)
        return jax.tree.map(lambda x: rate * x, updates)

    return {"optim": optax.stateless(update)}


def memory_of_a_counter():
    calls = itertools.count(1)

    def update(updates, state, params=None):
        state = jax.tree.map(lambda x: x + next(calls), state)
        return jax.tree.map(lambda x: -0.1 * x, updates), state

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    return {"optim": optax.GradientTransformation(init, update)}


class Averaging(eqx.Module):
    affine: Affine
    mean: eqx.nn.StateIndex


def running_mean_of_each_device():
    def make(key):
        return Averaging(Affine(key), eqx.nn.StateIndex(jnp.zeros(8)))

    def loss_fn(pair, batch, key):
        # A copy, because setting a state uses it up.
        model, state = jax.tree.map(lambda x: x, pair)
        mean = per_device(lambda _, x: jnp.mean(x, axis=0), model.affine, batch["x"])
        return squares(model.affine, batch, key), state.set(model.mean, mean)

    return {"make_model": eqx.nn.make_with_state(make), "loss_fn": loss_fn}


def rounding_made_large():
    """Each step is the same to rounding, and the next makes ten thousand times as much."""

    def loss_fn(model, batch, key):
        return 1 + jnp.sin(1e4 * jax.vmap(model)(batch["x"])[:, 0]) / 2

    return {"loss_fn": loss_fn, "optim": optax.sgd(1e-2)}


BY = "differs from one device's by"
WRONG = {
    random_by_numpy: rf"before step 1: model.weight {BY} .* relative, .* equal bit for "
    r"bit\. make_model .*numpy.random",
    wider_each_time: r"before step 1: model.weight is float32\[5,8\], and float32\[4,8\]",
    optimizer_that_starts_elsewhere: rf"before step 1: opt_state.weight {BY} .* counters",
    loss_of_a_counter: rf"step 1: loss {BY} 1.0e\+00 relative, .* absolute, more than "
    r"rtol=2e-05\. So do others: 3 in gradients\. .* that change between calls\.$",
    loss_of_a_counter_that_hardly_counts: rf"step 1: loss {BY} 1.0e-04 .* be rounding",
    mean_of_each_device: rf"step 2: loss {BY} .*shard_map\) that takes no psum",
    dropout_with_one_key: rf"step 1: loss {BY} .* one key on every device",
    mask_of_each_device: rf"step 1: nonfinite {BY} .*1.0e\+00 absolute.* what may be 0",
    gradient_that_is_not_summed: r"step 1: the gradient of weight \(and 1 more\) is not "
    r"the same on devices that .* no psum or pmean",
    derivative_of_a_counter: rf"step 1: the gradient of weight {BY} .* derivatives of your",
    rate_of_a_counter: rf"step 1: model.weight {BY} .* look at the optimizer",
    memory_of_a_counter: rf"step 1: opt_state.weight {BY} .* what the optimizer keeps",
    running_mean_of_each_device: r"step 1: model_state\S* is not the same on devices that",
    rounding_made_large: rf"step 2 of all in a row: the loss {BY} .* magnifies rounding",
}

#: Of each kind of difference one is quick enough.
SLOW = {
    loss_of_a_counter,
    memory_of_a_counter,
    wider_each_time,
    optimizer_that_starts_elsewhere,
    derivative_of_a_counter,
    dropout_with_one_key,
    mask_of_each_device,
    running_mean_of_each_device,
    loss_of_a_counter_that_hardly_counts,
}


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[pytest.mark.slow] * (make in SLOW)) for make in WRONG],
    ids=lambda make: make.__name__,
)
def test_what_is_wrong_is_named(make):
    with pytest.raises(AssertionError) as error:
        check(**make())
    assert str(error.value).startswith("on the mesh data=2 under replicate(), ")
    assert error.match(WRONG[make])


@pytest.mark.slow
def test_what_is_wrong_is_wrong_in_bfloat16_too():
    precision = eqxshard.Precision(compute=jnp.bfloat16)
    # The loss is too, but no more than bfloat16 makes it.
    with pytest.raises(AssertionError, match=r"step 1: the gradient of weight differs"):
        check(**dropout_with_one_key(), precision=precision)


def test_a_loss_that_is_not_finite_anywhere_compares_to_nothing():
    with pytest.raises(AssertionError, match="step 1: the loss is nan on one device"):
        check(loss_fn=lambda *args: squares(*args) * jnp.nan)


def test_errors_of_others_say_where_they_were():
    with pytest.raises(ValueError, match="batch size 3 does not divide") as error:
        check(batch=make_batch(rows=3))
    assert error.value.__notes__ == ["This was on the mesh data=2 under replicate()."]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"meshes": [{"data": 2, "fsdp": 8}]}, "'jax_num_cpu_devices', 16"),
        ({"meshes": {"all": {"data": -1}}}, r"mesh \{'data': -1\} leaves a size open"),
        ({"meshes": {"data": 2}}, r"is one mesh; write \[\{'data': 2\}\]"),
        ({"meshes": []}, "meshes is empty"),
        ({"rules": []}, "rules is empty"),
        ({"steps": 0}, "0 steps on 1 batches"),
        ({"batch": []}, "2 steps on 0 batches"),
    ],
)
def test_nothing_to_compare_is_an_error(options, message, unannotated):
    with pytest.raises((ValueError, TypeError), match=message):
        check(**options)


# collectives


class Text:
    """Stands for what XLA compiles for other platforms than this one."""

    def __init__(self, text):
        self.text = text

    def lower(self):
        return self

    def compile(self):
        return self

    def as_text(self):
        return self.text


#: As XLA writes it for a GPU: asynchronous, combined, and in loops.
GPU = """
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %x, f32[] %y), metadata={op_name="all-reduce(x)"}
}

%inner (p: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %scatter = ((bf16[32]{0}), bf16[4]{0}) reduce-scatter-start(bf16[32]{0} %q), to_apply=%add
  ROOT %done.1 = bf16[4]{0} reduce-scatter-done(%scatter)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = (f32[2,4]{1,0:T(8,128)}, f32[16,4]{1,0:T(8,128)}) all-gather-start(f32[2,4] %p)
  %all-gather-done.7 = f32[16,4]{1,0:T(8,128)} all-gather-done(%start)
  %loop = (s32[]) while(%t), condition=%test, body=%inner, THREE
}

%unbounded (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %permute = (pred[3]{0}, /*index=1*/s4[5]{0}) collective-permute-done(%other)
}

%test (p: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(s32[] %a, s32[] %b), direction=LT
}

ENTRY %main.3_spmd (p: f32[8]) -> f32[8] {
  %reduced = (f32[4]{0}, f32[], /*index=2*/c64[2]{0}) all-reduce(%a, %b, %c), to_apply=%add
  %loop.1 = (s32[]) while(%t), condition=%test, body=%body, FIVE
  %loop.2 = (s32[], f32[8]{0}) while(%tuple), condition=%test, body=%unbounded
  ROOT %all-to-all.1 = u8[7]{0} all-to-all(u8[7]{0} %all-reduce.9), metadata={op_name="x"}
}
"""
for word, times in {"THREE": 3, "FIVE": 5}.items():
    trips = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    GPU = GPU.replace(word, trips)


def test_asynchronous_and_combined_collectives_are_one_each():
    found = testing.collectives(Text(GPU))
    ops = {op.kind: op for op in found.ops}
    assert len(ops) == len(found.ops) == 5
    assert ops["all-reduce"].shapes == ("f32[4]", "f32[]", "c64[2]")
    assert ops["all-gather"].shapes == ("f32[16,4]",)
    assert found.bytes == {
        "all-reduce": 4 * 4 + 4 + 2 * 8,
        "all-gather": 16 * 4 * 4,
        "reduce-scatter": 4 * 2,
        "all-to-all": 7,
        "collective-permute": 3 + 3,
    }
    assert found.counts == dict.fromkeys(found.bytes, 1)
    assert found.times == {
        "all-reduce": 1,
        "all-gather": 5,
        "reduce-scatter": 15,
        "all-to-all": 1,
        "collective-permute": None,
    }


def test_no_collectives_are_none():
    found = testing.assert_collectives(Text("HloModule jit_f\n"))
    assert (found.ops, str(found)) == ((), "no collectives")


@pytest.fixture(scope="module")
def split():
    """A state that is split, its step, and a batch."""
    mesh, rule = make_mesh("data=2,fsdp=4"), RULES["fsdp"]
    options: Any = {"mesh": mesh, "rule": rule}
    state = eqxshard.init_state(Affine, SGD, key=jax.random.key(0), **options)
    return state, eqxshard.make_train_step(squares, SGD, **options), make_batch()


def test_what_a_step_sends_is_what_theory_asks_for(split):
    state, step, batch = split
    compiled = step.lower(state, batch).compile()
    found = testing.collectives(compiled)
    assert found.counts.keys() == {"all-gather", "all-reduce"}
    gathered = {shape for op in found.ops if op.kind == "all-gather" for shape in op.shapes}
    assert gathered == {"f32[4,8]", "f32[4]", "f32[8]"}
    assert found.bytes["all-gather"] == 4 * (32 + 4 + 8)
    assert found.times == found.counts
    assert testing.assert_collectives(compiled, exactly=found.counts) == found
    reduces = found.counts["all-reduce"]
    found = testing.assert_collectives(
        compiled, exactly={"all-gather": 3}, at_most={"all-reduce": reduces + 1}
    )
    with pytest.raises(AssertionError) as error:
        testing.assert_collectives(compiled, at_most={"all-gather": 2})
    assert "has 3 all-gathers where at most 2 may be; " in str(error.value)
    assert f"{reduces} all-reduces where none may be" in str(error.value)
    assert "f32[4,8]" in str(error.value) and "128" in str(error.value)
    with pytest.raises(AssertionError, match="3 all-gathers where there must be 4"):
        testing.assert_collectives(
            compiled, exactly={"all-gather": 4}, at_most={"all-reduce": reduces}
        )


def test_a_collective_in_a_loop_is_one_that_runs_often():
    mesh = make_mesh("fsdp=8")

    @eqxshard.filter_jit
    def powers(x):
        def body(x, _):
            x = eqxshard.filter_shard(x @ x, NamedSharding(mesh, P("fsdp")))
            return eqxshard.filter_shard(x, NamedSharding(mesh, P())), None

        return jax.lax.scan(body, x, None, length=5)[0]

    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P()))
    found = testing.collectives(powers, x)
    assert found.times["all-gather"] == 5 * found.counts["all-gather"] > 0


def test_kinds_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"'all_gather' is no collective; use one of"):
        testing.assert_collectives(Text(""), at_most={"all_gather": 1})


# assert_donated


def test_a_step_that_reuses_its_state_passes_and_the_state_is_kept(split):
    state, step, batch = split
    testing.assert_donated(step, state, batch)
    testing.assert_donated(step, state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if eqx.is_array(x))


def tree_on(mesh):
    values = {"a": np.ones((8, 4), np.float32), "b": [np.ones(16, np.float32)]}
    return jax.device_put(values, NamedSharding(make_mesh(mesh), P("data")))


def test_what_is_not_donated_is_named():
    # What is handed on as it is shares its memory, and is not donated either.
    scale = lambda tree, by: {"a": by * tree["a"], "b": tree["b"]}  # noqa: E731
    with pytest.raises(AssertionError) as error:
        testing.assert_donated(scale, tree_on("data=8"), 2.0)
    assert "2 of 2 arrays of the state are not used again" in str(error.value)
    assert "\n  a: float32[8,4]\n  b.0: float32[16]\n" in str(error.value)
    assert "JAX warned" not in str(error.value)


def test_what_is_deleted_and_not_used_again_is_named():
    def delete(tree):
        new = {"a": 2 * tree["a"], "b": 2 * tree["b"][0]}
        tree["b"][0].delete()
        return new

    with pytest.raises(AssertionError, match=r"\n  b.0: float32\[16\]\n"):
        testing.assert_donated(delete, tree_on("data=8"))


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_what_is_donated_in_vain_is_named(mesh):
    @eqxshard.filter_jit(donate=0)
    def shorten(tree):
        warnings.warn("something else", UserWarning, stacklevel=1)
        return {"a": 2 * tree["a"], "b": tree["b"][0][:3]}

    with (
        pytest.raises(AssertionError) as error,
        pytest.warns(UserWarning, match="something else"),
    ):
        testing.assert_donated(shorten, tree_on(mesh))
    assert "1 of 2 arrays of the state are not used again" in str(error.value)
    assert "\n  b.0: float32[16]\n" in str(error.value)
    # It does not see this where several devices share an array.
    warned = "JAX warned: Some donated buffers were not usable: float32[16]"
    assert (warned in str(error.value)) == (mesh == "data=1")


# assert_sharding_lock


class Embedding(eqx.Module):
    embed: jax.Array
    head: list[jax.Array]
    scale: float = 2.0


def embedding(rows=16):
    return Embedding(jnp.ones((rows, 8)), [jnp.zeros(4, jnp.int16)])


@eqxshard.filter_jit
def total(tree, batch):
    return sum(jnp.sum(x @ x.T) for x in (tree.embed, batch))


class Locked:
    """Locks a model under a rule, and returns what the file says afterwards."""

    def __init__(self, file):
        self.file = file

    def __call__(self, tree=None, rule=None, mesh="data=2,fsdp=4", **options):
        tree = embedding() if tree is None else tree
        rule = rule or RULES["fsdp"]
        testing.assert_sharding_lock(self.file, tree, make_mesh(mesh), rule, **options)
        return self.file.read_text()


@pytest.fixture
def locked(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("EQXSHARD_UPDATE_LOCKS", raising=False)
    return Locked(tmp_path / "locks" / "model.lock")


def test_a_lock_is_a_text_for_people(locked):
    rule = eqxshard.by_path({"embed": P(("data", "fsdp"), None), "head": P(None)})
    text = locked(rule=rule)
    assert locked(rule=rule) == text
    assert text == (
        "# Where each array lies, and what the compiled step sends between devices. "
        "Written by\n# eqxshard.testing with jax "
        f"{jax.__version__}; write it again with EQXSHARD_UPDATE_LOCKS=1.\n"
        "[mesh]\n8 x cpu (data=2, fsdp=4)\n"
        "[arrays]\nembed: float32[16,8] P((data, fsdp))\nhead.0: int16[4] P()\n"
    )


def test_what_changed_is_said_in_words(locked):
    locked()
    with pytest.raises(AssertionError) as error:
        locked(rule=eqxshard.replicate())
    lines = str(error.value).splitlines()
    assert lines[0] == f"{locked.file} says otherwise:"
    assert lines[1:3] == ["  embed: P(fsdp) -> P()", "  head.0: P(fsdp) -> P()"]
    assert "run this test once with EQXSHARD_UPDATE_LOCKS=1" in lines[3]
    with pytest.raises(AssertionError) as error:
        locked(tree={"embed": embedding(8).embed, "tail": np.ones(2)}, mesh="fsdp=8")
    assert str(error.value).splitlines()[1:-1] == [
        "  mesh: 8 x cpu (data=2, fsdp=4) -> 8 x cpu (fsdp=8)",
        "  embed: float32[16,8] P(fsdp) -> float32[8,8] P(fsdp)",
        "  + tail: float64[2] P()",
        "  - head.0: int16[4] P(fsdp)",
    ]


def test_collectives_are_locked_too(locked):
    mesh, batch = make_mesh("data=2,fsdp=4"), jnp.ones((8, 8))

    def placed(rule):
        return eqxshard.filter_shard(
            embedding(), eqxshard.shardings(embedding(), mesh, rule)
        )

    whole, split = placed(eqxshard.replicate()), placed(RULES["fsdp"])
    text = locked(whole, step=total, batch=batch)
    assert text.endswith("P()\n[collectives]\n")
    assert locked(whole, step=total, batch=batch) == text
    counts = testing.collectives(total, split, batch).counts
    with pytest.raises(AssertionError) as error:
        locked(split, step=total, batch=batch)
    added = [line for line in str(error.value).splitlines() if line.startswith("  +")]
    assert len(added) == len(counts) > 0
    for kind, count in counts.items():
        name = kind if count == 1 else f"{kind}s"
        assert any(f"+{count} {name} (0 -> " in line for line in added)
    locked(split, step=total, batch=batch, update=True)
    with pytest.raises(AssertionError, match=rf"-{counts['all-reduce']} all-reduce"):
        locked(whole, step=total, batch=batch)
    with pytest.raises(AssertionError, match="collectives: no step was given"):
        locked(split)
    file = locked.file
    file.write_text(file.read_text().replace(" bytes", "0 bytes"))
    file.write_text(file.read_text().replace(f"jax {jax.__version__}", "jax 0.9.1"))
    with pytest.raises(AssertionError, match=r"\n  \d+ all-.*0 -> .* bytes\n") as error:
        locked(split, step=total, batch=batch)
    assert error.match(rf"written with jax 0.9.1, and this is {jax.__version__}: XLA may")


def test_a_lock_is_written_on_request_and_not_in_ci(locked, monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match=r"model\.lock is not there, and CI does not"):
        locked()
    monkeypatch.setenv("EQXSHARD_UPDATE_LOCKS", "1")
    assert "P(fsdp)" in locked()
    assert "P(fsdp)" not in locked(rule=eqxshard.replicate())
    assert "P(fsdp)" not in locked(rule=eqxshard.replicate(), update=False)
    with pytest.raises(AssertionError, match=r"embed: P\(\) -> P\(fsdp\)"):
        locked(update=False)


def test_what_is_on_a_mesh_lies_as_it_lies(split, locked):
    state, _, _ = split
    text = locked(state, rule=eqxshard.replicate())
    assert "model.weight: float32[4,8] P(None, fsdp)\n" in text
    with pytest.raises(ValueError, match=r"step lies on .*data=2, fsdp=4\) and not on 8 x"):
        locked(state, mesh="fsdp=8")


def test_a_file_that_is_no_lock_is_refused(locked):
    locked()
    locked.file.write_text(locked.file.read_text() + "<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match="line 8 is no line of a lock: '<<<<<<< HEAD'"):
        locked()
