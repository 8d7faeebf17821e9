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


def refuse(word, target, wanted):
    with pytest.raises(ValueError, match=re.escape(word)):
        find_backend(target, wanted)


def test_one_that_is_not_there_is_an_error_with_the_command(folder, monkeypatch):
    refuse(f"the compiler for h200 is not installed; run `{install('gpu')}`", H200, "gpu")
    assert f"jax-cuda12-pjrt=={jax.__version__}" in install("gpu")
    assert str(wheels_folder()) in install("gpu") and "libtpu==" in install("tpu")
    for target, wanted in ((H200, "tpu"), (TPU, "gpu"), (CPU, "gpu")):
        refuse("does not compile for the target", target, wanted)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    refuse("a wheel for Linux only, and this is Darwin", H200, "gpu")
    put(folder, "jax_plugins.xla_cuda12", "jax_cuda12_pjrt-0.1.dist-info")
    refuse("jax-cuda12-pjrt is of version 0.1 and JAX of", H200, None)
