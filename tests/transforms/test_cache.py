"""The cache of compiled programs: a second start compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import eqxshard

PROGRAM = """if True:
    import sys
    import jax, equinox as eqx, jax.numpy as jnp, numpy as np, optax, eqxshard

    print(eqxshard.cache_compilations(*sys.argv[1:]))
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    mesh, optim = eqxshard.make_mesh(), optax.adam(1e-3)
    where = {"mesh": mesh, "rule": eqxshard.replicate()}
    key = jax.random.key(0)
    make = lambda key: eqx.nn.MLP(4, 4, 8, 2, key=key)
    state = eqxshard.init_state(make, optim, key=key, **where)
    def loss_fn(model, batch, key):
        return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, -1)
    step = eqxshard.make_train_step(loss_fn, optim, **where)
    state, metrics = step(state, {"x": np.ones((8, 4), np.float32)})
    print(metrics.compute())
    hits, misses = (
        events.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses")
    )
    print(hits, misses)
"""


def start(*arguments, **environment):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**os.environ, "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    folder, loss, counts = run.stdout.splitlines()
    hits, misses = map(int, counts.split())
    return folder, loss, hits, misses


@pytest.mark.versions
@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    folder = tmp_path / "compiled"
    first = start(folder)
    assert first[0] == str(folder) and first[3] > 0
    second = start(folder)
    assert second == (first[0], first[1], first[2] + first[3], 0)


@pytest.fixture
def settings():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("given", ["gs://bucket/cache", Path("gs://bucket/cache")])
def test_a_bucket_is_jaxs_business(tmp_path, settings, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", str(given))
    assert str(eqxshard.cache_compilations()) == "gs://bucket/cache"
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/cache"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("which", ["all users'", "another's"])
def test_a_folder_that_others_may_write_is_not_trusted(tmp_path, settings, caplog, which):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    folder = tmp_path / "cache"
    folder.mkdir()
    if which == "another's":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, -1)
    else:
        folder.chmod(0o777)
    assert eqxshard.cache_compilations(folder) is None
    (record,) = caplog.records
    assert f"not cached in {folder}, which other users may write to; " in record.message
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_the_default_is_in_the_users_cache(tmp_path, settings, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    folder = eqxshard.cache_compilations()
    assert isinstance(folder, Path) and folder.is_dir()
    if sys.platform == "linux":
        assert folder.parent == tmp_path / "eqxshard" / "compiled"
