import re
import sys
import types
from io import StringIO

import pytest
from page_parser import parse
from rich.console import Console

import eqxshard
from eqxshard.sharding._text import say
from eqxshard.trackers import ProgressBar

TRAIN = {
    "epoch": 0.5,
    "train/loss": 1.25,
    "train/accuracy": 0.5,
    "train/seconds": 3.0,
    "train/examples_per_second": 12345.6,
}
EVAL = {"epoch": 1.0, "eval/accuracy": 0.75}


def console(terminal):
    return Console(file=StringIO(), force_terminal=terminal, width=120)


def written(console):
    return console.file.getvalue()


def test_without_a_terminal_the_first_report_each_epoch_and_evaluation_is_a_plain_line():
    out = console(terminal=False)
    bar = ProgressBar(20, title="[lenet] on 8 x cpu", console=out)
    assert isinstance(bar, eqxshard.trackers.Tracker)
    bar.log(5, TRAIN)
    assert written(out) == (
        "[lenet] on 8 x cpu\n"
        "epoch 0.5  step 5/20  train loss 1.250  accuracy 0.5000  12,300 examples/s\n"
    )
    bar.log(7, {**TRAIN, "epoch": 0.7})
    bar.log(10, {**TRAIN, **EVAL, "train/loss": 1.0})
    bar.close()
    assert written(out).splitlines()[2:] == [
        "epoch 1  step 10/20  train loss 1.000  accuracy 0.5000  12,300 examples/s",
        "epoch 1  step 10/20  eval accuracy 0.7500",
    ]


def test_without_a_terminal_the_last_step_is_a_line_even_in_mid_epoch(unannotated):
    out = console(terminal=False)
    bar = ProgressBar(7, console=out)
    # An epoch may be an integer.
    bar.log(1, {"epoch": 1, "train/loss": 1.0})
    bar.log(6, {"epoch": 6.5, "train/loss": 1.0})
    bar.log(7, {"epoch": 7.7, "train/loss": 1.0})
    assert written(out).splitlines() == [
        "epoch 1  step 1/7  train loss 1.000",
        "epoch 7.7  step 7/7  train loss 1.000",
    ]


def test_without_a_terminal_a_run_without_epochs_has_a_line_a_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = console(terminal=False)
    bar = ProgressBar(100, console=out)
    for step in range(1, 101):
        bar.log(step, {"train/loss": 1.0})
        now[0] += 7.0
    steps = [int(step) for step in re.findall(r"step (\d+)/100  train", written(out))]
    assert steps == [*range(1, 100, 9), 100]


def test_averaged_weights_have_a_line():
    for terminal in (False, True):
        out = console(terminal=terminal)
        bar = ProgressBar(10, console=out)
        bar.log(10, {"eval/loss": 2.0, "ema/loss": 1.0})
        bar.close()
        lines = [line.rstrip() for line in written(out).splitlines()]
        assert lines == ["step 10/10  eval loss 2.000", "step 10/10  ema loss 1.000"]


def test_on_a_terminal_the_bar_moves_and_evaluations_stay():
    out = console(terminal=True)
    bar = ProgressBar(20, title="LeNet", console=out)
    try:
        bar.log(5, TRAIN)
        bar.log(10, {**TRAIN, "epoch": 1.0})
        bar.log(10, EVAL)
        bar.log(15, {**TRAIN, "epoch": 1.5})
    finally:
        bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(out))
    assert text.startswith("LeNet\n")
    # Only the evaluation has its own line; the rest overwrites the bar.
    assert len(re.findall(r"epoch 1  step 10/20  eval accuracy 0\.7500 *\n", text)) == 1
    assert "train" not in text
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("epoch 1.5")
    assert "15/20" in last
    assert "loss 1.250  accuracy 0.5000  12,300 examples/s" in last


def test_on_a_terminal_lines_break_between_words(monkeypatch):
    out = Console(file=StringIO(), force_terminal=True, width=30)
    bar = ProgressBar(20, console=out)
    bar.log(20, {"epoch": 1.0, "eval/accuracy": 0.75, "eval/something": 0.25})
    lines = [line.rstrip() for line in written(out).splitlines()]
    assert lines == ["epoch 1  step 20/20  eval", "accuracy 0.7500  something", "0.2500"]
    monkeypatch.setenv("COLUMNS", "20")
    file = StringIO()
    file.isatty = lambda: True
    say("the remedy is `a command of many words`; use it.", file)
    assert file.getvalue().splitlines() == [
        "the remedy is",
        "`a command of many words`;",
        "use it.",
    ]


@pytest.mark.parametrize("redirected", [True, False])
def test_what_a_script_prints_is_above_the_bar_or_in_its_own_file(
    redirected, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: not redirected, raising=False)
    out = console(terminal=True)
    bar = ProgressBar(20, console=out)
    bar.log(5, TRAIN)
    print("To be, or not to be")
    bar.close()
    assert ("To be" in written(out)) != redirected
    assert capsys.readouterr().out == ("To be, or not to be\n" if redirected else "")


class FullDisk(StringIO):
    """The log of a job whose disk is full."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_log_on_a_full_disk_does_not_keep_a_run_from_starting():
    bar = ProgressBar(10, title="MLP", console=Console(file=FullDisk()))
    # `fit` logs this, and goes on.
    with pytest.raises(OSError, match="No space left"):
        bar.log(10, {"epoch": 1.0, "train/loss": 0.5})


def test_total_steps_must_be_positive():
    with pytest.raises(ValueError, match="total_steps=0 must be at least 1"):
        ProgressBar(0)


@pytest.fixture
def shown(monkeypatch):
    """The displays of a cell, each in its place, as IPython keeps them."""
    things: list = []

    class Handle:
        def __init__(self, place):
            self.place = place

        def update(self, thing, raw):
            things[self.place] = thing

    def display(thing, *, raw=False, display_id=False):
        if not display_id:  # A line, by rich.
            return things.append(thing._repr_mimebundle_((), ())["text/plain"])
        things.append(thing)
        return Handle(len(things) - 1)

    module = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=module))
    return things


def test_in_a_notebook_the_bar_moves_in_its_place_and_lines_come_below(shown):
    bar = ProgressBar(20, title="<b>", console=Console(force_jupyter=True, width=80))
    bar.log(5, {"epoch": 0.25, "train/loss": 1.25, "train/examples_per_second": 99.0})
    bar.log(10, {"epoch": 0.5, "train/<i>": 1.0, "eval/accuracy": 0.75})
    bar.close()
    title, bundle, line = shown
    assert (title, line) == ("<b>\n", "epoch 0.5  step 10/20  eval accuracy 0.7500\n")
    assert bundle["text/plain"] == "10/20  epoch 0.5  <i> 1.000"
    page = parse(bundle["text/html"])
    assert page.find("progress").attributes == {"value": "10", "max": "20"}
    assert page.find("div").text.strip() == bundle["text/plain"]
