"""`pytest --part 2/3`, on files of its own, without the conftest of these tests."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parts import pytest_collection_modifyitems


@dataclass(frozen=True)
class Item:
    """What pytest would collect: a test of a file."""

    path: str
    number: int

    @property
    def nodeid(self):
        return f"{self.path}::test[{self.number}]"


def select(items, text):
    """The tests of a part, and the others."""
    others: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: others.extend(items))
    options = {"part": text, "every_file": False}
    config: Any = SimpleNamespace(getoption=options.get, hook=hook)
    items = list(items)
    # What runs around other hooks is a generator.
    for _ in pytest_collection_modifyitems(config, items):
        pass
    return items, others


def test_the_parts_together_are_all():
    files = {"long": 8, "short": 2, "one": 1}
    everything = [Item(path, n) for path, count in files.items() for n in range(count)]
    found: list[Item] = []
    for number in range(3):
        chosen, others = select(everything, f"{number + 1}/3")
        assert {*chosen, *others} == set(everything) and not {*chosen} & {*others}
        found += chosen
    assert sorted(found, key=everything.index) == everything


def test_a_new_test_does_not_move_the_others():
    items = [Item("one", number) for number in range(9)]
    old, _ = select(items, "2/3")
    new, _ = select([Item("a new one", 0), *items], "2/3")
    assert [item for item in new if item.path == "one"] == old
    assert 0 < len(old) < len(items)


def test_without_the_option_all_are_run():
    items = [Item("one", 0), Item("one", 1)]
    assert select(items, None) == (items, [])


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "a/b", "-1/3"])
def test_other_texts_are_not_parts(text):
    with pytest.raises(pytest.UsageError, match=f"--part {text} is not a part; write one"):
        select([Item("one", 0)], text)


PARAMETERS = "import pytest\n@pytest.mark.parametrize('n', range(8))\ndef test(n): pass\n"
SLOW = "@pytest.mark.slow\n" + PARAMETERS.splitlines()[1] + "\ndef test_slow(n): pass\n"
BOTH = PARAMETERS + SLOW + PARAMETERS.replace("test(", "test_b(")
ALL_SLOW = "import pytest\n" + SLOW
THOROUGH = "import pytest\n@pytest.mark.thorough\n" + SLOW.replace("test_", "test_more_")


def passed(folder, files, *options):
    """The tests that pytest runs of those that are quick, by name."""
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  thorough")
    command = [sys.executable, "-m", "pytest", "-p", "parts", "-v", "-m"]
    command += ["not slow and not thorough"]
    settings = {"PYTHONPATH": str(Path(__file__).parent)}
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [line.split()[0] for line in run.stdout.splitlines() if "PASSED" in line]


def test_a_part_is_of_the_tests_that_would_run(tmp_path):
    """Those that are deselected by their marks do not count."""
    files = {"test_it.py": BOTH}
    first, second = (passed(tmp_path, files, "--part", f"{n}/2") for n in (1, 2))
    quick = [f"test_it.py::{name}[{n}]" for name in ("test", "test_b") for n in range(8)]
    assert first and second and sorted(first + second) == sorted(quick)


def test_every_file_takes_part(tmp_path):
    """Of a file without quick tests a slow one is run, another in each part."""
    files = {"test_both.py": BOTH, "test_few.py": PARAMETERS.replace("8", "3")}
    files |= {"test_slow.py": THOROUGH + ALL_SLOW}
    part = passed(tmp_path, files, "--part", "4/16")
    found = passed(tmp_path, files, "--part", "4/16", "--every-file")
    assert {name.partition("::")[0] for name in found} == set(files)
    assert set(part) < set(found) and "test_slow.py::test_slow[3]" in found
    assert not [name for name in found if "slow" in name or "more" in name][1:]
