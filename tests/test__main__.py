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


def test_pages_of_runs_are_written(command, tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name, record=make_record())
    page = tmp_path / "one" / "index.html"
    assert command("page", "one") == (0, f"{page}\n", "")
    assert page.exists()
    status, out, _ = command("compare", "one", "two")
    head, one, two, page = out.splitlines()
    assert (status, page) == (0, f"the page is {tmp_path / 'compare.html'}")
    assert head.split()[:4] == ["Run", "Step", "eval/loss", "eval/accuracy"]
    assert one.split()[:4] == ["one", "2,000", "0.3176", "0.9155"] and "two" in two
    assert (tmp_path / "compare.html").exists()
    assert_refused(command("compare", "one", "one"), "the same; give each run once")
    assert_refused(command("page", "three"), "/three; give the folder of a run.")
    assert_refused(
        command("page", "one", "--small"), "unrecognized arguments: --small; see"
    )
    words = ("compare", "one", "two", "--output=out/page.html")
    assert_refused(command(*words), "there is no folder out; make it first.")


def test_the_doctor_says_whether_something_is_wrong(command, monkeypatch):
    facts = Facts(needs={"jax": "0.10"})
    monkeypatch.setattr("eqxshard.debug._doctor._report.gather", lambda: facts)
    status, out, err = command("doctor")
    assert (status, err) == (1, "") and "jax is not installed" in out
    monkeypatch.setattr("eqxshard.debug._doctor._report.gather", Facts)
    assert command("doctor")[0] == 0
