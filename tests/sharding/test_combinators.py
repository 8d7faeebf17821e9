import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, needs_new_jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import (
    BLOCK,
    fsdp,
    make_mesh,
    opt_specs,
    spec_of,
    struct,
)

import eqxshard
from eqxshard.sharding._rule import AbstractRule, Rule, apply_rule, check_rule


def test_first_match_asks_in_order():
    calls = []

    def mine(path, leaf, mesh):
        calls.append(path)
        return P("tensor") if leaf.ndim == 1 else None

    rule = eqxshard.first_match(eqxshard.by_path({"a": P()}), mine, fsdp())
    mesh = make_mesh()
    tree = {"a": struct(8), "b": struct(8), "c": struct(8, 8)}
    found = eqxshard.shardings(tree, mesh, rule)
    assert [found[name].spec for name in "abc"] == [P(), P("tensor"), P("fsdp")]
    assert calls == ["b", "c"]
    nested = eqxshard.first_match(eqxshard.first_match(mine), fsdp())
    assert spec_of(nested, 8, mesh=mesh) == P("tensor")
    assert eqxshard.first_match(mine)("c", struct(8, 8), mesh) is None


def test_combine_says_who_decided_and_why_not():
    rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), fsdp(min_size=200))
    rows = {
        leaf.path: leaf for leaf in eqxshard.explain(BLOCK, make_mesh(2, 2), rule).leaves
    }
    assert rows["up"].rule == "by_dim(mlp: tensor) + fsdp()" and not rows["up"].note
    assert rows["bias"].rule == "by_dim(mlp: tensor)"
    assert rows["bias"].note == "fsdp() size 32, below min_size=200"
    assert rows["table"].rule == "fsdp()"


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(1, 5).map(lambda n: 2**n), max_size=3).map(tuple),
    split=st.integers(0, 2),
    min_size=st.integers(0, 100),
    fsdp_size=st.sampled_from((1, 2, 4)),
)
def test_combined_rules_split_as_much_as_each_alone(shape, split, min_size, fsdp_size):
    mesh = make_mesh(fsdp_size, 2)
    spec = P(*[None] * split, "tensor") if split < len(shape) else P()
    tensor = eqxshard.by_path({"w": spec})
    rule = eqxshard.combine(tensor, fsdp(min_size))
    whole = np.zeros(shape, np.int8)
    tree = {"w": whole}
    place = eqxshard.shardings(tree, mesh, rule)["w"]
    expected = whole.size // (2 if spec else 1)
    left = NamedSharding(mesh, spec).shard_shape(shape)
    if whole.size >= min_size and any(n % fsdp_size == 0 for n in left):
        expected //= fsdp_size
    assert math.prod(place.shard_shape(shape)) == expected
    # Arrays that were split over tensor stay split as they were.
    used = [axes for axes in place.spec if axes]
    assert all(axes[0] == "tensor" for axes in used if isinstance(axes, tuple))


@needs_new_jax
def test_offload_needs_host_memory_and_a_new_jax(monkeypatch):
    class Device:
        def addressable_memories(self):
            return [SimpleNamespace(kind="device")]

    tree, rule = {"x": jnp.ones(4)}, eqxshard.offload(eqxshard.replicate())
    assert eqxshard.explain(tree, make_mesh(), rule).leaves[0].rule == "replicate()"
    local_devices = property(lambda mesh: [Device()])
    monkeypatch.setattr(jax.sharding.Mesh, "local_devices", local_devices)
    with pytest.raises(ValueError, match="needs memory of the kind 'pinned_host'"):
        eqxshard.shardings(tree, make_mesh(), rule)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    with pytest.raises(ValueError, match=r"offload\(replicate\(\)\) needs JAX 0\.10\.2"):
        eqxshard.shardings(tree, make_mesh(), rule)


def test_rules_for_the_optimizer_state():
    rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.zero1(min_size=64))
    params, moments = opt_specs(rule)
    assert params == {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")}
    split = {"up": P("tensor", "data"), "down": P("data", "tensor"), "bias": P("tensor")}
    assert moments == split
    rule = eqxshard.first_match(eqxshard.by_dim({"embed": "fsdp"}), eqxshard.zero1(1))
    params, moments = opt_specs(rule)
    assert params["up"] == moments["up"] == P(None, "fsdp")
    assert (params["bias"], moments["bias"]) == (P(), P("data"))


@dataclass(frozen=True)
class around(AbstractRule):
    """A combinator that this library does not have: another rule, unchanged."""

    rule: Rule

    def decide(self, path, leaf, mesh):
        return apply_rule(self.rule, path, leaf, mesh)

    def check(self, leaves, mesh):
        check_rule(self.rule, leaves, mesh)

    def map_inside(self, fn: Callable[[Rule], Rule]) -> Rule:
        return around(fn(self.rule))


def test_rules_in_any_combinator_split_optimizer_state_as_they_do_alone():
    mesh, alone = eqxshard.make_mesh(fsdp=2), eqxshard.zero1(1)
    params, moments = opt_specs(eqxshard.first_match(around(alone), fsdp()), mesh)
    assert (params["up"], moments["up"]) == (P(), P("data"))
    assert (params, moments) == opt_specs(alone, mesh)
    # Specs by path are for parameters, and leave the factors of Adafactor alone.
    by_path = eqxshard.by_path({"w": P("fsdp", "tensor")})
    state = eqxshard.init_state(
        lambda key: {"w": jnp.ones((128, 128))},
        lenient(optax.adafactor(0.1, min_dim_size_to_factor=8)),
        key=jax.random.key(0),
        mesh=make_mesh(2, 2),
        rule=eqxshard.first_match(around(by_path), eqxshard.replicate()),
    )
    assert state.model["w"].sharding.spec == P("fsdp", "tensor")


def kinds_of(base: type) -> set[Any]:
    """All classes of rules below one."""
    return {base}.union(*map(kinds_of, base.__subclasses__()))


def test_no_combinator_forgets_the_rules_inside():
    inside = (Rule, tuple[Rule, ...])
    for kind in kinds_of(AbstractRule).difference([AbstractRule]):
        holds = any(field.type in inside for field in fields(kind))
        assert holds == (kind.map_inside is not AbstractRule.map_inside), kind
