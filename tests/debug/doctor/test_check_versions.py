import pytest

from eqxshard.debug._doctor._check_versions import (
    best_cuda,
    check_jaxlib,
    check_packages,
    check_plugins,
    check_python,
    check_stray_client,
)
from eqxshard.debug._doctor._facts import Facts

GPU = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA12 = {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
CUDA13 = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}


def found(check, **facts):
    """The sentences and the commands of a check."""
    return [(x.sentence, x.command) for x in check(Facts(**facts))]


def test_python():
    assert found(check_python, python="3.13.0") == []
    assert found(check_python, python="3.10.4") == [
        (
            "Python 3.10.4 is older than 3.11, which eqxshard needs.",
            "uv venv --python 3.11",
        )
    ]


def test_packages():
    needs = {"optax": "0.2.8", "numpy": "2.1", "rich": "14.3"}
    have = {"optax": "0.2.10", "numpy": "2.0.9"}
    assert found(check_packages, needs=needs, packages=have) == [
        (
            "numpy 2.0.9 is older than 2.1, which eqxshard needs.",
            'pip install --upgrade "numpy>=2.1"',
        ),
        ("rich is not installed.", 'pip install --upgrade "rich>=14.3"'),
    ]


def test_jaxlib():
    bounds = ("0.10.1", "0.10.2")
    command = 'pip install --upgrade "jax==0.10.2" "jaxlib==0.10.2"'
    assert found(check_jaxlib, packages=GPU, jaxlib=bounds) == []
    assert found(check_jaxlib, packages=GPU | {"jaxlib": "0.12.0"}, jaxlib=bounds) == [
        ("jax 0.10.2 takes jaxlib 0.10.1 to 0.10.2, and 0.12.0 is installed.", command)
    ]
    assert found(check_jaxlib, packages={"jax": "0.10.2"}) == [
        ("jaxlib is not installed beside jax 0.10.2.", command)
    ]
    assert found(check_jaxlib) == []


def test_plugins_are_those_of_jax():
    assert found(check_plugins, packages=GPU | CUDA12) == []
    older = GPU | CUDA12 | {"jax-cuda12-pjrt": "0.10.1"}
    assert found(check_plugins, packages=older) == [
        (
            "jax-cuda12-pjrt 0.10.1 and jaxlib 0.10.2 differ, so JAX may leave it out.",
            'pip install --upgrade "jax[cuda12]==0.10.2"',
        )
    ]
    assert found(check_plugins, packages=GPU | {"jax-cuda13-plugin": "0.10.2"}) == [
        (
            "jax-cuda13-plugin is installed without jax-cuda13-pjrt.",
            'pip install --upgrade "jax[cuda13]==0.10.2"',
        )
    ]


@pytest.mark.parametrize("driver, worse", [("580.65.06", "cuda12"), ("550.1", "cuda13")])
def test_plugins_of_two_versions(driver, worse):
    ((sentence, command),) = found(
        check_plugins, packages=GPU | CUDA12 | CUDA13, driver=driver
    )
    assert sentence.endswith("are both installed, and JAX loads only one.")
    assert command == f"pip uninstall -y jax-{worse}-plugin jax-{worse}-pjrt"


def test_a_compiler_for_gpus_without_any():
    packages = GPU | {"jax-cuda12-pjrt": "0.10.2"}
    (finding,) = check_stray_client(Facts(packages=packages))
    assert not finding.is_wrong and "every start of JAX logs an error" in finding.sentence
    assert finding.command == "pip uninstall -y jax-cuda12-pjrt jax-cuda12-plugin"
    assert found(check_stray_client, packages=packages, driver="580.1") == []


@pytest.mark.parametrize(
    "driver, cuda",
    [("580.65", "cuda13"), ("570.1", "cuda12"), ("470.2", None), (None, None)],
)
def test_the_newest_cuda_of_a_driver(driver, cuda):
    assert best_cuda(driver) == cuda
