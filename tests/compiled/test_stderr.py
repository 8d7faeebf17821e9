import os
import subprocess
import sys
import threading

import pytest

from eqxshard.compiled._stderr import read_stderr


def test_what_is_written_is_read_and_goes_where_it_went(capfd):
    with read_stderr() as text:
        os.write(2, b"a warning\n")
    assert text() == "a warning\n"
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "a warning\nlater\n"


def test_an_error_restores_standard_error(capfd):
    with pytest.raises(ZeroDivisionError), read_stderr():
        os.write(2, b"before\n")
        raise ZeroDivisionError
    with read_stderr() as text:
        os.write(2, b"again\n")
    assert text() == "again\n"
    assert capfd.readouterr().err == "before\nagain\n"


def test_only_one_of_several_threads_reads(capfd):
    texts = []

    def other():
        with read_stderr() as text:
            os.write(2, b"theirs\n")
        texts.append(text())

    with read_stderr() as text:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert texts == [""]
    assert text() == "theirs\n"


def test_a_process_that_lives_on_keeps_nobody_waiting(capfd):
    with read_stderr() as text:
        child = subprocess.Popen(["sh", "-c", "echo one >&2; sleep 2; echo two >&2"])
        os.write(2, b"mine\n")
    assert "mine" in text()
    child.wait()
    with read_stderr():  # Any that follows waits for its own only.
        pass


def test_the_last_words_of_a_crash_are_not_lost():
    code = (
        "import ctypes; from eqxshard.compiled._stderr import read_stderr\n"
        "with read_stderr():\n"
        "    libc = ctypes.CDLL(None); libc.write(2, b'last words', 10); libc.abort()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert run.returncode < 0
    assert run.stderr == b"last words"


def test_without_standard_error_or_tee_nothing_is_read(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with read_stderr() as text:
        pass
    assert text() == ""
    monkeypatch.undo()
    code = (
        "import os; from eqxshard.compiled._stderr import read_stderr\n"
        "os.close(2)\n"
        "with read_stderr() as text: pass\n"
        "print(repr(text()))\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout == "''\n"
