"""`cache=`: what a plan compiles is there when the step runs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import OPTIM, RULE
from run_helpers import ROOT, environment
from transformer import Transformer, next_token_losses

import eqxshard

RUN = """
import sys
import jax, jax.numpy as jnp, numpy as np
import eqxshard
from plan_helpers import OPTIM, RULE
from transformer import Transformer, next_token_losses

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
mesh = eqxshard.make_mesh(fsdp=2)
state = eqxshard.init_state(
    Transformer, OPTIM, key=jax.random.key(0), mesh=mesh, rule=RULE
)
step = eqxshard.make_train_step(next_token_losses, OPTIM)
batch = {"tokens": np.zeros((8, 17), np.int32)}
batch = eqxshard.filter_shard(batch, eqxshard.sharding.batch_sharding(mesh))
hits.clear()
step(state, batch)
misses = [event for event in hits if event.endswith("cache_misses")]
print(len(misses))
"""


def plan(folder):
    return eqxshard.plan(
        Transformer,
        next_token_losses,
        OPTIM,
        {"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)},
        mesh_shape={"fsdp": 2},
        rule=RULE,
        target="cpu",
        cache=folder,
    )


def steps(folder):
    return sorted(folder.glob("jit_train_step-*-cache"))


@pytest.mark.slow
def test_a_run_compiles_nothing_that_was_planned(tmp_path):
    folder = tmp_path / "cache"
    notes = plan(folder).notes
    (entry,) = steps(folder)
    assert f"the compiled step is in {folder}" in notes

    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder)],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert steps(folder) == [entry]
