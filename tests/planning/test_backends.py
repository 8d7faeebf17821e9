import re
import sys
from pathlib import Path

import jax
import pytest

from eqxshard.planning._backends import (
    check_whole_hosts,
    find_backend,
    install,
    tpu_topology,
)
from eqxshard.planning._targets import Target

H200, TPU, CPU = map(Target.named, ("h200", "tpu-v5p", "cpu"))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder without compilers, except those that a test puts there."""
    monkeypatch.setenv("EQXSHARD_PLAN_DIR", str(tmp_path))
    without = [x for x in sys.path if not Path(x, "jax_plugins").exists()]
    monkeypatch.setattr(sys, "path", without)
    return tmp_path


def put(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_without_a_compiler_that_for_cpus_is_used():
    for target in (H200, TPU, CPU):
        assert find_backend(target, None) == find_backend(target, "cpu") == "cpu"


def test_a_compiler_in_the_folder_is_found(folder):
    put(folder, "jax_cuda12_pjrt", jax.__version__)
    assert find_backend(H200, None) == "gpu"
    assert find_backend(TPU, None) == "cpu"
    put(folder, "libtpu", "0.0.1")
    assert find_backend(TPU, "tpu") == "tpu"


def refuse(word, target, wanted):
    with pytest.raises(ValueError, match=re.escape(word)):
        find_backend(target, wanted)


def test_one_that_is_not_there_is_an_error_with_the_command(folder):
    refuse(f"the compiler for h200 is not installed; run `{install('gpu')}`", H200, "gpu")
    assert f"jax-cuda12-pjrt=={jax.__version__}" in install("gpu")
    assert str(folder) in install("gpu") and "libtpu==" in install("tpu")
    for target, wanted in ((H200, "tpu"), (TPU, "gpu"), (CPU, "gpu")):
        refuse("does not compile for the target", target, wanted)
    put(folder, "jax_cuda12_pjrt", "0.1")
    refuse("jax-cuda12-pjrt is of version 0.1 and JAX of", H200, None)


@pytest.mark.parametrize(
    "generation, count, name, options",
    [
        ("v5p", 512, "v5p:8x8x8", {}),
        ("v5p", 16, "v5p:4x2x2", {}),
        ("v4", 4, "v4:2x2x1", {"chip_config_name": "megacore"}),
        ("v5e", 12, "v5e:6x2", {}),
        ("v6e", 2, "v6e:2x1", {"chips_per_host_bounds": (2, 1, 1)}),
        ("v6e", 512, "v6e:16x16", {"num_slices": 2}),
    ],
)
def test_topologies_are_hosts_near_to_a_cube(generation, count, name, options):
    target = Target.named(f"tpu-{generation}")
    assert tpu_topology(target, count) == {"topology_name": name, **options}


@pytest.mark.parametrize(
    "word, count, target",
    [
        ("12 devices are not whole hosts of 8; use 8 or 16", 12, "h200"),
        ("3 devices are not whole hosts of 4; use 4", 3, "tpu-v5p"),
        ("300 devices are not whole slices of 256; use 256 or 512", 300, "tpu-v5e"),
    ],
)
def test_devices_are_whole_hosts(word, count, target):
    found = Target.named(target)
    with pytest.raises(ValueError, match=word):
        check_whole_hosts(found, found.compiler, count)
    check_whole_hosts(found, "cpu", count)
    for fits in (1, 2, 4, 512):
        check_whole_hosts(found, found.compiler, fits)
