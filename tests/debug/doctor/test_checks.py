"""What the checks find in facts that are made up."""

import pytest

from eqxshard.debug._doctor._facts import Cache, Devices, Disk, Facts, version_key
from eqxshard.debug._doctor._report import find

GB = 10**9
JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA12 = JAX | {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
CUDA13 = JAX | {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
CPU, GPU = Devices("cpu", {"cpu": 1}), Devices("gpu", {"NVIDIA H200": 8})


def machine(**facts):
    """A machine with nothing wrong, but for some facts."""
    return Facts(**{"packages": JAX, "devices": CPU, **facts})


def disk(name="current folder", free=50 * GB, total=100 * GB):
    return {"disks": (Disk(name, "/a", free, total),)}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"needs": {"optax": "0.2.8"}, "packages": JAX | {"optax": "0.2.10"}},
        {"packages": CUDA12, "driver": "550.54", "devices": GPU},
        {"cache": Cache("/c"), **disk(), "usable_cores": 8, "quota": 8.0},
        disk("shared memory", free=8 * GB, total=8 * GB),
        {"packages": {}, "devices": None},
    ],
    ids=str,
)
def test_nothing_is_found_where_all_is_well(facts):
    assert find(machine(**facts)) == []


#: Facts, a word of what is found, how the command begins, and whether it is wrong.
FINDINGS = [
    ({"python": "3.10.4"}, "older than 3.11", "uv venv", True),
    ({"needs": {"rich": "14.3"}}, "rich is not installed", "pip install", True),
    (
        {"needs": {"numpy": "2.1"}, "packages": JAX | {"numpy": "2.0.9"}},
        "numpy 2.0.9 is older than 2.1",
        'pip install --upgrade "numpy>=2.1"',
        True,
    ),
    (
        {
            "packages": CUDA12 | {"jax-cuda12-plugin": "0.9"},
            "driver": "550",
            "devices": GPU,
        },
        "jax-cuda12-plugin 0.9 and jaxlib 0.10.2 differ",
        'pip install --upgrade "jax[cuda12]',
        True,
    ),
    ({"packages": CUDA12}, "every start of JAX logs", "pip uninstall -y jax-cuda12", False),
    ({"devices": None, "failure": "no jaxlib"}, "no jaxlib", "python -c", True),
    ({"devices": None, "hangs": True, "driver": "1"}, "not come back", "nvidia-smi", True),
    ({"driver": "580.65"}, "for CPUs only", 'pip install --upgrade "jax[cuda13]', True),
    ({"driver": "550.54"}, "for CPUs only", 'pip install --upgrade "jax[cuda12]', True),
    ({"driver": "470.1"}, "older than 525", "sudo apt-get", True),
    ({"driver": "550", "packages": CUDA13}, "needs NVIDIA's driver 580", "pip unin", True),
    ({"driver": "550", "packages": CUDA12}, "finds no GPU", "JAX_PLATFORMS=cuda", True),
    (
        {"driver": "550", "environment": {"JAX_PLATFORMS": "cpu"}},
        "keeps JAX off the GPUs",
        "unset JAX_PLATFORMS",
        False,
    ),
    (
        {"driver": "550", "environment": {"CUDA_VISIBLE_DEVICES": "-1"}},
        "hides every GPU",
        "unset CUDA_VISIBLE_DEVICES",
        True,
    ),
    ({"cache": Cache("/c", is_foreign=True)}, "another user", "export JAX_COMP", True),
    ({"cache": Cache("/c", is_open=True)}, "written by all", "chmod o-w /c", True),
    (disk(free=GB // 2), "0.5 GB are free", "df -h /a", True),
    (disk(free=5 * GB), "5.0 GB are free", "df -h /a", False),
    (disk("shared memory", total=64_000_000), "64 MB in all", "docker run", False),
    ({"usable_cores": 64, "quota": 2.5}, "2.5 cores", "export JAX_NUM_CPU_DEV", False),
    ({"resolves": False}, "has no address", "echo", False),
    ({"resolves": False, "environment": {"SLURM_JOB_ID": "7"}}, "address", "echo", True),
]


@pytest.mark.parametrize("facts, words, command, is_wrong", FINDINGS, ids=str)
def test_what_is_wrong_is_found_with_what_mends_it(facts, words, command, is_wrong):
    (finding,) = find(machine(**facts))
    assert words in finding.sentence and finding.command.startswith(command)
    assert finding.is_wrong is is_wrong


@pytest.mark.parametrize(
    "older, newer", [("0.9", "0.10.1"), ("0.10.2", "0.12"), ("2.1rc1", "2.2"), ("", "1")]
)
def test_versions_are_compared_by_their_numbers(older, newer):
    assert version_key(older) < version_key(newer)
    assert version_key("2.0.0") == version_key("2")
