import os
import subprocess
import sys

import pytest
from run_helpers import environment

from eqxshard.run import mesh_from_text, parse_mesh
from eqxshard.run._devices import _count_to_simulate
from eqxshard.sharding import describe_mesh


@pytest.mark.parametrize(
    "text, message",
    [
        ("data", r"the mesh 'data' has no size in 'data'; write data=2"),
        ("data=2,data=4", "the mesh 'data=2,data=4' has data twice; give it one size"),
        ("dta=2", "names the axis 'dta'; did you mean 'data'? the axes are stage, data,"),
        ("data=2,", "the mesh 'data=2,' names the axis ''; the axes are stage, data, fsdp"),
    ],
)
def test_text_that_is_not_a_mesh_is_refused(text, message):
    with pytest.raises(ValueError) as error:
        parse_mesh(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, devices, batch_size, description",
    [
        ("data=-1", None, None, "8 x cpu (data=8)"),
        ("fsdp=2", None, 64, "8 x cpu (data=4, fsdp=2)"),
        (" fsdp = -1 ", 4, 64, "4 x cpu (fsdp=4)"),
        # Only the axes of the batch divide it.
        ("data=1,tensor=8", None, 4, "8 x cpu (tensor=8)"),
        ("data=2,context=2,stage=2", None, 2, "8 x cpu (stage=2, data=2, context=2)"),
        ("tensor=-1", 8, 1, "8 x cpu (tensor=8)"),
    ],
)
def test_a_mesh_takes_the_devices_that_there_are(text, devices, batch_size, description):
    mesh = mesh_from_text(text, devices=devices, batch_size=batch_size)
    assert describe_mesh(mesh) == description


@pytest.mark.parametrize(
    "text, devices, message",
    [
        ("data=3", None, "mesh data=3 does not fit the 8 devices"),
        ("fsdp=3", None, "mesh fsdp=3 does not fit the 8 devices"),
        ("data=-1,fsdp=-1", None, "data and fsdp are both -1"),
        ("data=0", None, "axis data=0 must be at least 1"),
        ("data=-1", 0, "0 devices were asked for, and there are 8 x cpu; use 1 to 8"),
        ("data=-1", 999999999, "999999999 devices were asked for"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(text, devices, message):
    with pytest.raises(ValueError) as error:
        mesh_from_text(text, devices=devices)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "cores, text, batch_size, count",
    [
        (6, "data=-1", 256, 4),  # 256 does not divide by 5 or 6
        (6, "data=-1", 255, 5),
        (7, "fsdp=2,data=-1", 60, 6),
        (1, "fsdp=4", 256, 4),
        (8, "tensor=4,data=-1", 2, 8),
    ],
)
def test_as_many_devices_are_simulated_as_cores_where_the_batch_divides(
    monkeypatch, cores, text, batch_size, count
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert _count_to_simulate(parse_mesh(text), batch_size) == count


def run(code, **settings):
    """Run code in a process that has not looked for devices."""
    done = subprocess.run(
        [sys.executable, "-c", f"from eqxshard.run import *\nimport jax\n{code}"],
        env=environment(**settings),
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_devices_are_simulated_before_jax_looks():
    out, err = run('print(mesh_from_text("data=2,fsdp=3").size, jax.device_count())')
    assert out == "6 6", err


@pytest.mark.slow
def test_the_flag_of_xla_for_devices_counts():
    flag = "--xla_force_host_platform_device_count=3"
    out, err = run('print(mesh_from_text("data=-1").size)', XLA_FLAGS=flag)
    assert out == "3", err
    code = 'print(mesh_from_text("data=-1", devices=4).size)'
    out, err = run(code, XLA_FLAGS=flag)
    assert out == "4", err


@pytest.mark.slow
def test_the_option_of_jax_for_devices_counts():
    code = 'jax.config.update("jax_num_cpu_devices", 3)\n'
    out, err = run(f'{code}print(mesh_from_text("data=-1").size)')
    assert out == "3", err


@pytest.mark.slow
def test_one_device_because_jax_looked_too_early_is_told():
    code = """
jax.devices()
simulate_devices(1)  # No more than there are.
simulate_devices(4)
print(jax.device_count())
"""
    assert run(code) == (
        "1",
        "warning: JAX was used before 4 CPU devices could be simulated, so there is only "
        "one; call eqxshard.train before other JAX functions, or set "
        "JAX_NUM_CPU_DEVICES=4.\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_devices_that_are_not_there_are_named(platform):
    out, err = run("find_devices()", JAX_PLATFORMS=platform)
    last = err.splitlines()[-1]
    says = (
        f"eqxshard._errors.UsageError: JAX finds no devices for JAX_PLATFORMS={platform}: "
    )
    assert out == "" and last.startswith(says)
    assert last.endswith(
        "unset it, or install JAX for the accelerator, such as jax[cuda12]."
    )
