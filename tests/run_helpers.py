"""Scripts run in this process, or in others, and the files of their runs."""

import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "run_script.py"
PNG = b"\x89PNG\r\n\x1a\n"

#: A process that is killed may leave half an entry, which is not for the user's cache.
_COMPILED = tempfile.TemporaryDirectory(prefix="eqxshard-compiled-")

#: Verbs of the remedy that each error ends with.
_ADVICE = (
    "did|copy|use|choose|give|write|put|delete|set|see|make|add|leave|look|find|unset|move"
    "|run|plan"
)


def call(capsys, monkeypatch, script, *options):
    """Run a script as `__main__` in this process; return its status, stdout and stderr."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *map(str, options)])
        # The cache would be for the whole process, and so for other tests.
        patch.setattr("eqxshard.run._cli._cache_compiled", lambda: None)
        with (
            # Optax itself mixes dtypes.
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            pytest.raises(SystemExit) as stop,
        ):
            runpy.run_path(str(script), run_name="__main__")
    return stop.value.code, *capsys.readouterr()


def environment(**settings):
    """The variables of a process of its own."""
    # JAX warns of proxies, in every process.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "JAX_NUM_CPU_DEVICES") and "proxy" not in name.lower()
    }
    kept["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
    return {**kept, "JAX_PLATFORMS": "cpu", **settings}


def assert_refused(result, sentence):
    """One line on stderr, with a remedy, and status 2."""
    status, out, err = result
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert sentence in err
    assert re.search(f"(?i)[;.,] ({_ADVICE}) ", err), err


def read_lines(folder):
    """The lines of a run's log."""
    text = (Path(folder) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def measured(folder):
    """The log without the times."""
    return [
        {k: v for k, v in line.items() if not re.search("seconds|per_second|goodput", k)}
        for line in read_lines(folder)
    ]


def files(folder):
    """The contents of all files, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
