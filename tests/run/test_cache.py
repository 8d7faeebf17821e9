"""`cli` has JAX keep compiled programs: a second start compiles nothing."""

import subprocess
import sys

import pytest
from run_helpers import environment

SCRIPT = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import eqxshard


@dataclass(frozen=True)
class Args:
    \"\"\"Compile something small.\"\"\"


def main(args):
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    jax.jit(lambda x: jnp.sin(x) * 2)(jnp.ones(4)).block_until_ready()
    hits, misses = (
        events.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses")
    )
    return f"{hits} {misses}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
"""


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is of Linux")
@pytest.mark.parametrize("told", [False, True])
def test_a_second_start_compiles_nothing(tmp_path, told):
    script, folder = tmp_path / "script.py", tmp_path / "xdg" / "eqxshard" / "compiled"
    script.write_text(SCRIPT)
    settings = environment(XDG_CACHE_HOME=str(tmp_path / "xdg"))
    del settings["JAX_COMPILATION_CACHE_DIR"]
    if told:
        folder = tmp_path / "told"
        settings["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    counts = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, script], env=settings, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        counts.append([int(word) for word in run.stdout.split()])
    (_, compiled), (read, again) = counts
    assert compiled > 0 and (read, again) == (compiled, 0)
    assert any(folder.iterdir())
    assert (tmp_path / "xdg").exists() != told
