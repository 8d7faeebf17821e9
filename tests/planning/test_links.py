import dataclasses

import pytest

from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._links import link_seconds
from eqxshard.planning._targets import Target

TARGET = dataclasses.replace(Target.named("h200"), link=100.0, network=10.0, per_host=4)
SIZE = 4 * 1024


def seconds(kind, groups, target=TARGET, devices=16):
    name = "source_target_pairs" if "permute" in kind else "replica_groups"
    text = (
        "ENTRY %main (x: f32[8]) -> f32[1024] {\n"
        f"  ROOT %y = f32[1024]{{0}} {kind}(%x), {name}={groups}, a=1\n}}\n"
    )
    (operation,) = find_collectives(parse_module(text), devices)
    return link_seconds(operation, target)


def test_inside_a_host_only_its_links_count():
    assert seconds("all-gather", "[4,4]<=[16]") == SIZE * 3 / 4 / 100
    assert seconds("all-reduce", "[4,4]<=[16]") == 2 * SIZE * 3 / 4 / 100
    assert seconds("reduce-scatter", "[4,4]<=[16]") == SIZE * 3 / 100
    assert seconds("collective-permute", "{{0,1},{1,0}}") == SIZE / 100


def test_one_device_of_each_host_sends_all_over_the_network():
    groups = "[4,4]<=[4,4]T(1,0)"
    assert seconds("all-gather", groups) == SIZE * 3 / 4 / 10
    assert seconds("all-reduce", groups) == 2 * SIZE * 3 / 4 / 10
    assert seconds("collective-permute", "{{0,4},{4,0}}") == SIZE / 10


def test_the_devices_of_a_host_share_what_goes_over_the_network():
    # Of four hosts each sends three quarters, in four parts.
    assert seconds("all-gather", "[1,16]<=[16]") == pytest.approx(SIZE * 3 / 4 / 4 / 10)
    # Three quarters of what each device has are for other hosts.
    assert seconds("all-to-all", "[1,16]<=[16]") == pytest.approx(SIZE * 3 / 4 / 10)


def test_over_eight_hosts_a_gather_of_weights_and_the_all_reduce_of_a_hybrid():
    """By hand, for H200s: ports of 50 GB/s, NVLink of 450."""
    h200 = Target.named("h200")
    # Each device sends 63 of 64 parts over NVLink; eight ports share 7/8 of the whole.
    nvlink, ports = 63 / 64 / 450e9, 7 / 8 / 8 / 50e9
    assert nvlink == pytest.approx(ports)
    over_all = seconds("all-gather", "[1,64]<=[64]", h200, 64)
    assert over_all == pytest.approx(SIZE * ports)
    slow = dataclasses.replace(h200, network=25e9)
    halved = seconds("all-gather", "[1,64]<=[64]", slow, 64)
    assert halved == pytest.approx(2 * SIZE * ports)
    # Of a hybrid, each device has a port for its own part, and sends it twice but for 1/8.
    across = seconds("all-reduce", "[8,8]<=[8,8]T(1,0)", h200, 64)
    assert across == pytest.approx(2 * SIZE * 7 / 8 / 50e9)
    within = seconds("all-gather", "[8,8]<=[64]", h200, 64)
    assert within == pytest.approx(SIZE * 7 / 8 / 450e9)


def test_without_links_there_is_no_time():
    assert seconds("all-gather", "[4,4]<=[16]", Target.named("cpu")) is None

    # Nobody needs the network inside of a host; beyond it, it is not free.
    alone = dataclasses.replace(TARGET, network=None)
    assert seconds("all-gather", "[4,4]<=[16]", alone) == SIZE * 3 / 4 / 100
    assert seconds("all-gather", "[1,16]<=[16]", alone) is None
