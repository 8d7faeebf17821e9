import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from helpers import assert_equal, make_mesh
from orbax.checkpoint import v1

import eqxshard

pytestmark = pytest.mark.versions


@pytest.fixture
def state():
    """Small and large arrays, in every way that arrays are placed."""
    mesh = make_mesh("data=2,fsdp=4")

    def made(shape, dtype, *axes):
        numbers = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        return jax.device_put(numbers, jax.NamedSharding(mesh, jax.P(*axes)))

    model = {
        "scalar": made((), "float32"),
        "split": made((8, 6), "bfloat16", "fsdp"),
        "both": made((8, 6), "int8", ("data", "fsdp")),
        "copies": made((5,), "bool"),
        "large": made((1024, 4096), "float32", "fsdp"),
        "large copies": made((1024, 1024), "float32"),
        "zeros": jnp.zeros((3, 2)),
        "empty": jnp.zeros((0, 2)),
    }
    key = jax.random.key(0)
    return eqxshard.TrainState(step=jnp.int32(3), model=model, opt_state=(), key=key)


def save(state, folder):
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(state)
    checkpointer.wait()
    assert_equal(checkpointer.restore(state), state)
    return folder / "3" / "state"


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_alone_reads_arrays_as_they_were_placed(state, tmp_path):
    saved = save(state, tmp_path)
    wanted = {f"model.{name}": leaf for name, leaf in state.model.items() if leaf.size}
    wanted |= {"step": state.step, "key": jax.random.key_data(state.key)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        found = [checkpointer.restore(saved)]
        shapes = checkpointer.metadata(saved).item_metadata
    found.append(v1.load_checkpointables(saved.parent)["state"])
    for each in found:
        assert each.keys() == wanted.keys() == shapes.keys()
        for path, leaf in wanted.items():
            assert each[path].dtype == leaf.dtype and each[path].sharding == leaf.sharding
            np.testing.assert_array_equal(each[path], leaf)
