"""`pytest --part 2/3`: a part of the tests, for runs that need not repeat all."""

import re
import zlib
from collections.abc import Generator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/M", help="run only a part of the tests")
    parser.addoption(
        "--every-file",
        action="store_true",
        help="run at least one test of each file, slow if there are no quick ones",
    )


# Around the hook that deselects tests by their marks.
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[Any]
) -> Generator[None, None, None]:
    everything = list(items)
    yield
    part, parts = _parse(config.getoption("part"))
    quick = set(items)
    chosen = {test for test in items if _number(test, parts) == part}
    if config.getoption("every_file"):
        for tests in _by_file(everything, {test.path for test in chosen}).values():
            usable = [test for test in tests if test in quick]
            usable = usable or [test for test in tests if _is_slow(test)]
            if usable:
                chosen.add(usable[(part - 1) % len(usable)])
    left_out = [test for test in items if test not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [test for test in everything if test in chosen]


def _parse(text: str | None) -> tuple[int, int]:
    """The number of a part, and that of all parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", "1/1" if text is None else text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {text} is not a part; write one such as 2/3.")
    return part, parts


def _number(test: Any, parts: int) -> int:
    """The part that a test is in, by its name, so that new tests do not move others."""
    return zlib.crc32(test.nodeid.encode()) % parts + 1


def _is_slow(test: Any) -> bool:
    thorough = test.get_closest_marker("thorough") is not None
    return not thorough and test.get_closest_marker("slow") is not None


def _by_file(tests: list[Any], without: set[Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for test in tests:
        if test.path not in without:
            found.setdefault(test.path, []).append(test)
    return found
