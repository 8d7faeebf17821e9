import dataclasses
import threading

import pytest
from plan_helpers import REQUEST

from eqxshard.planning import _pool
from eqxshard.planning._backends import Backend
from eqxshard.planning._pool import compile_all, default_folder, default_workers

WHERE = Backend("cpu")


def requests(**names):
    """Requests that are told apart by an option."""
    return {
        fingerprint: dataclasses.replace(REQUEST, options={"name": name})
        for fingerprint, name in names.items()
    }


@pytest.fixture
def compiler(monkeypatch, plan):
    """Compiles nothing: what it was given, and how many ran at a time."""
    given, most, running = [], [0], set()
    meet = threading.Barrier(2, timeout=20)

    def make_plan(data, where):
        running.add(data)
        given.append(data)
        most[0] = max(most[0], len(running))
        if data.startswith("pair"):
            meet.wait()
        running.discard(data)
        if data == "bad":
            raise RuntimeError("XLA said no.\nIn detail")
        return plan

    monkeypatch.setattr(_pool, "make_plan", make_plan)
    monkeypatch.setattr(_pool, "dump_request", lambda request: request.options["name"])
    return given, most


def test_plans_are_kept_and_errors_are_not(compiler, plan, tmp_path):
    given, _ = compiler
    folder = tmp_path / "new" / "plans"
    for _ in range(2):
        found = compile_all(requests(one="good", two="bad"), WHERE, folder, 1)
        assert found == {"one": plan, "two": "XLA said no."}
    assert given == ["good", "bad", "bad"]
    assert [file.name for file in folder.iterdir()] == ["one.json"]


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_file_is_compiled_again(compiler, plan, tmp_path, content):
    (tmp_path / "one.json").write_bytes(content)
    assert compile_all(requests(one="good"), WHERE, tmp_path, 1) == {"one": plan}
    assert compile_all(requests(one="good"), WHERE, tmp_path, 1) == {"one": plan}
    assert compiler[0] == ["good"]


def test_several_are_compiled_at_a_time(compiler, tmp_path):
    names = {f"{number}": f"pair {number}" for number in range(4)}
    compile_all(requests(**names), WHERE, tmp_path, 2)
    assert compiler[1] == [2]


def test_a_folder_that_cannot_be_written_keeps_nothing(compiler, plan, tmp_path):
    (tmp_path / "file").touch()
    assert compile_all(requests(one="good"), WHERE, tmp_path / "file", 1) == {"one": plan}


def test_defaults():
    assert default_workers() >= 1
    assert default_folder().name == "plans"
