"""Options of XLA for CPUs: products and their sums are right, and XLA_FLAGS goes first."""

import os
import sys
from pathlib import Path

import pytest
from process_helpers import finished

from eqxshard.training._jit import cpu_options

SCRIPT = Path(__file__).parent.parent / "products_on_cpus.py"
FUSIONS = "xla_cpu_experimental_ynn_fusion_type"


@pytest.mark.versions
@pytest.mark.slow
def test_products_and_their_sums_are_right():
    """XLA's own choice of products for YNNPACK is wrong, and crashes."""
    # At the optimization level of the other tests, it hands it less.
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    status, out, err = finished([sys.executable, SCRIPT], env=env, seconds=900)
    assert (status, out) == (0, "done\n"), out + err


def test_flags_of_the_user_go_before_our_options(monkeypatch, tmp_path):
    def options():
        return cpu_options(xla_backend_optimization_level=1)

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert {*options()} == {FUSIONS, "xla_backend_optimization_level"}
    assert "REDUCE" not in options()[FUSIONS]
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=here --{FUSIONS}=")
    assert {*options()} == {"xla_backend_optimization_level"}
    # XLA takes the name of a file of flags, too.
    file = tmp_path / "flags"
    file.write_text("--xla_backend_optimization_level=3\n")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert {*options()} == {FUSIONS}
    file.unlink()
    assert {*options()} == {FUSIONS, "xla_backend_optimization_level"}
