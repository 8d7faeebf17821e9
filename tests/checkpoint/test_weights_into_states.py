import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_equal, lenient, make_batch, make_mesh
from weights_helpers import FSDP, file, make_mlp, mlp

import eqxshard

_ = file, mlp  # Fixtures.

ADAM = lenient(optax.chain(optax.adam(1e-3), eqxshard.ema_weights(0.9)))


def init(mesh, load, make_model=make_mlp, optim=ADAM, **options):
    return eqxshard.init_state(
        make_model,
        optim,
        key=jax.random.key(1),
        mesh=make_mesh(mesh),
        rule=FSDP,
        load=load,
        **options,
    )


def loss_fn(model, batch, key):
    return jnp.sum((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def addresses(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=1", "fsdp=8"])
def test_a_state_takes_loaded_weights_over_without_a_copy(file, mesh):
    read = []

    def load(like):
        loaded = eqxshard.load_weights(file, like)
        read.extend(addresses(loaded))
        return loaded

    state = init(mesh, load)
    assert addresses(state.model) == read
    # The arrays of one shape may change places.
    before = addresses((state.step, state.model, state.opt_state))
    assert len(set(before)) == len(before)
    train_step = eqxshard.make_train_step(loss_fn, ADAM, mesh=make_mesh(mesh), rule=FSDP)
    after, _ = train_step(state, make_batch())
    assert {*addresses((after.step, after.model, after.opt_state))} == {*before}


def test_the_optimizer_begins_at_what_was_loaded(mlp, file):
    state = init("fsdp=8", lambda like: eqxshard.load_weights(file, like))
    assert_equal(state.model, mlp)
    assert_equal(eqxshard.ema_model(state), mlp)


def test_what_is_not_loaded_is_made(mlp, file):
    fresh = init("fsdp=8", None)

    def load(like):
        head = {r"layers\.2\.": None}
        return eqxshard.load_weights(file, like, rename=head, partial=True)

    state = init("fsdp=8", load)
    assert_equal(state.model.layers[:2], mlp.layers[:2])
    assert_equal(state.model.layers[2], fresh.model.layers[2])
    assert_equal(state.key, fresh.key)


def test_weights_are_loaded_in_the_types_of_the_state(mlp, file):
    state = init(
        "fsdp=8",
        lambda like: eqxshard.load_weights(file, like),
        precision=eqxshard.Precision(params=jnp.bfloat16),
    )
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, mlp)
    assert_equal(state.model, half)
