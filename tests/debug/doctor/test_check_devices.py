import pytest

from eqxshard.debug._doctor._check_devices import (
    check_count,
    check_flags,
    check_gpus,
    check_links,
    check_platforms,
    check_simulated,
    check_start,
    check_visible,
)
from eqxshard.debug._doctor._facts import Devices, Facts

CPU = Devices("cpu", {"cpu": 1})
JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA12 = {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
CUDA13 = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}


def found(check, **facts):
    """The sentences and the commands of a check."""
    return [(x.sentence, x.command) for x in check(Facts(**facts))]


def test_jax_does_not_start():
    assert found(check_start, devices=CPU, packages=JAX) == []
    assert found(check_start, packages=JAX, failure="ImportError: no") == [
        (
            "JAX does not start: ImportError: no",
            'python -c "import jax; print(jax.devices())"',
        )
    ]
    # That it is not installed has a finding of its own.
    assert found(check_start) == []


def test_jax_hangs():
    ((sentence, command),) = found(check_start, packages=JAX, hangs=True)
    assert "does not come back" in sentence and command.startswith("JAX_PLATFORMS=cpu")
    ((_, command),) = found(check_start, packages=JAX, hangs=True, driver="580.1")
    assert command == "nvidia-smi"


@pytest.mark.parametrize(
    "driver, packages, words, command",
    [
        ("580.65", JAX, "for CPUs only", 'pip install --upgrade "jax[cuda13]==0.10.2"'),
        ("550.54", JAX, "for CPUs only", 'pip install --upgrade "jax[cuda12]==0.10.2"'),
        ("470.1", JAX, "470.1 is older than 525", "sudo apt-get install --only-upgrade"),
        ("550.5", JAX | CUDA13, "needs NVIDIA's driver 580", "pip uninstall -y jax-cuda13"),
        ("550.5", JAX | CUDA12, "is installed.", "JAX_PLATFORMS=cuda python -c"),
    ],
)
def test_gpus_that_jax_does_not_find(driver, packages, words, command):
    facts = {"driver": driver, "packages": packages}
    ((sentence, mends),) = found(check_gpus, devices=CPU, **facts)
    assert words in sentence and mends.startswith(command)
    assert found(check_gpus, devices=Devices("gpu", {"NVIDIA H200": 1}), **facts) == []
    for hidden in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert found(check_gpus, devices=CPU, environment=hidden, **facts) == []


def test_libraries_of_another_cuda():
    facts = {"driver": "550.5", "packages": JAX | CUDA12, "devices": CPU}
    environment = {"LD_LIBRARY_PATH": "/usr/local/cuda-11/lib64"}
    ((_, command),) = found(check_gpus, environment=environment, **facts)
    assert command == "unset LD_LIBRARY_PATH"


@pytest.mark.parametrize("text", ["", "-1"])
def test_visible_devices_that_are_none(text):
    facts = {"environment": {"CUDA_VISIBLE_DEVICES": text}}
    assert found(check_visible, driver="580.1", **facts) == [
        (f"CUDA_VISIBLE_DEVICES={text!r} hides every GPU.", "unset CUDA_VISIBLE_DEVICES")
    ]
    assert found(check_visible, **facts) == []


def test_visible_devices_that_are_not_there():
    facts = {"driver": "580.1", "gpus": ("NVIDIA H200", "NVIDIA H200")}
    for text in ("0,1", "GPU-12ab", "MIG-34cd"):
        environment = {"CUDA_VISIBLE_DEVICES": text}
        assert found(check_visible, environment=environment, **facts) == []
    environment = {"CUDA_VISIBLE_DEVICES": "1,2"}
    ((sentence, _),) = found(check_visible, environment=environment, **facts)
    assert "names GPU 2, and there are 2, counted from 0." in sentence


def test_platforms():
    (finding,) = check_platforms(Facts(environment={"JAX_PLATFORMS": "cpu"}, driver="580"))
    assert not finding.is_wrong and "keeps JAX off the GPUs" in finding.sentence
    assert found(check_platforms, environment={"JAX_PLATFORMS": "cpu"}) == []
    ((sentence, command),) = found(check_platforms, environment={"JAX_PLATFORMS": "cuda"})
    assert sentence.endswith("asks for GPUs, and there is no NVIDIA driver.")
    assert command == "unset JAX_PLATFORMS"


def test_flags():
    good = {"XLA_FLAGS": "--xla_dump_to=/tmp/a --xla_gpu_autotune_level=0 --xla_x"}
    assert found(check_flags, environment=good) == []
    bad = {"XLA_FLAGS": "--xla_dump_to=/a xla_force_host_platform_device_count=8"}
    ((sentence, command),) = found(check_flags, environment=bad)
    assert "'xla_force_host_platform_device_count=8'" in sentence
    assert command == "unset XLA_FLAGS"


@pytest.mark.parametrize(
    "environment, name",
    [
        ({"JAX_NUM_CPU_DEVICES": "8"}, "JAX_NUM_CPU_DEVICES"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, "XLA_FLAGS"),
    ],
)
def test_simulated_devices(environment, name):
    facts = Facts(environment=environment, devices=CPU, usable_cores=2)
    (finding,) = check_simulated(facts)
    assert finding.sentence == f"{name} has JAX simulate 8 CPU devices on 2 cores."
    assert not finding.is_wrong and finding.command == f"unset {name}"


def test_a_number_of_devices_that_is_none():
    for text in ("0", "many", "-1"):
        (finding,) = check_simulated(Facts(environment={"JAX_NUM_CPU_DEVICES": text}))
        assert finding.is_wrong and f"JAX_NUM_CPU_DEVICES={text} is not" in finding.sentence


def test_some_gpus_are_missing():
    facts = {"gpus": ("A",) * 8, "devices": Devices("gpu", {"A": 7})}
    assert found(check_count, **facts) == [("JAX finds 7 of 8 GPUs.", "nvidia-smi")]
    visible = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}
    assert found(check_count, environment=visible, **facts) == []


LINKS = """        GPU0    GPU1    GPU2    NIC0    CPU Affinity
GPU0     X      NV18    {}     SYS     0-31
GPU1    NV18     X      {}     SYS     0-31
GPU2    {}     {}      X      SYS     32-63
NIC0    SYS     SYS     SYS      X

Legend: ...
"""


def test_links():
    # How far network cards are does not count.
    assert found(check_links, links=LINKS.format(*["NV18"] * 4)) == []
    ((sentence, command),) = found(check_links, links=LINKS.format(*["PHB"] * 4))
    assert "without NVLink, across a PCIe host bridge (PHB)" in sentence
    assert command == "nvidia-smi topo -m"
    assert found(check_links) == []
