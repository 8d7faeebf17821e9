import re

import jax
import pytest

from eqxshard.planning._backends import find_backend, install, wheels_folder
from eqxshard.planning._targets import Target

H200, TPU, CPU = map(Target.named, ("h200", "tpu-v5p", "cpu"))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """No compilers, but those that a test puts there."""
    monkeypatch.setenv("EQXSHARD_PLAN_DIR", str(tmp_path))
    monkeypatch.setattr("eqxshard.planning._backends._is_importable", lambda module: False)
    return tmp_path


def put(folder, module, info):
    folder.joinpath(*module.split(".")).mkdir(parents=True)
    (folder / info).mkdir()


def test_without_a_compiler_that_for_cpus_is_used():
    for target in (H200, TPU, CPU):
        assert find_backend(target, None) == ("cpu", None)
        assert find_backend(target, "cpu") == ("cpu", None)


def test_a_compiler_in_the_folder_is_found(folder):
    put(folder, "jax_plugins.xla_cuda12", f"jax_cuda12_pjrt-{jax.__version__}.dist-info")
    assert find_backend(H200, None) == ("gpu", folder)
    assert find_backend(TPU, None) == ("cpu", None)
    put(folder, "libtpu", "libtpu-0.0.1.dist-info")
    assert find_backend(TPU, "tpu") == ("tpu", folder)


def test_one_that_is_not_there_is_an_error_with_the_command():
    message = f"the compiler for h200 is not installed; run `{install('gpu')}`."
    with pytest.raises(ValueError, match=re.escape(message)):
        find_backend(H200, "gpu")
    assert (
        f"jax-cuda12-pjrt=={jax.__version__}" in message and str(wheels_folder()) in message
    )
    assert "libtpu==" in install("tpu")


def test_one_of_another_version_is_an_error(folder):
    put(folder, "jax_plugins.xla_cuda12", "jax_cuda12_pjrt-0.1.dist-info")
    with pytest.raises(ValueError, match=r"jax-cuda12-pjrt is of version 0\.1 and JAX of"):
        find_backend(H200, None)


@pytest.mark.parametrize("target, wanted", [(H200, "tpu"), (TPU, "gpu"), (CPU, "gpu")])
def test_one_for_another_target_is_an_error(target, wanted):
    with pytest.raises(ValueError, match="does not compile for the target"):
        find_backend(target, wanted)


def test_other_systems_have_none(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(ValueError, match="a wheel for Linux only, and this is Darwin;"):
        find_backend(H200, "gpu")
