"""Two processes that agree on the result of one of them; the other one is simulated."""

import json

import pytest

from eqxshard._errors import UsageError, UsageFileError, UsageOSError
from eqxshard.checkpoint import _agree
from eqxshard.checkpoint._agree import on_all, on_first
from eqxshard.checkpoint._arrays import DamageError


def raising(error):
    def fn():
        raise error

    return fn


def exchange(value):
    """As sent and received."""
    return json.loads(json.dumps(value))


@pytest.fixture
def beside(monkeypatch):
    """Pretend a process 1 that does the same, in which a function may raise an error."""

    def pretend(error):
        theirs = _agree.Outcome(error=error).told()
        monkeypatch.setattr(_agree, "allgather_json", lambda ours: exchange([ours, theirs]))

    return pretend


@pytest.mark.parametrize(
    "ours, theirs, kind, says",
    [
        (None, OSError(28, "No space left"), OSError, "process 1: No space left"),
        (OSError("a [b]: c"), None, OSError, "process 0: a [b]: c"),
        (DamageError("x"), OSError("y"), OSError, "process 1: y"),
        (DamageError("x"), DamageError("y"), DamageError, "process 0: x"),
        # Errors of packages for object stores, in another process.
        (None, RuntimeError("denied"), OSError, "process 1: denied"),
        (None, KeyError("step"), OSError, "process 1: 'step'"),
    ],
)
def test_all_raise_what_one_does(beside, ours, theirs, kind, says):
    beside(theirs)
    with pytest.raises(Exception) as caught:
        on_all(raising(ours) if ours else int)
    assert (type(caught.value), str(caught.value)) == (kind, says)


def test_an_error_that_is_not_of_files_stays_as_it_is_where_it_was_raised(beside):
    beside(OSError("y"))
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(RuntimeError) as caught:
        on_all(raising(error))
    assert caught.value is error
    assert "raising" not in str(error) and caught.traceback[-1].name == "fn"


def test_all_have_what_is_found_where_no_process_fails(beside):
    beside(None)
    assert on_all(lambda: 3) == 3


@pytest.mark.parametrize("kind", [UsageFileError, UsageOSError, UsageError, DamageError])
def test_the_error_of_the_first_keeps_its_kind(monkeypatch, kind):
    told = []

    def broadcast(value):
        told.append(exchange(value))
        return told[0]

    monkeypatch.setattr(_agree, "broadcast_from_first", broadcast)
    error = kind("there is none; make one.")
    with pytest.raises(kind) as caught:
        on_first(raising(error))
    assert caught.value is error
    monkeypatch.setattr(_agree, "is_main_process", lambda: False)
    with pytest.raises(kind, match=r"^there is none; make one\.$") as caught:
        on_first(raising(AssertionError))
    assert type(caught.value) is kind
