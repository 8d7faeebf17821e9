import os
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.slow
def test_three_thousand_steps_do_not_deadlock():
    """In a process of its own: a deadlock of simulated devices ends in an abort."""
    program = """
        import jax
        jax.config.update("jax_num_cpu_devices", 8)
        import equinox as eqx, numpy as np, optax, eqxshard
        mesh, rule, optim = eqxshard.make_mesh(), eqxshard.replicate(), optax.adam(1e-3)
        state = eqxshard.init_state(
            lambda key: eqx.nn.MLP(4, 1, 4, 2, key=key), optim, key=jax.random.key(0),
            mesh=mesh, rule=rule,
        )
        train_step = eqxshard.make_train_step(
            lambda model, batch, key: jax.vmap(model)(batch)[:, 0] ** 2, optim, mesh=mesh,
            rule=rule,
        )
        batch = jax.device_put(np.ones((8, 4), np.float32), eqxshard.batch_sharding(mesh))
        for _ in range(3000):
            state, metrics = train_step(state, batch)
        print(int(state.step))
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert out.stdout.strip() == "3000", out.stderr[-2000:]
