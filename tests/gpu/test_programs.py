"""Programs for GPUs are kept, and made of kernels that give the same bits each time."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import lenient
from jax.experimental.serialize_executable import serialize
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard

pytestmark = pytest.mark.gpu

OPTIM = lenient(optax.adamw(1e-3))


@pytest.mark.versions
def test_the_program_of_a_step_is_kept_and_found(gpus, tmp_path):
    mesh = eqxshard.make_mesh(fsdp=8, data=1, devices=gpus)
    where: dict = dict(mesh=mesh, rule=eqxshard.fsdp(min_size=64))
    key = jax.random.key(0)
    state = eqxshard.abstract_state(Transformer, OPTIM, key=key, **where)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_tokens(32)))

    def look():
        step = eqxshard.make_train_step(next_token_losses, OPTIM, **where)
        return eqxshard.lint(step, state, batch)

    with eqxshard.keep_programs(tmp_path, resume=False):
        look()
    ((digest, kept),) = json.loads((tmp_path / "0" / "programs.json").read_text()).items()
    made_with = kept["made_with"]
    assert made_with["device"] == "NVIDIA H200 141GB HBM3e"
    assert made_with["compute capability"].startswith("9.0")
    assert b"ELF" in (tmp_path / "0" / digest).read_bytes()
    # It is found, verified and unpacked; the GPUs to run it on are not there.
    with (
        eqxshard.keep_programs(tmp_path, resume=True),
        pytest.raises(ValueError, match=r"JAX cannot load .*; undo that, or resume"),
    ):
        look()


@pytest.mark.parametrize(
    "option", ["enable_scatter_determinism_expander", "deterministic_ops"]
)
def test_gradients_of_tables_are_sums_in_a_fixed_order_if_asked_for(gpus, option):
    placed = jax.NamedSharding(eqxshard.make_mesh(devices=gpus), jax.P())

    def gradient(table, tokens):
        return jax.grad(lambda table: jnp.sum(table[tokens] ** 3))(table)

    table = jax.ShapeDtypeStruct((50257, 768), jnp.float32, sharding=placed)
    tokens = jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=placed)
    lowered = jax.jit(gradient).lower(table, tokens)
    asked = lowered.compile(compiler_options={f"xla_gpu_{option}": True})
    # Rows that repeat are sorted, and added one by one, rather than by atomics.
    sorts = [" sort(" in (each.as_text() or "") for each in (asked, lowered.compile())]
    assert sorts == [True, False]
    data, *_ = serialize(asked)
    assert b"ELF" in data
