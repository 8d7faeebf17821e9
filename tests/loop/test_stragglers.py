"""Slow processes: which are found, and what is logged of them."""

import logging

import jax
import pytest

from eqxshard.loop import _stragglers
from eqxshard.loop._stragglers import Slow, Stragglers, find_slow

FAST = {"data": 0.02, "callbacks": 0.0, "log": 0.01, "dispatch": 0.01, "device": 0.4}
SLOW = {"data": 0.5, "callbacks": 0.0, "log": 0.01, "dispatch": 0.01, "device": 0.0}


@pytest.mark.parametrize(
    "posts, slow",
    [
        ([FAST, FAST], set()),
        ([FAST, SLOW], {Slow(1, "data")}),
        # Several, such as those of one host.
        ([FAST, SLOW, FAST, SLOW, FAST], {Slow(1, "data"), Slow(3, "data")}),
        # All alike wait for data.
        ([SLOW, SLOW], set()),
        # Main processes write reports, which also takes long.
        ([SLOW | {"data": 0.0, "log": 0.5}, FAST, FAST], {Slow(0, "log")}),
        ([FAST, SLOW | {"data": 0.1, "callbacks": 0.4}], {Slow(1, "callbacks")}),
        # It reads while its devices compute, and so nobody waits.
        ([FAST | {"device": 0.9}, SLOW | {"device": 0.3}], set()),
        # Its devices are faster than its data, but a step takes longer than both.
        ([FAST, SLOW | {"data": 0.1, "dispatch": 0.3}], set()),
    ],
)
def test_a_process_is_slow_if_the_others_wait_for_what_it_does(posts, slow):
    assert find_slow(dict(enumerate(posts))) == slow


@pytest.fixture
def posted(monkeypatch):
    """The posts of two processes, which this test is process 0 of."""
    posts = {1: dict(SLOW)}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_stragglers, "post", lambda _, value: posts.update({0: value}))
    monkeypatch.setattr(_stragglers, "read_posts", lambda _: posts)
    return posts


def add(stragglers, *, reports, steps=10, **seconds):
    """Add reports of some steps each, in which the other process is fast."""
    for _ in range(reports):
        step = (stragglers._step or 0) + steps
        spent = {part: steps * each for part, each in FAST.items()}
        stragglers.add(step, {"compile": 9.0, "other": 9.0, **spent, **seconds})


def test_it_is_logged_once_if_it_is_slow_twice_in_a_row(posted, caplog):
    stragglers = Stragglers()
    # The first report includes the start; then two of 4.4 s are compared.
    add(stragglers, reports=1)
    assert 0 not in posted
    add(stragglers, reports=2)
    assert posted[0] == pytest.approx(FAST) and caplog.text == ""
    add(stragglers, reports=20)
    assert [record.getMessage() for record in caplog.records] == [
        "process 1 is slow: it spends 0.50 s per step on data, the others 0.02 s; all wait "
        "for it."
    ]
    posted[1] = SLOW | {"data": 0.0, "callbacks": 0.5}
    add(stragglers, reports=20)
    assert "on callbacks" in caplog.records[-1].getMessage() and len(caplog.records) == 2


def test_one_that_is_slow_once_is_not_logged(posted, caplog):
    stragglers = Stragglers()
    add(stragglers, reports=3)
    posted[1] = FAST
    add(stragglers, reports=2)
    posted[1] = SLOW
    add(stragglers, reports=2)
    assert caplog.text == ""


def test_nothing_is_posted_before_all_others_and_by_one_process(
    posted, caplog, monkeypatch
):
    del posted[1]
    stragglers = Stragglers()
    add(stragglers, reports=20)
    assert posted.keys() == {0} and caplog.text == ""
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    posted.clear()
    add(stragglers, reports=20)
    assert posted == {}


def test_a_store_that_fails_does_not_end_the_run(posted, caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("unavailable")

    monkeypatch.setattr(_stragglers, "post", fail)
    with caplog.at_level(logging.DEBUG):
        add(Stragglers(), reports=20)
    assert caplog.text == ""
