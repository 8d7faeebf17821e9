import json
import logging
import subprocess
import sys
import warnings

import pytest

from eqxshard.run import _warnings
from eqxshard.run._warnings import HeardWarnings

#: Imported by itself, which takes no second.
FILE = _warnings.__file__


@pytest.fixture
def heard():
    found = HeardWarnings()
    found.start()
    yield found
    found.stop()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_logged_is_kept_once(heard, tmp_path, caplog):
    file = tmp_path / "warnings.jsonl"
    logging.getLogger("jax.x").warning("early %d", 1)
    heard.write_to(file, keep=False)
    for _ in range(2):
        logging.getLogger("jax.x").error("late")
    logging.getLogger("jax.x").info("nothing")
    found = [(line["source"], line["text"]) for line in lines(file)]
    assert found == [("jax.x", "early 1"), ("jax.x", "late")]
    assert "early 1" in caplog.text


def test_there_is_an_end_to_it(heard, tmp_path):
    for number in range(300):
        heard.add("a", str(number))
    heard.write_to(tmp_path / "file", keep=False)
    assert len(lines(tmp_path / "file")) == 200


def test_without_warnings_there_is_no_file(heard, tmp_path):
    heard.write_to(tmp_path / "file", keep=False)
    assert not (tmp_path / "file").exists()


def test_everything_is_as_before_when_it_stops():
    before, handlers = warnings.showwarning, [*logging.getLogger().handlers]
    heard = HeardWarnings()
    heard.start()
    assert warnings.showwarning != before
    heard.stop()
    assert warnings.showwarning == before and logging.getLogger().handlers == handlers


def test_where_nobody_else_shows_them_they_are_shown():
    """In a process without pytest, whose handlers would."""
    code = f"""if True:
        import importlib.util, logging, warnings
        spec = importlib.util.spec_from_file_location("heard", {FILE!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        heard = module.HeardWarnings()
        heard.start()
        logging.getLogger("a.b").warning("logged")
        warnings.warn("warned")
        logging.getLogger("a.b").warning("malformed %d", "x")
        logging.getLogger("a").addHandler(logging.NullHandler())
        logging.getLogger("a.b").warning("silent")
        print(*heard._lines.values())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.count("logged") == 1, done.stderr
    # It does not raise into its caller.
    assert done.stderr.count("--- Logging error ---") == 1, done.stderr
    assert "UserWarning: warned" in done.stderr and "silent" not in done.stderr
    assert '"source": "UserWarning", "text": "warned"' in done.stdout
