"""The arrays of a state are made by small programs, one for each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, compiled_by_jit, lenient, make_mesh

import eqxshard

KEY = jax.random.key(0)
normal = jax.random.normal
make_mlp = eqx.filter_jit(eqx.nn.MLP)


def init(make_model, mesh="data=2,fsdp=4", optim=None, key=KEY, **options):
    optim = lenient(optax.sgd(0.1)) if optim is None else optim
    placed: dict = {"mesh": make_mesh(mesh), "rule": eqxshard.fsdp(min_size=1)}
    return eqxshard.init_state(make_model, optim, key=key, **placed, **options)


def scaled(key):
    """A table, and layers that are scaled by its norm."""
    keys = jax.random.split(key, 4)
    table = normal(keys[0], (64, 64))
    return [table, *[normal(key, (64, 64)) / jnp.linalg.norm(table) for key in keys[1:]]]


def cut(key):
    """Layers that are parts of one draw, which is no part of the model itself."""
    whole = normal(key, (3, 256, 256))
    return [*whole, whole.mean()]


def entangled(key):
    """The first and the last share a draw, and the last needs a result of the first."""
    whole = normal(key, (64, 64))
    first = whole * 2
    second = jnp.sin(first)
    return [first, second, jnp.cos(whole) + second]


def scanned(key):
    def layer(total, key):
        return total + normal(key, (64, 64)), {"weight": normal(key, (64, 64))}

    return jax.lax.scan(layer, jnp.zeros((64, 64)), jax.random.split(key, 3))


def branched(key):
    """Control flow, on values that are small and on ones that are not."""
    weight = jax.lax.cond(
        jax.random.uniform(key) > 0.5,
        lambda: normal(key, (64, 64)),
        lambda: jnp.ones((64, 64)),
    )
    _, total = jax.lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, c[1] + normal(jax.random.fold_in(key, c[0]), (64, 64))),
        (0, weight),
    )
    return [weight, total]


@eqx.filter_jit
def stacked(key):
    make = lambda key: eqx.nn.MLP(16, 16, 64, 2, key=key)  # noqa: E731
    return eqx.filter_vmap(make)(jax.random.split(key, 3))


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (doubled(x), None), lambda residuals, g: (g,))


def drawn(key):
    """Draws of all kinds, and arrays that are not drawn."""
    keys, inits = jax.random.split(key, 4), jax.nn.initializers
    return {
        "draws": [
            inits.truncated_normal(0.02)(keys[0], (64, 64)),
            inits.orthogonal()(keys[1], (64, 64)),
            jax.random.permutation(keys[2], 128),
            doubled(jax.nn.relu(normal(keys[3], (64, 64), jnp.bfloat16))),
        ],
        "integers": [jnp.arange(100_000), jax.random.randint(key, (8,), 0, 9)],
        "constants": [jnp.asarray(np.arange(70_000.0)), jnp.asarray(2), jnp.zeros((0, 4))],
        "masks": jnp.tri(512, dtype=bool),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [scaled, cut, entangled, scanned, branched, stacked, drawn],
    ids=lambda f: f.__name__,
)
def test_values_are_those_of_one_program_on_every_mesh(make):
    expected = arrays(jax.jit(lambda key: eqx.filter(make(key), eqx.is_array))(KEY))
    for mesh in ("data=1", "data=2,fsdp=4"):
        state = init(make, mesh)
        for path, found in arrays(state.model).items():
            assert found.dtype == expected[path].dtype
            # Sums over parts round differently.
            np.testing.assert_allclose(
                found.astype(np.float32), expected[path].astype(np.float32), 1e-5, 1e-4
            )


def programs_of(make, monkeypatch):
    with compiled_by_jit(monkeypatch) as compiled:
        init(make)
    return {*compiled}


def test_more_layers_compile_no_more_programs(monkeypatch):
    """Not even of a jitted function, or of layers each of which is traced anew."""

    def layer(key):
        return jax.lax.map(lambda key: normal(key, (64, 8)), jax.random.split(key))

    def model(depth):
        def make(key):
            keys = jax.random.split(key, depth)
            return make_mlp(64, 64, 64, depth, key=key), [*map(layer, keys)]

        return make

    few, many = (programs_of(model(depth), monkeypatch) for depth in (3, 12))
    assert len(few) == len(many) < 20


@jax.custom_jvp
def tripled(x):
    return x * 3


tripled.defjvp(lambda x, dx: (tripled(*x), dx[0] * 3))


@pytest.mark.slow
def test_what_differs_in_anything_is_not_shared():
    """They differ in a number, a constant or a parameter, also of an inner function."""
    numbers = [1.0, 2.0, 0.0, -0.0]
    rows = [np.full((64, 64), value, np.float32) for value in (3.0, 4.0)]
    different: list = [lambda x, by=by: x * by for by in numbers + rows]
    different += [lambda x, axis=axis: jnp.flip(x, axis) for axis in (0, 1)]
    different += [doubled, tripled, jax.nn.relu, jax.nn.relu6]

    def make(key):
        """From draws that are the same, but each from its own equations."""
        draws = [normal(key, (64, 64)) for _ in range(2 * len(different))]
        inside = [jax.lax.map(jax.jit(fn), draws.pop()[None])[0] for fn in different]
        return [*[fn(draws.pop()) for fn in different], *inside]

    expected, found = make(KEY), init(make).model
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))


def test_what_differs_in_a_context_is_not_shared():
    def make(key):
        with jax.threefry_partitionable(False):
            others = [normal(key, (64, 64)), *jax.random.split(key)]
        return [normal(key, (64, 64)), *jax.random.split(key), *others]

    for ours, theirs in zip(init(make).model, make(KEY), strict=True):
        if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            ours, theirs = map(jax.random.key_data, (ours, theirs))
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)


def test_what_make_model_prints_and_checks_is_done_once(capfd):
    def make(key):
        weight = normal(key, (64, 64))
        jax.debug.print("small {}", jax.random.uniform(key))
        jax.debug.print("large {}", weight[0, 0])
        return eqx.error_if(weight, weight[0, 0] > 9, "too large")

    init(make)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()[::2]) == ["large", "small"]
    wrong = lambda key: eqx.error_if(make(key), True, "wrong weights")  # noqa: E731
    with pytest.raises(Exception, match="wrong weights"):
        init(wrong)


@pytest.mark.parametrize("key", [jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")])
def test_keys_of_all_types_are_split(key):
    def make(key):
        return [normal(each, (64, 64)) for each in jax.random.split(key, 3)] + [key]

    expected, found = make(key), init(make, key=key).model
    for ours, theirs in zip(found[:3], expected[:3]):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
    assert found[3].dtype == key.dtype


def test_what_depends_on_loaded_weights_is_made_of_those():
    def load(like):
        return eqx.tree_at(lambda m: m[0], like, jnp.full((64, 64), 3.0))

    optim = lenient(optax.chain(optax.sgd(0.1), eqxshard.ema_weights(0.9)))
    state = init(entangled, optim=optim, load=load)
    assert (np.asarray(state.model[0]) == 3).all()
    # The optimizer's state is, and the model's other arrays are as they were made.
    assert (np.asarray(state.opt_state[1].ema[0]) == 3).all()
    np.testing.assert_allclose(state.model[1], entangled(KEY)[1], 1e-5, 1e-6)
