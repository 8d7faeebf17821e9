"""Mistakes on command lines, and their errors."""

import os
import subprocess
import sys

import pytest
from run_helpers import SCRIPT, environment

from eqxshard._parser import Parser


def test_a_mistake_is_one_line_with_a_remedy_and_status_2(capsys):
    with pytest.raises(SystemExit) as error:
        Parser(prog="python -m x").error("--steps is missing")
    assert error.value.code == 2
    says = "error: --steps is missing; see python -m x --help.\n"
    assert capsys.readouterr() == ("", says)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["-m eqxshard info", f"{SCRIPT} --help"])
def test_output_that_nobody_reads_ends_a_command_without_a_word(command):
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as output:
        done = subprocess.run(
            [sys.executable, *command.split()],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    assert (done.returncode, done.stderr) == (141, "")
