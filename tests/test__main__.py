"""The command `python -m eqxshard`."""

import jax
import pytest
from run_helpers import assert_refused
from run_page_helpers import make_record, make_run

from eqxshard.__main__ import main


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


def test_the_page_of_a_run_is_written(command, tmp_path):
    make_run(tmp_path / "one", record=make_record())
    page = tmp_path / "one" / "index.html"
    assert command("page", "one") == (0, f"{page}\n", "")
    assert page.exists()
    assert_refused(command("page", "three"), "/three; give the folder of a run.")
    assert_refused(
        command("page", "one", "--small"), "unrecognized arguments: --small; see"
    )


def test_info_has_versions_devices_and_variables_that_matter(
    command, monkeypatch, tmp_path
):
    # The rest of a package that was removed.
    (tmp_path / "foo-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JWT", "secret")
    status, out, err = command("info")
    assert (status, err) == (0, "")
    assert f"jax          {jax.__version__}\n" in out and "eqxshard     " in out
    assert "\nNCCL_DEBUG=INFO\n" in out and "secret" not in out
    assert out.endswith("devices      8 x cpu (cpu)\n")
    assert_refused(command("info", "--traceback"), "unrecognized arguments: --traceback")
