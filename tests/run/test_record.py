import argparse
import dataclasses
import json
import logging
import math
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

import eqxshard
from eqxshard.run import RunFolder
from eqxshard.run._facts import describe_devices, versions
from eqxshard.run._record import RunRecord
from eqxshard.run._settings import name_settings


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def read(folder):
    return json.loads(folder.record.read_text())


def test_a_run_is_recorded_when_it_starts_and_ends(folder):
    with RunRecord(folder) as record:
        record.begin({"title": "small", "steps": 3, "settings": {"path": folder.path}}, 0)
        found = read(folder)
        assert (found["title"], found["ended"]) == ("small", None)
        assert found["settings"] == {"path": str(folder.path)}
    found = read(folder)
    assert found["ended"]["why"] == "" and found["memory"] is None
    assert [start["step"] for start in found["starts"]] == [0]
    assert folder.page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "error, why",
    [
        (ValueError("a\n long  name"), "ValueError: a long name"),
        (KeyError(), "KeyError"),
        (KeyboardInterrupt(), "SIGINT, such as by Ctrl-C"),
        (SystemExit(143), "SIGTERM, such as by a scheduler"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_what_ends_a_run_is_recorded(folder, error, why):
    with pytest.raises(type(error)), RunRecord(folder) as record:
        record.begin({"title": "small"}, 0)
        raise error
    assert read(folder)["ended"]["why"] == why


def test_a_resumed_run_keeps_its_starts_and_warnings(folder):
    for first, text in ((0, "one"), (4, "two"), (0, "three")):
        with RunRecord(folder) as record:
            record.warn([text])
            record.begin({"title": "small"}, first)
        if first:
            assert [start["step"] for start in read(folder)["starts"]] == [0, 4]
            assert folder.warnings.read_text().count("\n") == 2
    assert [start["step"] for start in read(folder)["starts"]] == [0]
    assert "three" in folder.warnings.read_text()
    assert folder.warnings.read_text().count("\n") == 1


def test_a_run_that_does_not_begin_writes_nothing(folder):
    with pytest.raises(ValueError), RunRecord(folder), warnings.catch_warnings():
        raise ValueError
    assert not folder.path.exists()


def test_devices_and_versions():
    found = describe_devices(eqxshard.make_mesh(data=2, fsdp=4))
    assert found["mesh"] == {"data": 2, "fsdp": 4}
    assert found["devices"] == {"kind": "cpu", "count": 8, "per_process": 8}
    assert versions()["jax"] == jax.__version__
    assert list(versions())[:2] == ["python", "eqxshard"]


@dataclasses.dataclass
class Inner:
    width: int = 3


@dataclasses.dataclass
class Settings:
    encoder: Inner
    decoder: Inner
    seed: int
    run: eqxshard.RunConfig


def test_settings_are_what_json_has():
    settings = {
        "path": Path("/data"),
        "sizes": (1, (2.5, Path("x"))),
        "inner": [{3: {4}}],
        "limits": [math.inf, -math.inf, math.nan],
        "none": None,
        7: "number",
        "run": {"deep": Inner()},
    }
    config = eqxshard.RunConfig()
    found = name_settings(settings, config)
    own = {name: value for name, value in found.items() if not hasattr(config, name)}
    assert own == {
        "path": "/data",
        "sizes": [1, [2.5, "x"]],
        "inner": [{"3": "{4}"}],
        "limits": ["Infinity", "-Infinity", "NaN"],
        "none": None,
        "7": "number",
        "run.deep.width": 3,
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == {**own, **name_settings(None, config)}


def test_settings_of_one_name_are_all_kept():
    config = eqxshard.RunConfig(seed=5)
    given = Settings(Inner(1), Inner(2), seed=7, run=eqxshard.RunConfig(seed=6))
    options = name_settings(None, config)
    assert options["seed"] == 5
    assert name_settings(given, config) == {
        **options,
        **{"encoder.width": 1, "decoder.width": 2, "settings.seed": 7},
    }
    with pytest.raises(ValueError, match=r"two settings are called 'a\.b'; rename one"):
        name_settings({"a.b": 1, "a": {"b": 2}}, config)
    for other in (argparse.Namespace(seed=7), Settings):
        with pytest.raises(TypeError, match="give a dataclass or a dict, such "):
            name_settings(other, config)


# Warnings


def lines(folder):
    return [json.loads(line) for line in folder.warnings.read_text().splitlines()]


def test_what_is_logged_is_kept_once(folder, caplog):
    with RunRecord(folder) as record:
        logging.getLogger("eqxshard.x").warning("early %d", 1)
        record.begin({"title": "small"}, 0)
        for _ in range(2):
            logging.getLogger("eqxshard.x").error("late")
        logging.getLogger("eqxshard.x").info("nothing")
        logging.getLogger("another").warning("of another library")
    logging.getLogger("eqxshard.x").error("afterwards")
    found = [(line["source"], line["text"]) for line in lines(folder)]
    assert found == [("eqxshard.x", "early 1"), ("eqxshard.x", "late")]
    assert "early 1" in caplog.text


@pytest.mark.slow
def test_where_nobody_else_shows_them_they_are_shown():
    """The process has no pytest, whose handlers would show them."""
    code = """if True:
        import logging, warnings
        from eqxshard.run._collect_warnings import collect_warnings
        show = warnings.showwarning
        with collect_warnings(print):
            logging.getLogger("eqxshard.b").warning("logged")
            warnings.warn("warned")
            logging.getLogger("eqxshard.b").warning("malformed %d", "x")
            logging.getLogger("eqxshard").addHandler(logging.NullHandler())
            logging.getLogger("eqxshard.b").warning("silent")
        assert warnings.showwarning is show
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.count("logged") == 1, done.stderr
    # It does not raise into its caller.
    assert done.stderr.count("--- Logging error ---") == 1, done.stderr
    assert "UserWarning: warned" in done.stderr and "silent" not in done.stderr
    assert done.stdout == "eqxshard.b logged\nUserWarning warned\neqxshard.b silent\n"
