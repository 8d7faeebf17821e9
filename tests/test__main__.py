"""The command `python -m eqxshard`."""

import pytest
from run_helpers import assert_refused
from run_page_helpers import make_record, make_run

from eqxshard.__main__ import main
from eqxshard.debug._doctor._facts import Facts


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command in this process; returns its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        try:
            status = main([*map(str, words)])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def test_replay_is_a_module(command):
    assert_refused(command("replay", "dump"), "run python -m eqxshard.replay DUMP SCRIPT.")


def test_the_page_of_a_run_is_written(command, tmp_path):
    make_run(tmp_path / "one", record=make_record())
    page = tmp_path / "one" / "index.html"
    assert command("page", "one") == (0, f"{page}\n", "")
    assert page.exists()
    assert_refused(command("page", "three"), "/three; give the folder of a run.")
    assert_refused(
        command("page", "one", "--small"), "unrecognized arguments: --small; see"
    )


def test_the_doctor_says_whether_something_is_wrong(command, monkeypatch):
    facts = Facts(needs={"jax": "0.10"})
    monkeypatch.setattr("eqxshard.debug._doctor._report.gather", lambda: facts)
    status, out, err = command("doctor")
    assert (status, err) == (1, "") and "jax is not installed" in out
    monkeypatch.setattr("eqxshard.debug._doctor._report.gather", Facts)
    assert command("doctor")[0] == 0
