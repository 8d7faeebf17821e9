"""`train` without a command line: its result, its files and its errors."""

import dataclasses
import importlib.util
import json
import math
import re
import traceback
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_equal, lenient
from page_parser import parse
from run_helpers import read_lines
from run_script import EXAMPLES, Line, jax_bug, loss_fn, make_data
from run_train_helpers import (
    CONFIG,
    STEPS,
    copy,
    finished,
    make_optim,
    make_sgd,
    refusal,
    saved_steps,
    train,
)

import eqxshard
from eqxshard import RunConfig
from eqxshard.pages._format import format_number, format_value
from eqxshard.run._config import option_names
from eqxshard.training import Metrics

_ = copy, finished  # Fixtures.


# What a run gives


def test_the_result_says_what_was_reached(finished):
    last = read_lines(finished.folder)[-1]
    assert finished.metrics == {
        "loss": last["eval/loss"],
        "accuracy": last["eval/accuracy"],
    }
    assert int(finished.state.step) == last["step"] == STEPS
    assert finished.title == "Small on 2 x cpu (data=2)"
    epoch, points = finished.speed.split(" | ")
    assert epoch == f"{format_number(finished.summary['seconds_per_epoch'])} s/epoch"
    assert points == f"{format_number(finished.summary['points_per_second'])} points/s"


@pytest.mark.versions
def test_the_folder_has_everything(finished):
    names = {"checkpoints", "metrics.jsonl", "summary.json", "run.json", "index.html"}
    names |= {"curves.png"}
    names |= {"tensorboard"} if importlib.util.find_spec("tensorboard") else set()
    assert {path.name for path in finished.folder.iterdir()} == names
    lines = read_lines(finished.folder)
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert all(line["data"] == "lines" for line in lines)
    assert saved_steps(finished.folder) == [4, 8, 12]


def test_the_summary_says_how_it_was_made(finished):
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary == finished.summary
    assert summary.keys() == {
        *("test_accuracy", "test_accuracy_by_evaluation", "evaluated_at"),
        *("test_loss", "test_loss_by_evaluation"),
        *("seconds_per_epoch", "points_per_second", "data", "devices", "parameters"),
        *("settings", "versions", "seconds", "goodput", "title"),
    }
    assert len(summary["test_loss_by_evaluation"]) == 2
    assert (summary["data"], summary["devices"]) == ("lines", "2 x cpu (data=2)")
    assert summary["parameters"] == 3 * 8 + 8 + 8 * 2 + 2
    assert {"python", "eqxshard", "jax", "jaxlib", "optax"} <= summary["versions"].keys()
    settings = summary["settings"]
    assert settings.keys() == {*option_names()}
    assert (settings["epochs"], settings["batch_size"]) == (2.0, 16)


def test_without_a_log_there_is_no_speed(copy):
    (copy / "summary.json").unlink()
    (copy / "metrics.jsonl").unlink()
    run = train(copy, dataclasses.replace(CONFIG, resume="auto"))
    assert run.speed == "nan s/epoch | nan points/s"
    assert run.summary["seconds_per_epoch"] is run.summary["points_per_second"] is None
    assert "NaN" not in (copy / "summary.json").read_text()


def test_the_optimizer_gets_the_number_of_steps(tmp_path):
    seen = []

    def stops(steps):
        seen.append(steps)
        raise KeyError

    for options, steps in [
        ({}, 12),
        ({"config": RunConfig(batch_size=16, devices=2, epochs=3)}, 18),
        ({"config": RunConfig(batch_size=16, devices=2, steps=5)}, 5),
        ({"epochs": None, "steps": 7}, 7),
    ]:
        with pytest.raises(KeyError):
            train(tmp_path, make_optim=stops, **options)
        assert seen.pop() == steps


@pytest.mark.slow
def test_loaded_weights_and_a_sampler(tmp_path, finished):
    eqxshard.save_weights(tmp_path / "w.safetensors", finished.state.model)
    sampler = eqxshard.data.UniformSampler(64)

    def load(like):
        return eqxshard.load_weights(tmp_path / "w.safetensors", like)

    tuned = train(tmp_path / "run", load=load, sampler=sampler, make_optim=make_frozen)
    # Two epochs of as many examples as the sampler has.
    assert int(tuned.state.step) == 8
    assert_equal(tuned.state.model, finished.state.model)
    # A run that resumes reads its checkpoint instead.
    more = dataclasses.replace(CONFIG, resume="yes", epochs=3)
    options = {"sampler": sampler, "make_optim": make_frozen}
    assert int(train(tmp_path / "run", more, load=fail, **options).state.step) == 12


def make_frozen(steps):
    return lenient(optax.sgd(0.0))


def fail(like):
    raise AssertionError


class Once:
    """A tracker."""

    def log(self, step, values):
        pass

    def close(self, error=None):
        pass


def test_a_profile_is_written_to_the_folder_of_the_run(tmp_path, monkeypatch):
    started: list[str] = []
    monkeypatch.setattr("jax.profiler.start_trace", started.append)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: None)
    train(tmp_path, dataclasses.replace(CONFIG, profile="3:12"))
    assert started == [str(tmp_path / "profile")]


# Mistakes


@pytest.mark.parametrize(
    "change, options, message",
    [
        (
            {"batch_size": 98},
            {},
            "--batch-size 98 is more than the 96 examples; use a smaller",
        ),
        ({"mesh": "dta=3"}, {}, "did you mean 'data'?"),
        ({"devices": 9}, {}, "9 devices were asked for, and there are 8 x cpu"),
        ({"epochs": 0}, {}, "--epochs 0 is too small"),
        ({"profile": "13:14"}, {}, "--profile 13:14 begins after the last step, 12; use"),
        ({"steps": 2**31}, {}, "2147483648 steps are not between 1 and 2**31 - 1"),
        ({}, {"steps": 3}, "train needs one of epochs= and steps=; give exactly one"),
        ({}, {"epochs": None}, "train needs one of epochs= and steps=; give exactly one"),
        ({}, {"lint": {"global-batc": "off"}}, "did you mean 'global-batch'?"),
        ({"mesh": "data=2"}, {"mesh": True}, "makes its own mesh; leave out --mesh"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, change, options, message):
    if options.get("mesh"):
        options = {"mesh": eqxshard.make_mesh(devices=jax.devices()[:2])}
    config = dataclasses.replace(CONFIG, **change)
    assert message in refusal(tmp_path / "run", config, **options)
    assert not (tmp_path / "run").exists()


def other_entry(model, batch):
    return {"accuracy": batch["label"]}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"metric_fn": other_entry}, "label"),
        ({"best": "accuracy"}, "best='accuracy' .*; did you mean 'eval/accuracy'?"),
        ({"best": "eval/los"}, "; did you mean 'eval/loss'?"),
        (
            {
                "callbacks": [
                    eqxshard.callbacks.EarlyStopping("eval/acuracy", 1, mode="max")
                ]
            },
            "EarlyStopping's metric='eval/acuracy' is no metric .*'eval/accuracy'?",
        ),
        (
            {"callbacks": [eqxshard.callbacks.Every(2, print)], "best": "loss"},
            "best='loss' .*; did you mean 'eval/loss'?",
        ),
        (
            {"best": "eval/loss", "metric_fn": None},
            "; give train a metric_fn and eval_data, or",
        ),
        (
            {"best": "train/los", "mode": "min"},
            "no metric of this run; did you mean 'train/loss'?",
        ),
        ({"best": "train/los", "metric_fn": None}, "did you mean 'train/loss'?"),
        (
            {"best": "seconds/dat", "mode": "min"},
            "use one of eval/accuracy, eval/loss, train/loss",
        ),
        (
            {"best": "learning_rate", "mode": "min"},
            "best='learning_rate' is no metric of this run",
        ),
        (
            {"callbacks": [eqxshard.callbacks.EarlyStopping("train/acc", patience=1)]},
            "EarlyStopping's metric='train/acc' is no metric of this run; ",
        ),
        ({"callbacks": [eqxshard.callbacks.EvaluateEMA(dict)]}, "average"),
        (
            {"callbacks": [eqxshard.callbacks.EvaluateEMA()], "eval_data": None},
            "which has none; give fit evaluate=, or give train a metric_fn and eval_data",
        ),
    ],
)
def test_mistakes_in_evaluations_come_before_the_first_step(tmp_path, options, message):
    steps = []
    if options.get("metric_fn") is other_entry:
        counts = eqxshard.callbacks.Every(1, lambda loop: steps.append(loop.step))
        options = options | {"callbacks": [counts]}
    with pytest.raises((KeyError, ValueError), match=message):
        train(tmp_path / "run", **options)
    assert not steps and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_optimizer_or_a_function_of_steps(tmp_path, finished):
    def with_rate(steps, learning_rate):
        return lenient(optax.adam(optax.linear_schedule(learning_rate, 0.001, steps)))

    # A rate besides the number of steps is the function's own business.
    for n, optim in enumerate((make_optim(STEPS), partial(with_rate, learning_rate=0.01))):
        run = train(tmp_path / str(n), make_optim=optim)
        assert_equal(run.state.model, finished.state.model)
    for factory, name in [
        (optax.adam, "adam"),
        (partial(optax.adam, b1=0.8), "partial"),
        (optax.contrib.muon, "muon"),
        (lambda learning_rate: optax.sgd(learning_rate), "<lambda>"),
        (optax.inject_hyperparams(optax.sgd), "sgd"),
    ]:
        with pytest.raises(TypeError, match=f"{name} would get the number of steps, 12"):
            train(tmp_path / "no", make_optim=factory)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"trackers": (object(),)}, "a object is not a tracker; give an object with"),
        ({"trackers": Once()}, "trackers= is a Once; give a list"),
        ({"callbacks": eqxshard.callbacks.Callback()}, "callbacks= is a Callback; give"),
    ],
)
def test_other_things_than_lists_of_trackers_and_callbacks(
    tmp_path, options, message, unannotated
):
    with pytest.raises(TypeError, match=message):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# Several models, and a step of one's own


def two_models(**options):
    """A run of two models, each of which is trained to be like the other."""
    optim = make_sgd(STEPS)

    def nearer(model, batch, key, other):
        return jnp.mean((jax.vmap(model)(batch["x"]) - jax.vmap(other)(batch["x"])) ** 2, 1)

    step = eqxshard.make_train_step(nearer, optim)

    def both(states, batch):
        one, two = states["one"], states["two"]
        one, one_metrics = step(one, batch, two.model)
        two, two_metrics = step(two, batch, one.model)
        metrics = Metrics.join(one=one_metrics, two=two_metrics)
        return {"one": one, "two": two}, metrics

    return {
        "make_model": {"one": partial(Line, 8), "two": partial(Line, 4)},
        "make_optim": optim,
        "loss_fn": None,
        "metric_fn": None,
        "train_step": both,
    } | options


@pytest.mark.slow
def test_several_models_train_by_a_step_of_ones_own_and_resume(tmp_path):
    whole = train(tmp_path / "whole", **two_models())
    assert {name: int(state.step) for name, state in whole.state.items()} == {
        "one": STEPS,
        "two": STEPS,
    }
    lines = [x for x in read_lines(tmp_path / "whole") if "train/one/loss" in x]
    assert lines[-1]["train/one/loss"] < lines[0]["train/one/loss"]
    # Line(8) and Line(4).
    assert whole.summary["parameters"] == 50 + 26
    half = train(tmp_path / "half", **two_models(epochs=1))
    assert int(half.state["one"].step) == STEPS // 2
    config = dataclasses.replace(CONFIG, resume="yes")
    assert_equal(train(tmp_path / "half", config, **two_models()).state, whole.state)


def test_a_mistake_in_the_loss_leaves_no_run_behind(tmp_path):
    def mistaken(model, batch, key):
        return batch["z"]

    with pytest.raises(KeyError, match="z") as caught:
        train(tmp_path / "run", loss_fn=mistaken)
    assert "The batch has no 'z'; it has x, y." in caught.value.__notes__
    assert not (tmp_path / "run").exists()
    train(tmp_path / "run")


def test_traceback_keeps_all_frames(tmp_path):
    for wanted in (False, True):
        config = dataclasses.replace(CONFIG, traceback=wanted)
        with pytest.raises(ValueError, match="Size of label 'i'") as caught:
            train(tmp_path / "run", config, loss_fn=jax_bug)
        files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
        assert any("/eqxshard/training/" in file for file in files) == wanted
        assert any("/jax/" in file for file in files) == wanted


def test_averaged_weights_are_in_the_result_and_the_summary(tmp_path, capfd):
    def make_averaged(steps):
        return optax.chain(make_optim(steps), eqxshard.ema_weights(0.5))

    averages = [eqxshard.callbacks.EvaluateEMA()]
    run = train(tmp_path, make_optim=make_averaged, callbacks=averages)
    lines = [line for line in read_lines(tmp_path) if "ema/loss" in line]
    values = [line["ema/loss"] for line in lines]
    assert len(values) == 2 and values[-1] != run.metrics["loss"]
    assert run.metrics["ema/loss"] == run.summary["ema_loss"] == values[-1]
    assert run.summary["ema_loss_by_evaluation"] == values
    assert f", ema/loss {format_value(values[-1])} | " in str(run)
    err = capfd.readouterr().err
    assert re.search(rf"step 12/12  ema accuracy \S+  loss {format_value(values[-1])}", err)
    page = parse((tmp_path / "index.html").read_text())
    heads = page.find("section", id="evaluations").find_all("th", scope="col")
    assert "ema/loss" in [head.text for head in heads]


def test_a_step_is_made_once_also_if_a_run_resumes_with_other_batches(copy, monkeypatch):
    made = []

    def count(*args, **options):
        made.append(eqxshard.make_train_step(*args, **options))
        return made[-1]

    monkeypatch.setattr("eqxshard.run._parts.make_train_step", count)
    config = dataclasses.replace(CONFIG, resume="yes", batch_size=8)
    assert int(train(copy, config, epochs=3).state.step) == STEPS + 12
    assert len(made) == 1


def test_several_models_need_a_step(tmp_path):
    for options in (two_models(train_step=None), {"loss_fn": None}):
        assert "give your own as train_step=" in refusal(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_axes_over_which_nothing_is_split_are_named_once(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, devices=8, mesh="data=2,tensor=4", steps=1)
    train(tmp_path, config)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "warning: " in x]
    assert line.startswith("warning: nothing is split over tensor=4, so its devices repeat")
    assert "over tensor=4" in (tmp_path / "warnings.jsonl").read_text()


def test_a_file_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "summary.json").write_text("kept")
    (tmp_path / "metrics.jsonl").mkdir()
    assert f"{tmp_path / 'metrics.jsonl'}" in refusal(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "kept"


def test_skipped_steps_are_in_the_summary_and_on_the_page(tmp_path):
    data = make_data(EXAMPLES, 0)
    data.arrays["x"][7] = math.nan
    run = train(tmp_path, train_data=data)
    bad = [step for step in range(STEPS) if 7 in loader_of(data).rows(step)]
    assert len(bad) == 2
    row = loader_of(data).rows(bad[0]).tolist().index(7)
    found = (
        f"Its batch entry x is not finite in rows [{row}] of the batch (examples [7] of "
    )
    found += "the source)."
    entry = {"steps": 2, "first": bad[0] + 1, "found": found}
    assert run.summary["skipped"] == entry
    assert json.loads((tmp_path / "summary.json").read_text())["skipped"] == entry
    warnings = parse((tmp_path / "index.html").read_text()).find("section", id="warnings")
    said = f"2 of 12 steps were skipped, the first of them step {bad[0] + 1}: "
    assert said in warnings.text and found in warnings.text


def loader_of(data):
    """A loader that gives the batches of `CONFIG`."""
    return eqxshard.Loader(data, batch_size=16, mesh=eqxshard.make_mesh())


@pytest.mark.slow
def test_a_run_that_diverges_says_where_on_its_page_too(tmp_path):
    def diverge(steps):
        return lenient(optax.sgd(1e30))

    config = dataclasses.replace(CONFIG, steps=12, save_every=99)
    with pytest.raises(FloatingPointError) as error:
        train(tmp_path, config, make_optim=diverge)
    code = loss_fn.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 2} (loss_fn)"
    assert f"the first infinity appears in integer_pow, {line}" in str(error.value)
    assert "of the batch (examples [" in str(error.value)
    page = parse((tmp_path / "index.html").read_text())
    assert re.match(r"Stopped at step \d+ of 12: Nonfinite", page.find("h1").text)
    warnings = page.find("section", id="warnings")
    assert "the checkpoint of step 12 is saved." in warnings.text
