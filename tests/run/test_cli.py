"""The output of a script, and its exit status."""

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import optax
import pytest
from process_helpers import read_until, started
from run_helpers import SCRIPT, assert_refused, environment, read_lines
from run_train_helpers import train

import eqxshard
from eqxshard.compiled._causes import is_users
from eqxshard.run._cli import _parse
from eqxshard.trackers._services import SERVICES

LINE = (
    r"accuracy 0\.\d{4} \| [\d.]+ s/epoch \| [\d,]+ points/s "
    r"\| small on 2 x cpu \(data=2\)"
)


@pytest.mark.versions
@pytest.mark.slow
def test_the_last_line_is_what_main_returns(script, tmp_path):
    status, out, err = script("--devices", 2, "--output", tmp_path / "run")
    assert status == 0, err
    *_, before, last = out.splitlines()
    assert re.fullmatch(LINE, last), last
    assert (
        before == f"metrics, checkpoints and a page, index.html, are in {tmp_path / 'run'}"
    )
    # The arguments of the script are recorded.
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    own = {"model": "small", "optimizer": "adam", "learning_rate": None}
    assert own.items() <= summary["settings"].items()
    assert summary["settings"]["devices"] == 2 and "arguments" not in summary["settings"]


@dataclasses.dataclass(frozen=True)
class Bare:
    """Arguments without options of a run."""

    width: int = 8


@dataclasses.dataclass(frozen=True)
class Loud:
    """A script that always shows whole tracebacks."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(traceback=True)


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Runs a main function; returns its status, stdout and stderr."""

    def run(main, args_type):
        # The cache would be for the whole process, and so for other tests.
        monkeypatch.setattr("eqxshard.run._cli._cache_compiled", lambda: None)
        with pytest.raises(SystemExit) as stop:
            eqxshard.cli(main, args_type, args=[])
        return stop.value.code, *capsys.readouterr()

    return run


def test_a_script_may_return_what_train_returned(run_main, tmp_path):
    results = []

    def main(args):
        results.append(train(tmp_path, best="eval/accuracy"))
        return results[0]

    status, out, err = run_main(main, Bare)
    assert status == 0, err
    *_, last = out.splitlines()
    value = r"\d\.\d{4}"
    said = (
        rf"evaluated at step 12: accuracy {value}, loss {value} "
        rf"\| best accuracy {value} at step \d+ "
        r"\| [\d.]+ s/epoch \| [\d,]+ points/s \| Small on 2 x cpu \(data=2\)"
    )
    assert re.fullmatch(said, last) and last == str(results[0]), last


def test_help_groups_options_and_shows_defaults(script):
    status, out, err = script("--help")
    assert (status, err) == (0, "")
    own, run = out.split("run options")
    flags = [
        set(re.findall(r"(?m)^[│ ] +(--[a-z]+(?:-[a-z]+)*)", part)) for part in (own, run)
    ]
    assert flags == [
        {"--model", "--optimizer", "--learning-rate", "--fail", "--seconds-per-step"},
        {"--epochs", "--steps", "--batch-size", "--seed", "--devices", "--mesh", "--output"}
        | {
            "--resume",
            "--overwrite",
            "--save-every",
            "--evaluate-every",
            "--log-every",
            "--track",
        }
        | {"--hang-seconds", "--profile", "--plan", "--plan-file", "--traceback"},
    ]
    text = " ".join(out.replace("│", " ").split())
    assert text.startswith("usage: ") and "Fit some points." in text
    for words in (
        "--model {small,wide} How many neurons. (default: small)",
        "--batch-size INT Examples per step, over all devices. (default: 16)",
        "(default: runs/SCRIPT-NAME)",
        f"--track [{{{','.join(SERVICES)}}} ",
    ):
        assert words in text, words
    assert "None" not in text


# Mistakes


#: Errors in tyro's own words.
REFUSED = {
    "--epochs ten": "Error parsing --epochs",
    "--modle small": "Perhaps you meant",
    "--model smal": "'smal'",
    "--mesh": "--mesh",
    "--resume": "--resume",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_tyro_refuses_writes_nothing(script, tmp_path, options):
    status, out, err = script("--output", tmp_path / "run", *options.split())
    assert (status, out) == (2, "") and REFUSED[options] in err, err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


MISTAKES = {
    "--epochs 0": "--epochs 0 is too small; use 1 or more",
    "--mesh dta=2": "names the axis 'dta'; did you mean 'data'?",
    "--batch-size 12": "batch size 12 does not divide over data=8",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(script, tmp_path, options):
    result = script("--output", tmp_path / "run", *options.split())
    assert_refused(result, MISTAKES[options])
    assert not (tmp_path / "run").exists()


def test_a_usage_error_of_a_script_is_one_line(script):
    sentence = "--fail value is not what you want; use another."
    assert script("--fail", "value") == (2, "", f"error: {sentence}\n")


BUGS = {
    "file": ("main", "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/a"),
    "number": ("main", "ValueError: invalid literal for int() with base 10: 'ten'"),
    "key": ("main", "KeyError: 'missing'"),
    "jax": ("jax_bug", "ValueError: Size of label 'i' for operand 1 (3) does not match"),
    "equinox": ("equinox_bug", "ValueError: ('Input to `Conv` needs to have rank 3,'"),
}


@pytest.mark.parametrize("fail", BUGS)
def test_a_bug_has_its_traceback_without_our_frames(script, fail):
    function, line = BUGS[fail]
    status, _, err = script("--fail", fail, "--devices", 2)
    assert status == 1
    frames = re.findall(r'  File "(.*)", line \d+, in (.*)', err)
    own = [name for file, name in frames if file == str(SCRIPT)]
    assert own[0] == "main" and own[-1] == function
    # The other frames are Python's, or those of the library that raised the error.
    hidden = [str(Path(str(x.__file__)).parent) + os.sep for x in (eqxshard, jax, eqx)]
    assert not any(file.startswith((*hidden,)) for file, _ in frames)
    assert f"\n{line}" in err and "JAX has removed" not in err
    *_, last = err.splitlines()
    assert last == (
        "Frames of eqxshard, JAX and Equinox are left out; --traceback shows them."
    )


def test_out_of_memory_is_one_message(script):
    status, _, err = script("--fail", "memory", "--devices", 2)
    assert status == 1 and "Traceback" not in err
    *_, error, needs, where, resume = err.splitlines()
    assert error.startswith("error: RESOURCE_EXHAUSTED: Out of memory allocating ")
    assert needs.startswith("train_step of huge needs ") and "To fit, use " in needs
    assert where == "This was in step 1." and "nothing was saved before" in resume


def test_a_script_beside_the_library_is_the_users():
    """Its path may begin like that of the library."""
    folder = str(Path(eqxshard.__file__).parent)
    for file, expected in (
        (f"{folder}_scripts/train.py", True),
        (f"{folder}/run/_cli.py", False),
        (logging.__file__, False),
        (optax.__file__, False),
        ("<string>", False),
    ):
        assert is_users(file) == expected, file


def fail_in_jax(args):
    return jax.numpy.zeros(3) + jax.numpy.zeros(4)


def test_a_script_may_always_show_all(run_main):
    status, _, err = run_main(fail_in_jax, Loud)
    assert status == 1 and "/jax/" in err and "are left out" not in err


def test_a_script_without_the_option_is_not_told_to_use_it(run_main):
    status, _, err = run_main(fail_in_jax, Bare)
    assert status == 1 and "/jax/" not in err and "--traceback" not in err
    assert err.endswith("are left out; JAX_TRACEBACK_FILTERING=off shows them.\n")


def test_traceback_shows_all(script):
    status, _, err = script("--fail", "jax", "--traceback", "--devices", 2)
    assert status == 1
    files = re.findall(r'  File "(.*)", line', err)
    assert any("/eqxshard/training/" in file for file in files)
    assert any("/jax/" in file for file in files)
    assert "--traceback" not in err


# Arguments


def test_steps_replace_the_epochs_of_a_script():
    @dataclasses.dataclass(frozen=True)
    class Own:
        run: eqxshard.RunConfig = eqxshard.RunConfig(epochs=5)

    for args, length in (
        ([], (5, None)),
        (["--steps", "3"], (None, 3)),
        (["--epochs", "2"], (2, None)),
    ):
        run = _parse(Own, args)[0].run
        assert (run.epochs, run.steps) == length
    _, run = _parse(Own, ["--epochs", "2", "--steps", "3"])
    assert run is not None
    with pytest.raises(ValueError, match="--epochs 2 and --steps 3 contradict each other"):
        run.check()


@dataclasses.dataclass(frozen=True)
class Layers:
    width: int = 8


@dataclasses.dataclass(frozen=True)
class Groups:
    run: eqxshard.RunConfig = eqxshard.RunConfig()
    encoder: Layers = Layers()
    decoder: Layers = Layers(width=64)


def test_arguments_of_groups_are_named_by_path():
    parsed, _ = _parse(Groups, ["--encoder.width", "5", "--seed", "3"])
    widths = parsed.encoder.width, parsed.decoder.width
    assert (*widths, parsed.run.seed) == (5, 64, 3)


def test_an_argument_that_is_an_option_of_a_run_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Own(Groups):
        seed: int = 7

    @dataclasses.dataclass(frozen=True)
    class Twice(Groups):
        other: eqxshard.RunConfig = eqxshard.RunConfig()

    sentence = "--seed is an option of RunConfig and an argument of this script, Own.seed; "
    with pytest.raises(ValueError, match=f"{sentence}give the argument another name"):
        _parse(Own, [])
    with pytest.raises(ValueError, match="run, other of Twice are all a RunConfig; keep"):
        _parse(Twice, [])


# Signals

LONG = ["--epochs", 100_000, "--seconds-per-step", 0.02, "--devices", 2]
GOES_ON = "--resume auto continues it."


def start(folder, *options, **settings):
    command = [sys.executable, SCRIPT, *LONG, "--output", folder, *options]
    return started(command, env=environment(**settings))


@pytest.fixture
def running(tmp_path):
    """A run that has taken some steps."""
    with start(tmp_path / "run") as process:
        read_until(process, process.stderr, "step 6/")
        yield process


def saved(tmp_path):
    return eqxshard.Checkpointer(tmp_path / "run" / "checkpoints").steps()


def test_ctrl_c_saves_and_ends_with_130(running, tmp_path):
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, ""), err
    assert err.splitlines()[-2:] == [GOES_ON, "stopped."] and "Traceback" not in err
    # It stopped after a step, which is logged and saved.
    assert read_lines(tmp_path / "run")[-1]["step"] == saved(tmp_path)[-1]
    assert not (tmp_path / "run" / "summary.json").exists()


def interrupt(process):
    """Press Ctrl-C until it ends.

    Python loses an interrupt in a destructor, and says so on stderr: users press again.
    """
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            continue
        return re.sub(r"(?s)Exception ignored .*?Interrupt: ?\n", "", err)
    raise AssertionError("Ctrl-C does not end it")


@pytest.mark.slow
def test_ctrl_c_before_the_first_step(tmp_path):
    # With what other tests have compiled, the first step would be done at once.
    cold = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    with start(tmp_path / "run", **cold) as process:
        # The progress bar prints this; then the first step is compiled.
        read_until(process, process.stderr, "small on 2 x cpu")
        err = interrupt(process)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "stopped." and "Traceback" not in err
    # The first step is saved if the loop had begun, which is a matter of milliseconds.
    assert (GOES_ON in err) == bool(saved(tmp_path)), err


# Several processes
