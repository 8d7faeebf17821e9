import pytest
from loop_helpers import count_dispatched, fresh, make_loader

import eqxshard


@pytest.mark.slow
def test_an_epoch_of_a_resident_dataset_is_one_dispatch_per_report(monkeypatch):
    taken = count_dispatched(monkeypatch)
    state, train_step = fresh()
    loader = make_loader(placement="device")
    eqxshard.fit(state, train_step, loader, epochs=2, log_every=100)
    assert taken == [6, 6]


def test_a_loader_that_ends_too_early_is_named():
    state, train_step = fresh()
    message = "ended after step 6, before step 18; take fewer steps"
    with pytest.raises(ValueError, match=message):
        eqxshard.fit(state, train_step, make_loader(epochs=1), epochs=3)
