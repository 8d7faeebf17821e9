"""The launcher, with scripts without JAX, which start at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
from process_helpers import read_until, started

import eqxshard.launch
from eqxshard.launch import launch

PRELUDE = """
import os, signal, sys, time
number, count = int(os.environ["EQXSHARD_PROCESS"]), int(os.environ["EQXSHARD_PROCESSES"])
"""


@pytest.fixture
def script(tmp_path):
    def write(body):
        (tmp_path / "script.py").write_text(PRELUDE + body)
        return str(tmp_path / "script.py")

    return write


def test_all_run_and_their_lines_are_marked(script, capsys):
    body = """
print("hello", sys.argv[1:], os.environ["JAX_NUM_CPU_DEVICES"])
print("oops", file=sys.stderr)
assert os.environ["EQXSHARD_ADDRESS"].startswith("127.0.0.1:")
"""
    command = [script(body), "--flag", "x"]
    assert launch(command, processes=3, devices_per_process=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        line for n in range(3) for line in (f"[{n}] hello ['--flag', 'x'] 2", f"[{n}] oops")
    )


DIES = """
print("working", flush=True)
if number == 2:
    print("the last words")
    {how}
time.sleep(600)
"""


@pytest.mark.parametrize(
    "how, status, says",
    [
        ("sys.exit(3)", 3, "process 2 of 4 ended with status 3; the others were stopped."),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "process 2 of 4 was killed by SIGKILL; the others",
        ),
        ("raise ValueError('what')", 1, "process 2 of 4 ended with status 1"),
    ],
)
def test_when_one_dies_all_end_and_it_is_named(script, capsys, how, status, says):
    began = time.monotonic()
    assert launch([script(DIES.format(how=how))], processes=4) == status
    assert time.monotonic() - began < 300
    err = capsys.readouterr().err
    assert says in err and "  the last words" in err


def test_processes_that_ignore_sigterm_are_killed(script, tmp_path, monkeypatch):
    monkeypatch.setattr(eqxshard.launch, "_GRACE_SECONDS", 0.5)
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if number == 0:
    open(sys.argv[1], "w").close()
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(1)
"""
    began = time.monotonic()
    assert launch([script(body), str(tmp_path / "ready")], processes=2) == 1
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("code, restarts", [(7, 3), (2, 0)])
def test_it_starts_again_as_often_as_asked(script, capsys, code, restarts):
    assert launch([script(f"sys.exit({code})")], processes=1, restarts=3) == code
    err = capsys.readouterr().err
    assert err.count("starting again with 1 processes; ") == restarts


def test_what_a_process_started_ends_with_the_run(script, tmp_path):
    body = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
sys.exit(1)
"""
    assert launch([script(body), str(tmp_path / "pid")], processes=1) == 1
    wait_until_gone((tmp_path / "pid").read_text())


def start(command, *options, **settings):
    words = [sys.executable, "-m", "eqxshard.launch", *options, *command]
    return started(words, **settings)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_ends_it_without_a_restart(script, number):
    body = """
def handle(*_):
    print("asked to stop", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, handle)
print("ready", flush=True)
time.sleep(60)
"""
    with start([script(body)], "--processes=1", "--restarts=3") as process:
        read_until(process, process.stdout, "[0] ready")
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert out == "[0] asked to stop\n" and err == ""


@pytest.mark.slow
def test_signals_that_are_ignored_stay_ignored(script, tmp_path):
    """They are ignored under nohup, or in the background of a shell."""
    go = tmp_path / "go"
    body = """
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("done", flush=True)
"""
    words = [sys.executable, "-m", "eqxshard.launch", "--processes=1", script(body), go]
    with started(["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh", *words]) as process:
        read_until(process, process.stdout, "[0] ready")
        for number in (signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
        go.touch()
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "[0] done\n", "")


def test_a_second_signal_kills(script):
    body = """
signal.signal(signal.SIGTERM, lambda *_: print("busy", flush=True))
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    with start([script(body)], "--processes=1") as process:
        read_until(process, process.stdout, "[0] ready")
        process.send_signal(signal.SIGTERM)
        read_until(process, process.stdout, "[0] busy")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 137


def wait_until_gone(pid):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # Nobody may wait for it, now that its parent is gone.
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], stdout=subprocess.PIPE)
        if state.stdout.strip() == b"" or state.stdout.startswith(b"Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


@pytest.mark.parametrize(
    "options, says",
    [
        ("--processes 0 x.py", "--processes: 0 is too few; use 1 or more"),
        ("--processes 2", "there is no script ''; give the path of one"),
        ("--process 2 x.py", "required: --processes; see python -m eqxshard.launch --help"),
    ],
)
def test_mistakes_are_named(monkeypatch, capsys, options, says):
    monkeypatch.setattr(sys, "argv", ["launch", *options.split()])
    with pytest.raises(SystemExit) as error:
        eqxshard.launch.main()
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("error: ") and err.count("\n") == 1


def test_each_process_has_a_gpu_of_its_own(script, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    command = [script("print(os.environ['CUDA_VISIBLE_DEVICES'])")]
    assert launch(command, processes=2) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] 3", "[1] 5"]
    with pytest.raises(ValueError, match="3 processes are more than the 2 GPUs; use fewer"):
        launch(command, processes=3)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert launch(command, processes=3) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
