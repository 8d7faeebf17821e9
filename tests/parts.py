"""`pytest --part 2/3`: a part of each file's tests, for runs that need not repeat all."""

import re
from collections.abc import Generator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/M", help="run only a part of each file's tests")
    parser.addoption(
        "--every-file",
        action="store_true",
        help="run one slow test of each file that has no quick ones",
    )


# Around the hook that deselects tests by their marks.
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[Any]
) -> Generator[None, None, None]:
    everything = list(items)
    yield
    part, parts = _parse(config.getoption("part"))
    chosen = _choose(items, part, parts)
    config.hook.pytest_deselected(items=[test for test in items if test not in chosen])
    slow: list[Any] = []
    if config.getoption("every_file"):
        files = {test.path for test in items}
        slow = [test for test in everything if test.get_closest_marker("slow")]
        slow = [test for test in slow if test.path not in files]
        slow = [test for test in slow if not test.get_closest_marker("thorough")]
    one_of_each = _choose(slow, part, len(slow) or 1)
    items[:] = [test for test in items if test in chosen]
    items += [test for test in slow if test in one_of_each]


def _parse(text: str | None) -> tuple[int, int]:
    """The number of a part, and that of all parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", "1/1" if text is None else text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {text} is not a part; write one such as 2/3.")
    return part, parts


def _choose(tests: list[Any], part: int, parts: int) -> set[Any]:
    """One part of each file's tests: at least one, and some of each kind."""
    by_file: dict[Any, list[Any]] = {}
    for test in tests:
        by_file.setdefault(test.path, []).append(test)
    return {
        test
        for found in by_file.values()
        for test in found[(part - 1) % len(found) :: parts]
    }
