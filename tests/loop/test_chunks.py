import pytest
from loop_helpers import count_dispatched, fresh, make_loader

import eqxshard

OPTIM = lenient(optax.adam(1e-2))


def test_an_epoch_of_a_resident_dataset_is_one_dispatch_per_report(monkeypatch):
    calls = []
    many = eqxshard.TrainStep.many
    monkeypatch.setattr(
        eqxshard.TrainStep,
        "many",
        lambda step, state, batches: (
            calls.append(int(batches.count)) or many(step, state, batches)
        ),
    )
    where: dict[str, Any] = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(Model, OPTIM, key=jax.random.key(0), **where)
    train_step = eqxshard.make_train_step(squared_errors, OPTIM, **where)
    loader = make_loader(placement="device")
    eqxshard.fit(state, train_step, loader, epochs=2, log_every=100)
    assert calls == [len(loader), len(loader)]


def test_a_loader_that_ends_too_early_is_named():
    state, train_step = fresh()
    message = "ended after step 6, before step 18; take fewer steps"
    with pytest.raises(ValueError, match=message):
        eqxshard.fit(state, train_step, make_loader(epochs=1), epochs=3)
