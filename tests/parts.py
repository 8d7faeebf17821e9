"""`pytest --part 2/3`: a part of each file's tests, for runs that need not repeat all."""

import re
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/M", help="run only a part of each file's tests")


# The last: after tests are deselected by their marks.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    text = config.getoption("part")
    if text is None:
        return
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {text} is not a part; write one such as 2/3.")
    by_file: dict[Any, list[Any]] = {}
    for test in items:
        by_file.setdefault(test.path, []).append(test)
    # Every so manieth, to have some of each kind; and at least one.
    chosen = {
        test
        for tests in by_file.values()
        for test in tests[(part - 1) % len(tests) :: parts]
    }
    config.hook.pytest_deselected(items=[test for test in items if test not in chosen])
    items[:] = [test for test in items if test in chosen]
