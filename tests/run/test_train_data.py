"""`train` on Grain datasets and on batches of others: lengths, resumes, mistakes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from helpers import assert_equal
from page_parser import parse
from run_helpers import files
from run_script import EXAMPLES, TESTS, loss_fn, make_data
from run_train_helpers import CONFIG, make_sgd, refusal, saved_steps, train

import eqxshard

BATCH = CONFIG.batch_size
RESUME = dataclasses.replace(CONFIG, resume="yes")


class Lines:
    """The examples of `make_data`, with their numbers; it counts reads."""

    def __init__(self, examples=EXAMPLES, seed=0):
        self.arrays = make_data(examples, seed).arrays
        self.read: set[int] = set()

    def __len__(self):
        return len(self.arrays["x"])

    def __getitem__(self, index):
        self.read.add(index)
        row = {name: array[index] for name, array in self.arrays.items()}
        return {**row, "number": np.int32(index)}


def numbered():
    """The arrays of the same examples."""
    return {**Lines().arrays, "number": np.arange(EXAMPLES, dtype=np.int32)}


def shift(example, rng):
    return {**example, "x": example["x"] + np.float32(rng.normal())}


def examples(**kwargs):
    dataset = grain.MapDataset.source(Lines(**kwargs)).seed(3).shuffle()
    return dataset.random_map(shift)


def two_of_three(example):
    return example["number"] % 3 != 0


def filtered(batch):
    dataset = examples().repeat().to_iter_dataset().filter(two_of_three)
    return dataset.batch(batch, drop_remainder=True)


def listed(batch=BATCH):
    """An iterable of batches that has a length."""
    arrays, starts = numbered(), range(0, EXAMPLES, batch)
    return [{k: v[n : n + batch] for k, v in arrays.items()} for n in starts]


def record() -> tuple[list[list[int]], dict[str, Any]]:
    """A train step, and the list of the examples that it gets, of each batch."""
    seen: list[list[int]] = []
    step = eqxshard.make_train_step(loss_fn, make_sgd(1))

    def train_step(state, batch):
        numbers = np.asarray(batch["number"])
        weight = np.asarray(batch.get("__weight__", np.ones(len(numbers))))
        seen.append(numbers[weight > 0].tolist())
        return step(state, batch)

    options: dict[str, Any] = {"loss_fn": None, "make_optim": make_sgd}
    return seen, options | {"train_step": train_step}


WAYS = {
    "arrays": numbered,
    "examples": examples,
    "endless": lambda: examples().repeat(),
    "filtered": lambda: filtered(BATCH),
    "list": listed,
}


@pytest.mark.parametrize(
    "way",
    [
        "filtered",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("arrays", "endless", "examples", "list")
        ),
    ],
)
def test_a_run_resumes_in_any_data(tmp_path, way):
    expected, options = record()
    options |= {"epochs": None, "eval_data": None}
    whole = train(tmp_path / "whole", train_data=WAYS[way](), steps=10, **options)
    assert len(expected) == 10 and [*map(len, expected)] == [BATCH] * 10
    found, step = record()
    options |= step
    half = tmp_path / "half"
    # In the middle of the first epoch, and of the second.
    for config, steps in [(CONFIG, 3), (RESUME, 8), (RESUME, 10)]:
        run = train(half, config, train_data=WAYS[way](), steps=steps, **options)
    assert found == expected
    assert_equal(run.state, whole.state)


@pytest.mark.parametrize(
    "way",
    ["examples", *(pytest.param(w, marks=pytest.mark.slow) for w in ("arrays", "endless"))],
)
def test_another_batch_size_goes_on_with_the_next_example(tmp_path, capsys, way):
    epochs = 2 if way != "endless" else None
    expected, options = record()
    options = options | {"eval_data": None}
    steps: dict[str, Any] = {"epochs": None, "steps": 12}
    train(tmp_path / "whole", CONFIG, train_data=WAYS[way](), **options | steps)
    found, step = record()
    options |= step
    few = steps | {"steps": 5}
    train(tmp_path / "run", CONFIG, train_data=WAYS[way](), **options | few)
    config = dataclasses.replace(RESUME, batch_size=8)
    # Of 192 examples, 112 are left.
    length: dict[str, Any] = {"epochs": epochs, "steps": None if epochs else 5 + 14}
    train(tmp_path / "run", config, train_data=WAYS[way](), **options | length)
    assert np.concatenate(found).tolist() == np.concatenate(expected).tolist()
    assert "batch_size 16 -> 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("filtered", {"train_data": filtered(8)}, "the batches of train_data have 8 rows"),
        (
            "list",
            {"eval_data": listed(8)},
            "the batches of eval_data have 8 rows, over all",
        ),
        (
            "batched",
            {"train_data": examples().batch(BATCH)},
            "leave .batch(n) out, because",
        ),
        ("strings", {"train_data": grain.MapDataset.source(["a"] * 99)}, "is a str; make"),
        ("once", {"train_data": iter(listed())}, "can be read only once"),
        ("endless", {"train_data": examples().repeat()}, "give --steps instead of epochs"),
        ("unknown", {"train_data": filtered(BATCH)}, "give --steps instead of epochs"),
        ("always", {"eval_data": examples().repeat()}, "eval_data is an endless dataset"),
        ("options", {"read_options": grain.ReadOptions()}, "is for a grain.MapDataset"),
        ("workers", {"train_data": listed(), "workers": 2}, "cannot divide the work of a"),
        (
            "remainder",
            {"train_data": examples(examples=97), "remainder": "error"},
            "batches of 16 leave 1 of 97 examples over",
        ),
    ],
)
def test_a_mistake_in_the_data_is_one_sentence_and_leaves_no_run(
    tmp_path, kind, options, message
):
    with pytest.raises((ValueError, TypeError)) as error:
        train(tmp_path / "run", **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_ends_too_early_keeps_what_was_trained(tmp_path):
    dataset = examples().to_iter_dataset().batch(BATCH)
    options = {"train_data": dataset, "epochs": None, "steps": 9}
    assert "the loader ended before step 9" in refusal(tmp_path, **options)
    assert saved_steps(tmp_path)[-1] == EXAMPLES // BATCH


def test_data_without_epochs_have_none_in_the_summary_and_on_the_page(tmp_path, capsys):
    run = train(tmp_path, train_data=examples().repeat(), epochs=None, steps=5)
    assert run.summary["seconds_per_epoch"] is run.summary["settings"]["epochs"] is None
    assert run.speed.startswith("nan s/epoch | ")
    assert len(run.summary["test_loss_by_evaluation"]) == 1
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["steps"], record["settings"]["epochs"]) == (5, None)
    page = parse((tmp_path / "index.html").read_text())
    assert page.find("h1").text == "Finished after 5 steps"
    assert "poch" not in page.find("section", id="evaluations").text
    assert "\nstep 5/5  eval " in capsys.readouterr().err


def test_a_remainder_of_examples_is_padded_or_dropped(tmp_path):
    for remainder, last in [("pad", 8), ("drop", BATCH)]:
        seen, options = record()
        options = options | {"train_data": examples(examples=40), "remainder": remainder}
        train(tmp_path / remainder, epochs=1, eval_data=None, **options)
        assert [*map(len, seen)] == [BATCH, BATCH, last][: len(seen)]
        assert len(seen) == (3 if remainder == "pad" else 2)


@pytest.mark.slow
def test_an_evaluation_is_the_same_of_all_kinds_of_data(tmp_path):
    arrays = make_data(TESTS, 1).arrays
    dataset = grain.MapDataset.source(Lines(TESTS, 1))
    whole = {name: array[:32] for name, array in arrays.items()}
    batches = [{k: v[n : n + BATCH] for k, v in whole.items()} for n in (0, BATCH)]
    pairs = {
        "examples": (dataset, arrays),
        "stream": (dataset.to_iter_dataset().batch(BATCH, drop_remainder=True), whole),
        "list": (batches, whole),
    }
    for name, (data, same) in pairs.items():
        options: dict[str, Any] = {"epochs": None, "steps": 2, "make_optim": make_sgd}
        found = train(tmp_path / name, eval_data=data, **options).metrics
        expected = train(tmp_path / f"{name}-arrays", eval_data=same, **options).metrics
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_another_seed_orders_arrays_otherwise_and_a_dataset_of_grain_not(tmp_path, capsys):
    options: dict[str, Any] = {"epochs": None, "eval_data": None}
    other = dataclasses.replace(RESUME, seed=1)
    arrays, dataset = tmp_path / "arrays", tmp_path / "dataset"
    train(arrays, steps=3, **options)
    before = files(arrays)
    said = refusal(arrays, other, steps=4, **options)
    assert said == (
        "--seed is 1, and the run in this folder has --seed 0, which orders its examples; "
        "resume with --seed 0, or start a new run in another folder."
    )
    assert files(arrays) == before
    expected, step = record()
    options |= step
    train(tmp_path / "whole", train_data=examples(), steps=4, **options)
    found, step = record()
    options |= step
    train(dataset, train_data=examples(), steps=3, **options)
    train(dataset, other, train_data=examples(), steps=4, **options)
    assert "seed 0 -> 1" in capsys.readouterr().out
    assert found == expected


def test_data_of_another_kind_are_refused_by_name(tmp_path):
    kinds = {
        "arrays": numbered(),
        "a grain.MapDataset of examples": examples(),
        "a Grain dataset of batches": filtered(BATCH),
        "an iterable of batches": listed(),
    }
    options: dict[str, Any] = {"epochs": None, "eval_data": None, "make_optim": make_sgd}
    train(tmp_path / "arrays", train_data=kinds["arrays"], steps=2, **options)
    train(tmp_path / "batches", train_data=filtered(BATCH), steps=2, **options)
    options["steps"] = 4
    for folder, before in [("arrays", "arrays"), ("batches", "a Grain dataset of batches")]:
        for kind in kinds.keys() - {before}:
            said = refusal(tmp_path / folder, RESUME, train_data=kinds[kind], **options)
            assert f"is of a loader of {before}, and this is one of {kind}; " in said
    smaller = dataclasses.replace(RESUME, batch_size=8)
    said = refusal(tmp_path / "batches", smaller, train_data=filtered(8), **options)
    assert "--batch-size is 8, and the run in this folder has batches of 16, which" in said


@pytest.mark.slow
def test_a_plan_reads_a_few_examples(capsys):
    lines = Lines()
    dataset = grain.MapDataset.source(lines).repeat()
    for data in (dataset, dataset.to_iter_dataset().batch(BATCH)):
        lines.read.clear()
        with pytest.raises(SystemExit) as stop:
            config = dataclasses.replace(CONFIG, devices=None, plan="8xh200", steps=9)
            train(Path("unused"), config, train_data=data)
        assert stop.value.code == 0
        assert "8 x NVIDIA H200" in capsys.readouterr().out
        if data is dataset:
            assert lines.read <= {0, 1, 2, 3}
    assert not Path("unused").exists()
