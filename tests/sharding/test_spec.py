import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import error, fsdp, make_mesh, spec_of

import eqxshard


def test_an_unknown_axis_is_named_with_its_neighbour():
    message = error(eqxshard.by_path({"w": P("tensr")}), 8)
    assert "w (8,): P('tensr',) names the axis 'tensr'" in message
    assert "did you mean 'tensor'? its axes are stage, data, fsdp" in message
    assert "did you mean" not in error(eqxshard.by_path({"w": P("qqq")}), 8)
    message = error(fsdp(axis="fdsp"), 8)
    assert "fsdp('fdsp') names the axis 'fdsp'" in message
    assert "did you mean 'fsdp'?" in message


@pytest.mark.parametrize(
    "spec", [P("fsdp", "fsdp"), P(("fsdp", "fsdp")), P(("fsdp",), "fsdp")]
)
def test_an_axis_splits_one_dim_only(spec):
    assert "uses the axis 'fsdp' twice" in error(eqxshard.by_path({"w": spec}), 16, 16)


def test_a_dim_that_does_not_divide_is_an_error_with_its_arithmetic():
    mesh = make_mesh(fsdp=2, tensor=2)
    rule = eqxshard.by_path({"w": P(None, ("fsdp", "tensor"))})
    assert spec_of(rule, 3, 8, mesh=mesh) == P(None, ("fsdp", "tensor"))
    message = error(rule, 3, 6, mesh=mesh)
    assert "w (3, 6): P(None, ('fsdp', 'tensor')) splits dim 1 of size 6" in message
    assert "over fsdp=2 x tensor=2, which does not divide it" in message
    assert "choose a dim that is a multiple of 4, or do not split this one" in message
