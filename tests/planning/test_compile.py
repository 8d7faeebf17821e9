import jax
import jax.numpy as jnp
import pytest
from plan_helpers import BATCH

from eqxshard.planning._compile import count_examples, tpu_topology


@pytest.mark.parametrize(
    "generation, count, name",
    [
        ("v5p", 512, "v5p:8x8x8"),
        ("v5p", 16, "v5p:2x2x4"),
        ("v4", 4, "v4:1x2x2"),
        ("v5e", 8, "v5e:2x4"),
        ("v6e", 256, "v6e:16x16"),
    ],
)
def test_topologies_are_near_to_cubes(generation, count, name):
    assert tpu_topology(generation, count) == name


def test_tokens_are_integers_in_rows():
    assert count_examples(BATCH) == (16, 16 * 17)
    images = jax.ShapeDtypeStruct((8, 28, 28), jnp.uint8)
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)
    assert count_examples({"image": images, "label": labels}) == (8, None)
