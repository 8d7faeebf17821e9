import pickle

import jax

from eqxshard.planning._failure import Failure


def lookup(name):
    return {}[name]


def failure_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return pickle.loads(pickle.dumps(Failure.of(error)))
    raise AssertionError


def test_the_line_of_the_user_is_known():
    failure = failure_of(jax.eval_shape, lambda: lookup("thin"))
    assert (failure.kind, failure.message) == ("KeyError", "'thin'")
    assert failure.line is not None and failure.line.startswith("test_failure.py:")
    assert not failure.by_compiler and "return {}[name]" in failure.traceback


def test_errors_of_the_compiler_are_told_apart():
    failure = failure_of(jax.jit(lambda: 0.0).lower().compile, {"xla_no_such": "1"})
    assert failure.by_compiler
