"""Meshes with Explicit axes, with fewer axes than ours, and with others."""

import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from explicit_model import Model, batches, loss_fn, losses, make_state
from helpers import once
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.sharding import batch_sharding, name_batch_axes

FSDP = eqxshard.fsdp(min_size=0)
SPLIT = eqxshard.by_dim({"mlp": "tensor", "heads": "tensor", "embed": "fsdp"})
SPLIT = eqxshard.first_match(SPLIT, eqxshard.replicate())


def explicit(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=_some(sizes))


def _some(sizes):
    return jax.devices()[: int(np.prod([*sizes.values()]))]


@pytest.fixture(scope="module")
def expected():
    """On one device, with Auto axes and the plain model."""
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return losses(mesh, eqxshard.replicate(), typed=False)


MESHES = {
    "data": (explicit(data=8), eqxshard.replicate(), {}),
    "fsdp": (explicit(fsdp=8), FSDP, {"accumulate": 2}),
    "both": (explicit(data=2, fsdp=4), FSDP, {}),
    "order": (explicit(fsdp=2, data=4), FSDP, {"nonfinite": "ignore"}),
    "three": (explicit(data=2, fsdp=2, tensor=2), SPLIT, {"accumulate": 2}),
    "four devices": (explicit(fsdp=2, tensor=2), SPLIT, {"grad_norms": True}),
    "ours": (eqxshard.make_mesh(data=2, fsdp=2, tensor=2, explicit=True), SPLIT, {}),
    "some": (
        eqxshard.make_mesh(data=2, fsdp=2, tensor=2, explicit=("data", "fsdp")),
        SPLIT,
        {},
    ),
}


@pytest.mark.versions
@pytest.mark.parametrize(
    "name",
    [
        name if name == "both" else pytest.param(name, marks=pytest.mark.slow)
        for name in MESHES
    ],
)
def test_a_model_written_for_explicit_axes_trains_as_the_plain_one(
    name, expected, as_scripts_run
):
    mesh, rule, options = MESHES[name]
    found = losses(mesh, rule, typed=True, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_without_rewriting_too(expected, as_scripts_run, monkeypatch):
    monkeypatch.setenv("EQXSHARD_REWRITE", "off")
    mesh, rule, _ = MESHES["both"]
    np.testing.assert_allclose(losses(mesh, rule, typed=True), expected, rtol=1e-5)


def test_user_code_sees_types_and_gets_typed_arrays_back():
    mesh, seen = explicit(data=2, fsdp=4), []

    def typed_loss(model, batch, key):
        seen.append([*map(jax.typeof, (model.weight, batch["x"], key))])
        return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, -1)

    optim = optax.sgd(0.1)
    with jax.set_mesh(mesh):
        state = eqxshard.init_state(
            lambda key: eqx.nn.Linear(16, 8, key=key),
            optim,
            key=jax.random.key(0),
            mesh=mesh,
            rule=FSDP,
        )
        step = eqxshard.make_train_step(typed_loss, optim)
        state, metrics = step(state, {"x": np.ones((16, 16), np.float32)})
    specs = [kind.sharding.spec for kind in seen[0]]
    # Gathered over the axes of the batch, which its rows are split over.
    assert specs == [P(None, None), P(("data", "fsdp"), None), P()]
    assert jax.typeof(state.model.weight).sharding.spec == P(None, "fsdp")
    assert state.model.weight.sharding.mesh == mesh
    assert np.isfinite(metrics["loss"])


def test_a_checkpoint_goes_from_auto_axes_to_explicit_ones_and_back(tmp_path):
    auto, typed = eqxshard.make_mesh(data=2, fsdp=4), explicit(data=4, fsdp=2)
    optim = optax.adam(1e-3)

    def like(mesh):
        make = lambda key: eqx.nn.Linear(16, 8, key=key)  # noqa: E731
        return make, optim, {"key": jax.random.key(0), "mesh": mesh, "rule": FSDP}

    make, _, options = like(auto)
    states = [eqxshard.init_state(make, optim, **options)]
    for mesh in (typed, auto):
        checkpointer = eqxshard.Checkpointer(tmp_path / mesh.axis_types[0].name)
        checkpointer.save(states[-1])
        checkpointer.wait()
        make, _, options = like(mesh)
        restored = checkpointer.restore(eqxshard.abstract_state(make, optim, **options))
        checkpointer.close()
        assert restored.model.weight.sharding.mesh == mesh
        states.append(restored)
    first, *others = [jax.tree.leaves(eqx.filter(s.model, eqx.is_array)) for s in states]
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_model_may_say_how_it_is_made():
    class Typed(eqx.Module):
        weight: jax.Array
        bias: jax.Array

        def __init__(self, key):
            rows = P("fsdp") if AxisType.Explicit in mesh.axis_types else None
            self.weight = jax.random.normal(key, (16, 8), out_sharding=rows)
            bias = jnp.arange(8.0)
            self.bias = bias if rows is None else jax.sharding.reshard(bias, rows)

    made = []
    for mesh in (explicit(data=2, fsdp=4), eqxshard.make_mesh(data=2, fsdp=4)):
        options = {"key": jax.random.key(0), "mesh": mesh, "rule": FSDP}
        made.append(eqxshard.init_state(Typed, optax.sgd(0.1), **options).model)
    assert jax.typeof(made[0].weight).sharding.spec == P("fsdp", None)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(*(getattr(x, name) for x in made), rtol=1e-6)


def test_initial_values_are_those_of_auto_axes(as_scripts_run):
    optim = optax.adam(1e-3)
    meshes = explicit(data=2, fsdp=4), eqxshard.make_mesh(data=2, fsdp=4)
    models = [make_state(mesh, FSDP, False, optim).model for mesh in meshes]
    leaves = [jax.tree.leaves(eqx.filter(model, eqx.is_array)) for model in models]
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


@pytest.mark.slow
def test_loader_fit_many_and_resident_data(as_scripts_run):
    data = {k: np.concatenate([b[k] for b in batches()]) for k in batches()[0]}
    source, optim = eqxshard.data.ArraySource(data), optax.adamw(1e-2)
    found = []
    for mesh in (explicit(data=2, fsdp=4), eqxshard.make_mesh(data=2, fsdp=4)):
        typed = AxisType.Explicit in mesh.axis_types
        options = {"batch_size": 16, "mesh": mesh, "seed": 1}
        step = eqxshard.make_train_step(loss_fn, optim)
        loader = eqxshard.Loader(source, **options)
        state = eqxshard.fit(make_state(mesh, FSDP, typed, optim), step, loader, steps=3)
        resident = eqxshard.Loader(source, placement="device", **options)
        state, metrics = step.many(state, resident.stacked(2))
        found.append(np.asarray(metrics["loss"])[:2])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.slow
def test_constraints_and_our_own_layers_on_explicit_axes():
    rng, found = np.random.default_rng(0), []
    batch = {
        "x": rng.standard_normal((8, 8, 4, 8)).astype(np.float32),
        "targets": rng.integers(0, 64, (8, 8)).astype(np.int32),
    }

    def typed_loss(model, batch, key):
        x = eqxshard.constrain(batch["x"] * model.bias[0], P(("data",), None, "tensor"))
        mixed = eqxshard.nn.attention(x, x, x, causal=True)
        mixed = eqxshard.constrain(mixed, P("data"))
        hidden = mixed.reshape(8, 8, 32)
        losses = eqxshard.nn.cross_entropy(hidden, model.weight, batch["targets"], chunk=4)
        return jnp.mean(losses, -1)

    optim = optax.sgd(0.1)
    for mesh in (explicit(data=2, tensor=4), eqxshard.make_mesh(data=2, tensor=4)):
        state = eqxshard.init_state(
            lambda key: eqx.nn.Linear(32, 64, key=key),
            optim,
            key=jax.random.key(0),
            mesh=mesh,
            rule=eqxshard.replicate(),
        )
        _, metrics = eqxshard.make_train_step(typed_loss, optim)(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_filter_shard_places_inside_and_outside_of_jit():
    mesh = explicit(data=2, fsdp=4)
    x = eqxshard.filter_shard(jnp.ones((8, 8)), NamedSharding(mesh, P("fsdp")))
    inside = eqx.filter_jit(
        lambda x: eqxshard.filter_shard(x * 2, NamedSharding(mesh, P("data")))
    )
    assert [jax.typeof(y).sharding.spec for y in (x, inside(x))] == [
        P("fsdp", None),
        P("data", None),
    ]


def test_an_ambiguous_product_is_refused_at_the_users_line():
    mesh = explicit(tensor=2)
    pair = {"layers.0.weight": P("tensor"), "layers.1.weight": P(None, "tensor")}
    rule = eqxshard.first_match(eqxshard.by_path(pair), eqxshard.replicate())
    optim = optax.sgd(0.1)
    state = eqxshard.init_state(
        lambda key: eqx.nn.MLP(8, 8, 16, 1, key=key),
        optim,
        key=jax.random.key(0),
        mesh=mesh,
        rule=rule,
    )

    def typed_loss(model, batch, key):
        return jnp.sum(jax.vmap(model)(batch["x"]), -1)

    step = eqxshard.make_train_step(typed_loss, optim)
    with pytest.raises(Exception, match="ambiguous") as caught:
        step(state, {"x": np.ones((16, 8), np.float32)})
    here = [x for x in traceback.extract_tb(caught.tb) if x.filename == __file__]
    assert here[-1].name == "typed_loss"


def test_axes_of_any_name_split_the_batch_once_it_is_said(expected, as_scripts_run):
    mesh = jax.make_mesh((2, 4), ("dp", "shard"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="name_batch_axes"):
        make_state(mesh, eqxshard.replicate(), False, optax.sgd(0.1))
    with pytest.raises(ValueError, match="names the axis 'dq'"):
        name_batch_axes(mesh, ("dq",))
    mesh = name_batch_axes(mesh, batch_axes=("dp", "shard"))
    assert batch_sharding(mesh).spec == P(("dp", "shard"))
    found = losses(mesh, eqxshard.fsdp(min_size=0, axis="shard"), typed=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_axis_of_ours_that_a_mesh_lacks_has_size_1():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    linear = eqx.nn.Linear(16, 8, key=jax.random.key(0))
    rule = eqxshard.combine(eqxshard.by_path({"weight": P("tensor")}), FSDP)
    assert not any(eqxshard.shardings(linear, mesh, rule).weight.spec)
    wrong = eqxshard.by_path({"weight": P("tensr"), "bias": P()})
    with pytest.raises(ValueError, match="'tensr'"):
        eqxshard.shardings(linear, mesh, wrong)


@pytest.mark.slow
def test_the_test_kit_takes_explicit_meshes(as_scripts_run):
    report = eqxshard.testing.assert_mesh_invariant(
        lambda key: Model(key, True),
        loss_fn,
        batches(),
        optax.adam(1e-3),
        rules=SPLIT,
        meshes=[explicit(data=2, fsdp=2, tensor=2), MESHES["ours"][0]],
        steps=2,
    )
    assert [row.devices for row in report.rows] == [8, 8]


@pytest.mark.slow
def test_axes_of_size_1_are_in_no_type(as_scripts_run):
    mesh = jax.make_mesh((8, 1), ("fsdp", "tensor"))
    up, down = P("tensor", "fsdp"), P("fsdp", "tensor")
    rule = eqxshard.by_path({r"0\.weight": up, r"1\.weight": down, "bias": P("tensor")})
    seen = []

    def loss_fn(model, batch, key):
        up, down = (layer.weight for layer in model.layers)
        # Summed over the dim that both name the axis in.
        hidden = eqxshard.constrain(batch["x"] @ up.T, P(("data", "fsdp"), "tensor"))
        seen.extend([jax.typeof(up), jax.typeof(hidden)])
        return jnp.sum((hidden @ down.T) ** 2, -1)

    def losses(mesh):
        state = eqxshard.init_state(
            lambda key: eqx.nn.MLP(8, 8, 16, 1, key=key),
            optax.sgd(0.1),
            key=jax.random.key(0),
            mesh=mesh,
            rule=rule,
        )
        train_step = eqxshard.make_train_step(once(loss_fn), optax.sgd(0.1))
        x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        found = []
        for _ in range(2):
            state, metrics = train_step(state, {"x": x})
            found.append(metrics.compute()["loss"])
        return found

    found = losses(mesh)
    assert not any("tensor" in str(each) for each in seen)
    np.testing.assert_allclose(found, losses(eqxshard.make_mesh(fsdp=8)), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_models_take_a_mesh_with_names_of_its_own(kind):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(kind,))
    x = np.arange(32.0, dtype=np.float32).reshape(1, 8, 2, 2)

    @jax.jit
    def fn(x):
        x = eqxshard.constrain(x, P(None, "context", ("tensor", "rows")[:1]))
        return eqxshard.nn.attention(x, x, x)

    expected = fn(x)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(fn(x), expected, rtol=1e-6)
        with pytest.raises(ValueError, match="names the axis 'contxt', which the mesh"):
            jax.jit(lambda x: eqxshard.constrain(x, P("contxt")))(x)
        # A rule that would split nothing is refused still.
        linear = eqx.nn.Linear(16, 8, key=jax.random.key(0))
        with pytest.raises(ValueError, match="names the axis 'fsdp', which the mesh"):
            eqxshard.shardings(linear, mesh, eqxshard.fsdp(min_size=1))
