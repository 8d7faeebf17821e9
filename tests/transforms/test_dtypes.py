import jax.numpy as jnp
import pytest

from eqxshard.transforms._dtypes import accumulation_dtype, at_least_float32


@pytest.mark.parametrize(
    "dtype, wide",
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("int8", "int8"),
        ("bool", "bool"),
        ("complex64", "complex64"),
    ],
)
def test_narrow_floats_are_summed_in_float32(dtype, wide):
    assert accumulation_dtype(dtype) == wide
    assert at_least_float32(jnp.ones(2, dtype)).dtype == wide
