"""Every test runs on 8 simulated CPU devices, under strict types and warnings."""

import gc
import os
import re
import signal
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time of these tests is compilation, which takes half as long without XLA's
# optimizations for CPUs, and half of that with its old emitters of fusions, which JAX 0.11
# removed. Partitioning, and so communication, is the same.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""),
)
# What JAX deprecates is an error in the processes that tests start, too.
os.environ.setdefault("PYTHONWARNINGS", "error:jax.:DeprecationWarning")

import jax
import jaxtyping
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Until all modules of tests are imported: what they make stays.
gc.disable()

# A shell has its background jobs ignore SIGINT, and the processes of tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
_COMPILED = tempfile.TemporaryDirectory(prefix="eqxshard-compiled-")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# How long an example takes depends on what else the machine does.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


def pytest_configure(config):
    """Check annotations in the quick tests, and compile programs of several tests once.

    The other tests run the package as users do, without checks of annotations, which take a
    fifth of the time.

    Programs are in JAX's cache. Other processes have no cache, because tests kill them, and
    JAX does not write an entry in one piece. Nor can JAX read programs that it compiled for
    GPUs that are not there.
    """
    if "not slow" in config.option.markexpr:
        install_import_hook("eqxshard", "checked_types.check_types")
    if not config.option.markexpr.startswith("gpu"):
        jax.config.update("jax_compilation_cache_dir", _COMPILED.name)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_finish():
    # No collection looks through the million objects of modules again.
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    _COMPILED.cleanup()


def pytest_terminal_summary(terminalreporter, config):
    """Say which marks the tests that were asked for have, if none ran because of them."""
    if terminalreporter.stats.keys() == {"deselected"}:
        left_out = terminalreporter.stats["deselected"]
        marks = {mark.name for test in left_out for mark in test.iter_markers()}
        if found := marks.intersection(re.findall(r"not (\w+)", config.option.markexpr)):
            options = " or ".join(f"-m {mark}" for mark in sorted(found))
            terminalreporter.write_line(f"none of these tests ran: add {options}")


@pytest.fixture
def unannotated(monkeypatch):
    """Without type checks, as outside of tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def as_scripts_run():
    """Use JAX's own rules for types and ranks: optax mixes types, recipes add biases."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def cudnn(monkeypatch):
    """Pretend that cuDNN is installed, which JAX checks before it compiles for it."""
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91000)


@pytest.fixture
def small_disk():
    """A file system of less than half a mebibyte."""
    # Outside of pytest's folders: if the tests are killed, these could not be removed.
    with tempfile.TemporaryDirectory(
        prefix="eqxshard-disk-", ignore_cleanup_errors=True
    ) as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("only root may mount a small disk")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
