"""The recipe, as users run it: what it prints, what it writes, what it refuses.

Where a process of its own is not the point, its `main` is called here, on small data.
"""

import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import equinox as eqx
import jax
import pytest
from helpers import REAL, assert_equal, needs_real_data

import eqxshard.data

SCRIPT = Path(__file__).parents[2] / "recipes" / "fashion_mnist.py"
NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
IMAGES_HEADER = bytes.fromhex("00000803 0000ea60 0000001c 0000001c")
#: Nothing listens there, so that nothing is downloaded.
NO_MIRROR = "http://127.0.0.1:9/"
LAST_LINE = re.compile(
    r"test accuracy 0\.\d{4} \| \d+\.\d s/epoch \| \d{1,3}( \d{3})* images/s"
    r" \| MLP on \d+ x cpu \(data=\d+\)( \| synthetic data)?"
)
PNG = b"\x89PNG\r\n\x1a\n"
synthetic_fashion = eqxshard.data.synthetic_fashion


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """Keep tests away from the user's own data and folders, and from the internet."""
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", NO_MIRROR)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def load(monkeypatch):
    """The recipe as a module, on the devices that are there already."""
    spec = importlib.util.spec_from_file_location("fashion_mnist_recipe", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    return module


@pytest.fixture
def recipe(monkeypatch):
    # Optax itself mixes dtypes, which our tests forbid everybody else.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield load(monkeypatch)


def draw_few(monkeypatch):
    """Make both datasets a thousand generated examples."""

    def draw(split, *, data_dir=None):
        return synthetic_fashion(split, size={"train": 1024, "test": 200}[split])

    monkeypatch.setattr(eqxshard.data, "synthetic_fashion", draw)
    monkeypatch.setattr(eqxshard.data, "fashion_mnist", draw)


@pytest.fixture
def small(monkeypatch):
    draw_few(monkeypatch)


def call(recipe, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, options)])
    # It is for all of the process, and so for other tests.
    monkeypatch.setattr(eqxshard, "cache_compilations", lambda: None)
    try:
        return recipe.main()
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def main(recipe, monkeypatch, capsys):
    """Runs the recipe with some options; returns (status, stdout, stderr)."""

    def run(*options):
        status = call(recipe, monkeypatch, *options)
        return status, *capsys.readouterr()

    return run


#: A process that is killed may leave half an entry, which is not for the user's cache.
COMPILED = tempfile.TemporaryDirectory(prefix="eqxshard-compiled-")


def environment(**settings):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "COLUMNS")}
    kept["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    return {**kept, "JAX_PLATFORMS": "cpu", **settings}


def start(*options, **settings):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, options)],
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*options, **settings):
    """Like `main`, in a process of its own."""
    process = start(*options, **settings)
    out, err = process.communicate()
    return process.returncode, out, err


def read_lines(output):
    return [
        json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture
def earlier(tmp_path):
    """What an earlier run left."""
    output = tmp_path / "earlier"
    output.mkdir()
    contents = {
        "metrics.jsonl": b'{"step": 50}\n',
        "summary.json": b"{}\n",
        "curves.png": PNG,
    }
    for name, content in contents.items():
        (output / name).write_bytes(content)
    yield output
    assert {path.name: path.read_bytes() for path in output.iterdir()} == contents


ADVICE = "did|use|choose|give|write|put|delete|set|see|make|add|leave|look"


def assert_refused(result, sentence):
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert sentence in err
    assert re.search(f"(?i)[;.] ({ADVICE}) ", err), err


# What is refused, and that nothing is lost by it


MISTAKES = [
    ("--batch-size 255", "batch size 255 does not divide over data=8 x fsdp=1"),
    ("--batch-size 1032", "--batch-size 1032 is more than the 1024 examples"),
    ("--batch-size 0", "--batch-size 0 is too few"),
    ("--mesh data=3", "mesh sizes data=3 = 3 do not use exactly the 8 devices"),
    ("--mesh fsdp=3", "mesh sizes fsdp=3 = 3 do not divide the 8 devices"),
    ("--mesh data=2,fsdp=2", "data=2 x fsdp=2 = 4 do not use exactly the 8 devices"),
    ("--mesh data=-1,fsdp=-1", "data and fsdp are both -1"),
    ("--mesh data=0", "axis data=0 is not a size"),
    ("--mesh data=-2", "axis data=-2 is not a size"),
    ("--mesh data", "--mesh data gives no size in 'data'; write it like data=2"),
    ("--mesh data=two", "gives no size in 'data=two'; write it like data=2"),
    ("--mesh data=2,", "unknown mesh axis ''; use one of stage, data"),
    ("--mesh data=2,data=4", "--mesh data=2,data=4 gives data twice"),
    ("--mesh dta=2", "unknown mesh axis 'dta'; did you mean 'data'?"),
    ("--mesh 4", "unknown mesh axis '4'; use one of stage, data"),
    ("--mesh tensor=3", "mesh sizes tensor=3 = 3 do not divide the 8 devices"),
    ("--devices 0", "--devices 0 is too few; use 1 or more"),
    ("--devices -1", "--devices -1 is too few; use 1 or more"),
    ("--devices 9", "--devices 9 is more than there are: 8 x cpu"),
    ("--model lent", "unknown model 'lent'; did you mean 'lenet'?"),
    ("--rule fsdb", "unknown rule 'fsdb'; did you mean 'fsdp'?"),
    ("--optimizer adm", "unknown optimizer 'adm'; did you mean 'adam'?"),
    ("--data fashion", "unknown dataset 'fashion'; did you mean 'fashion_mnist'?"),
    ("--epochs 0", "--epochs 0 is too few; use 1 or more"),
    ("--epochs -3", "--epochs -3 is too few; use 1 or more"),
    ("--learning-rate 0", "--learning-rate 0.0 is no rate"),
    ("--learning-rate -0.1", "--learning-rate -0.1 is no rate"),
    ("--learning-rate nan", "--learning-rate nan is no rate"),
    ("--learning-rate inf", "--learning-rate inf is no rate"),
    ("--seed -1", "seed=-1 is not a seed"),
    ("--epochs 99999999999999999999", "399999999999999999996 steps, too many"),
    ("--mesh ", "unknown mesh axis ''; use one of stage, data"),
    ("--output ", "--output is empty; give a folder"),
    ("--save-every 0", "--save-every 0 is too few; use 1 or more"),
    ("--resume maybe", "unknown way to resume 'maybe'; use one of no, yes, auto"),
]


@pytest.mark.parametrize("options, sentence", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_line_and_costs_nothing(main, small, earlier, options, sentence):
    """What is said of synthetic data is said of accepted runs only."""
    given = ["--data", "synthetic", "--devices", "8", "--output", earlier]
    assert_refused(main(*given, *options.split(" ")), sentence)


@pytest.mark.parametrize(
    "options",
    ["--batch-size 2.5", "--epochs ten", "--learning-rate x", "--modle mlp", "--mesh"],
)
def test_what_is_no_option_is_refused_by_tyro_and_costs_nothing(main, earlier, options):
    status, out, err = main("--output", earlier, *options.split(" "))
    assert (status, out) == (2, "")
    assert options.split(" ")[0] in err


@pytest.mark.parametrize("option", ["--mesh=data=999999999", "--devices=999999999"])
def test_no_end_of_devices_is_refused_before_they_are_made(main, small, earlier, option):
    sentence = "999999999 devices are more than the 256 examples of a batch"
    assert_refused(main(option, "--output", earlier), sentence)


def test_a_mistake_is_one_line_in_a_process_too(earlier):
    options = ["--data", "synthetic", "--model", "lent", "--output", earlier]
    assert_refused(run(*options), "unknown model 'lent'; did you mean 'lenet'?")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--batch-size 255 --devices 2", "batch size 255 does not divide over data=2"),
        ("--mesh data=3 --devices 2", "data=3 = 3 do not use exactly the 2 devices"),
        ("--mesh data=999999999", "999999999 devices are more than the 256 examples"),
        ("--devices 0", "--devices 0 is too few; use 1 or more"),
    ],
)
def test_mistakes_of_numbers_in_a_process(earlier, options, sentence):
    result = run("--data", "synthetic", "--output", earlier, *options.split())
    assert_refused(result, sentence)


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_devices_that_are_not_there_in_a_process(earlier, platform):
    result = run("--data", "synthetic", "--output", earlier, JAX_PLATFORMS=platform)
    assert_refused(result, f"no devices for JAX_PLATFORMS={platform}: ")
    assert "unset it, or install" in result[2]


def idx(body):
    return gzip.compress(body, compresslevel=1, mtime=0)


DAMAGES = {
    "empty": (b"", "it is empty"),
    "not gzip": (b"<!DOCTYPE html>", "it is not a gzip file"),
    "truncated": (idx(IMAGES_HEADER + bytes(9999))[:-30], "its gzip data break off"),
    "wrong magic": (idx(b"\x00\x00\x08\x01" + bytes(99)), "number is 0x00000801"),
    "wrong length": (idx(IMAGES_HEADER + bytes(99)), "99 bytes of data where"),
    "wrong sum": (idx(IMAGES_HEADER + bytes(60_000 * 784)), "its SHA-256 is"),
}


@pytest.mark.parametrize("data", ["fashion_mnist", "auto"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_are_named_and_left_alone(main, earlier, tmp_path, damage, data):
    """`auto` is for data that are not there: damage is never passed over."""
    content, sentence = DAMAGES[damage]
    path = tmp_path / "data" / "fashion_mnist" / NAMES[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    options = ["--data", data, "--data-dir", tmp_path / "data", "--output", earlier]
    result = main(*options)
    assert_refused(result, sentence)
    assert f"error: {path} is damaged: " in result[2]
    assert path.read_bytes() == content


def test_missing_data_are_one_line_in_a_process_too(earlier, tmp_path):
    options = ["--data", "fashion_mnist", "--output", earlier]
    result = run(*options, EQXSHARD_DATA_DIR=str(tmp_path / "data"))
    where = tmp_path / "data"
    assert_refused(result, f"{NAMES[0]} is neither in {where}/fashion_mnist nor in {where}")
    assert f"{NO_MIRROR}{NAMES[0]}: " in result[2]


def test_the_data_dir_is_the_flag_then_the_variable_then_the_cache(
    main, earlier, tmp_path, monkeypatch
):
    options = ["--data", "fashion_mnist", "--output", earlier]
    assert_refused(main(*options), f"nor in {tmp_path / 'cache' / 'eqxshard'}, and")
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path / "variable"))
    assert_refused(main(*options), f"nor in {tmp_path / 'variable'}, and")
    flag = tmp_path / "flag"
    assert_refused(main(*options, "--data-dir", flag), f"nor in {flag}, and")


@pytest.mark.parametrize("data", ["fashion_mnist", "synthetic"])
@pytest.mark.parametrize("below", [".", "below"])
def test_an_output_folder_that_is_a_file(main, small, tmp_path, below, data):
    (tmp_path / "file").write_text("kept")
    output = tmp_path / "file" / below
    result = main("--data", data, "--devices", "8", "--output", output)
    assert_refused(result, "checkpoints cannot be written to ")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["metrics.jsonl", "curves.png"])
def test_an_output_that_is_a_folder(main, small, tmp_path, name):
    others = {"metrics.jsonl", "curves.png", "summary.json"} - {name}
    for other in others:
        (tmp_path / other).write_text("kept")
    (tmp_path / name).mkdir()
    result = main("--data", "synthetic", "--devices", "8", "--output", tmp_path)
    assert_refused(result, f"cannot write '{tmp_path / name}': ")
    assert {(tmp_path / other).read_text() for other in others} == {"kept"}


def test_an_output_folder_that_is_read_only(main, small, earlier):
    (earlier / "metrics.jsonl").chmod(0o400)
    earlier.chmod(0o500)
    try:
        if os.access(earlier, os.W_OK):
            pytest.skip("root may write everywhere")
        result = main("--devices", "8", "--output", earlier)
    finally:
        earlier.chmod(0o700)
    assert_refused(result, "Permission denied")


# What a run gives


def assert_a_whole_run(result, output, *, data, synthetic):
    status, out, err = result
    assert status == 0, err
    *_, last = out.splitlines()
    match = LAST_LINE.fullmatch(last)
    assert match, last
    lines = read_lines(output)
    assert all(line["data"] == data for line in lines)
    assert all(math.isfinite(line["train/loss"]) for line in lines[:-1])
    assert lines[-1]["epoch"] == 1
    summary = json.loads((output / "summary.json").read_text())
    assert summary["data"] == data
    assert summary["test_accuracy"] == lines[-1]["eval/accuracy"]
    assert f"test accuracy {summary['test_accuracy']:.4f} " in last
    assert (output / "curves.png").read_bytes().startswith(PNG)
    title = last[last.index("MLP") :]
    assert title in err.splitlines()
    # Wherever numbers are, so is what they were measured on.
    said = ["SYNTHETIC DATA" in err, match[2] is not None, "ynthetic" in out + err]
    assert said == [synthetic] * 3
    return summary


def test_a_run_on_synthetic_data(tmp_path):
    output = tmp_path / "new" / "output"
    output.mkdir(parents=True)
    (output / "metrics.jsonl").write_text("an earlier run's\n" * 99)
    options = ["--data", "synthetic", "--model", "mlp", "--epochs", "1"]
    result = run(*options, "--output", output)
    summary = assert_a_whole_run(result, output, data="synthetic", synthetic=True)
    assert len(summary["test_accuracy_by_epoch"]) == 1
    assert summary["test_accuracy"] > 0.6
    assert summary["settings"]["epochs"] == 1
    assert summary["images_per_second"] == 60_000 / summary["seconds_per_epoch"]
    assert summary["parameters"] == 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert "As asked for with --data synthetic." in result[2]


@needs_real_data
def test_a_run_on_the_real_data(tmp_path):
    result = run("--model", "mlp", "--epochs", "1", EQXSHARD_DATA_DIR=REAL)
    output = tmp_path / "runs" / "fashion_mnist-mlp"
    summary = assert_a_whole_run(result, output, data="fashion_mnist", synthetic=False)
    assert summary["test_accuracy"] > 0.8


def test_auto_without_the_data_says_so_everywhere(main, monkeypatch, recipe, tmp_path):
    def draw(split):
        return synthetic_fashion(split, size=512)

    titles = []

    class Curves(eqxshard.trackers.Curves):
        def __init__(self, path, *, title):
            titles.append(title)
            super().__init__(path, title=title)

    monkeypatch.setattr(eqxshard.data, "synthetic_fashion", draw)
    monkeypatch.setattr(recipe.trackers, "Curves", Curves)
    options = ["--model", "mlp", "--epochs", "1", "--devices", "2", "--batch-size", "64"]
    result = main(*options, "--output", tmp_path)
    assert_a_whole_run(result, tmp_path, data="synthetic", synthetic=True)
    assert titles == ["MLP on 2 x cpu (data=2) | synthetic data"]
    box = " ".join(result[2].replace("│", " ").split())
    assert "NOT on Fashion-MNIST" in box
    assert f"{NAMES[0]} is neither in " in box and "could not be downloaded" in box


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, optimizer",
    [("lenet", "adamw"), ("cnn", "adam"), ("cnn", "sgd"), ("mlp", "sgd")],
)
def test_every_model_and_optimizer_learns(main, small, tmp_path, model, optimizer):
    options = ["--model", model, "--optimizer", optimizer, "--epochs", "3"]
    speed = ["--batch-size", "64", "--devices", "2", "--output", tmp_path]
    status, _, err = main(*options, *speed)
    assert status == 0, err
    losses = [line["train/loss"] for line in read_lines(tmp_path) if "train/loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def numbers(output):
    """What a run measured but times, by line."""
    return [
        [value for name, value in line.items() if re.search("loss|accuracy", name)]
        for line in read_lines(output)
    ]


SPLIT = ["--mesh", "data=2,fsdp=2", "--rule", "fsdp"]


def test_a_split_run_gives_the_same_numbers(main, small, tmp_path):
    options = ["--model", "mlp", "--epochs", "1", "--batch-size", "64"]
    one = tmp_path / "one"
    assert main(*options, "--devices", "1", "--output", one)[0] == 0
    for split, mesh in ((SPLIT, "data=2, fsdp=2"), (["--rule", "tensor"], "tensor=4")):
        four = tmp_path / mesh
        status, out, _ = main(*options, "--devices", "4", *split, "--output", four)
        assert status == 0
        assert f" | MLP on 4 x cpu ({mesh})" in out
        for ours, theirs in zip(numbers(four), numbers(one), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_a_split_run_gives_the_same_numbers_in_a_process(tmp_path):
    options = ["--data", "synthetic", "--model", "mlp", "--epochs", "1"]
    one, four = tmp_path / "one", tmp_path / "four"
    assert run(*options, "--devices", "1", "--output", one)[0] == 0
    assert run(*options, "--devices", "4", *SPLIT, "--output", four)[0] == 0
    assert numbers(four)[0] == pytest.approx(numbers(one)[0], rel=1e-5)
    assert numbers(four)[-1] == pytest.approx(numbers(one)[-1], rel=2e-2)


@pytest.mark.parametrize(
    "cores, options, count",
    [
        (1, "", 1),
        (8, "", 8),
        (6, "", 4),  # 256 does not divide by 5 or 6
        (6, "--batch-size 255", 5),
        (6, "--rule fsdp", 4),
        (6, "--rule tensor", 4),
        (7, "--mesh fsdp=2 --batch-size 60", 6),
        (2, "--mesh data=2,fsdp=2", 4),
        (1, "--mesh fsdp=4", 4),
        (8, "--devices 2", 2),
    ],
)
def test_cpu_devices_are_as_many_as_cores_where_the_batch_divides(
    recipe, monkeypatch, cores, options, count
):
    devices = jax.devices()
    simulated = {}
    monkeypatch.setattr(jax.config, "update", simulated.__setitem__)
    monkeypatch.setattr(jax, "devices", lambda: devices[: simulated["jax_num_cpu_devices"]])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    args = recipe.tyro.cli(recipe.Args, args=options.split())
    mesh = recipe.make_mesh(args)
    assert simulated == {"jax_num_cpu_devices": count}
    assert mesh.size == count


def test_cpu_devices_that_the_environment_asks_for_are_used(recipe, monkeypatch):
    changed = {}
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    mesh = recipe.make_mesh(recipe.tyro.cli(recipe.Args, args=[]))
    assert changed == {} and mesh.size == 8


def test_help_names_every_flag(main, recipe):
    status, out, err = main("--help")
    assert (status, err) == (0, "")
    flags = {f"--{name.replace('_', '-')}" for name in recipe.Args.__annotations__}
    assert len(flags) == 14
    assert set(re.findall(r"(?m)^[│ ] (--[a-z-]+)", out)) == flags


# Going on


RESUMABLE = ["--model", "mlp", "--batch-size", "64", "--devices", "2", "--save-every", "7"]
STEPS = 32  # of two epochs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What a run of two epochs wrote that was never stopped."""
    output = tmp_path_factory.mktemp("finished")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        draw_few(monkeypatch)
        options = [*RESUMABLE, "--epochs", 2, "--output", output]
        assert call(load(monkeypatch), monkeypatch, *options) == 0
    return output


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def files(folder):
    """The contents of all files, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def measured(output):
    """What was logged, but for the times that it took."""
    return [
        {k: v for k, v in line.items() if not re.search("seconds|per_second", k)}
        for line in read_lines(output)
    ]


def saved_steps(output):
    return eqxshard.Checkpointer(output / "checkpoints").steps()


def assert_ended_as(output, whole, recipe):
    """The same numbers, each step's once, and the same weights, bit for bit."""
    steps = [line["step"] for line in measured(output)]
    assert steps == sorted(set(steps))
    assert measured(output) == measured(whole)
    make_model, *_ = recipe.MODELS["mlp"]
    like = eqx.filter_eval_shape(make_model, jax.random.key(0))
    ours, theirs = (
        eqxshard.Checkpointer(folder / "checkpoints") for folder in (output, whole)
    )
    assert ours.steps()[-1] == theirs.steps()[-1]
    assert_equal(ours.restore_model(like), theirs.restore_model(like))
    assert (output / "summary.json").exists()
    assert (output / "curves.png").read_bytes().startswith(PNG)


class Killed(BaseException):
    """As sudden as SIGKILL, to a test in this process."""


def test_a_run_that_died_goes_on_as_if_it_had_not(
    main, recipe, small, finished, monkeypatch, tmp_path
):
    class Dies(eqxshard.trackers.ProgressBar):
        def log(self, step, values):
            if step == 28:
                raise Killed

    options = [*RESUMABLE, "--epochs", "2", "--output", tmp_path]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(recipe.trackers, "ProgressBar", Dies)
        main(*options)
    # Logged, and not saved.
    assert read_lines(tmp_path)[-1]["step"] == 28 and saved_steps(tmp_path)[-1] == 21
    status, out, err = main(*options, "--resume")
    assert status == 0, err
    assert "going on from step 21." in out.splitlines()
    assert_ended_as(tmp_path, finished, recipe)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not(recipe, tmp_path):
    options = ["--data", "synthetic", "--model", "mlp", "--epochs", "1", "--devices", "2"]
    options += ["--save-every", "20"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(*options, "--output", whole)[0] == 0
    process = start(*options, "--output", killed)
    while process.poll() is None and len(saved_steps(killed)) < 3:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    at = saved_steps(killed)[-1]
    assert 60 <= at < 235
    status, out, err = run(*options, "--output", killed, "--resume")
    assert status == 0, err
    assert f"going on from step {at}." in out.splitlines()
    assert_ended_as(killed, whole, recipe)


def test_a_finished_run_is_left_as_it_is(main, recipe, small, copy, finished):
    checkpoints = files(copy / "checkpoints")
    status, out, err = main(*RESUMABLE, "--epochs", "2", "--output", copy, "--resume")
    assert status == 0, err
    first, *_, last = out.splitlines()
    assert (
        first == f"training was finished already, at step {STEPS}; nothing is left to do."
    )
    assert LAST_LINE.fullmatch(last), last
    assert files(copy / "checkpoints") == checkpoints
    assert_ended_as(copy, finished, recipe)
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (copy, finished))
    settings = ours.pop("settings") | {"output": "", "resume": ""}
    assert settings == theirs.pop("settings") | {"output": "", "resume": ""}
    assert ours == theirs


def test_a_damaged_checkpoint_is_passed_over(main, recipe, small, copy, finished, caplog):
    damaged = copy / "checkpoints" / str(STEPS)
    (damaged / "description.json").write_text("{")
    options = [*RESUMABLE, "--epochs", "2", "--output", copy, "--resume"]
    status, out, err = main(*options)
    assert status == 0, err
    assert f"the checkpoint of step {STEPS} in" in caplog.text
    assert "going on from step 28." in out.splitlines()
    assert_ended_as(copy, finished, recipe)


def test_resume_auto_starts_anew_where_nothing_is(main, recipe, small, finished, tmp_path):
    output = tmp_path / "new"
    options = [*RESUMABLE, "--epochs", "2", "--output", output, "--resume", "auto"]
    status, out, err = main(*options)
    assert status == 0, err
    assert "going on" not in out
    assert_ended_as(output, finished, recipe)


def test_resuming_after_steps_that_were_not_finite(main, small, copy):
    """The log has a null for what was not finite."""
    lines = read_lines(copy)
    lines[0]["train/loss"] = None
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (copy / "metrics.jsonl").write_text(text)
    options = [*RESUMABLE, "--epochs", "2", "--output", copy, "--resume", "auto"]
    status, _, err = main(*options)
    assert status == 0, err
    assert read_lines(copy) == lines


def test_going_on_where_no_run_is_is_refused(main, small, tmp_path):
    output = tmp_path / "none"
    for resume in (["--resume"], ["--resume", "yes"], ["--resume=yes"]):
        result = main(*RESUMABLE, "--output", output, *resume)
        assert_refused(result, f"there is no run in {output} to go on with; leave --resume")
        assert not output.exists()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("", "has the checkpoint of step 32 of an earlier run; add --resume to go on"),
        ("--resume --batch-size 32", "batch_size was 64 and is 32"),
        ("--resume --seed 1", "seed was 0 and is 1"),
        ("--resume --model cnn", "model.conv1.weight float32[32, 1, 3, 3] is not in it"),
        ("--resume --optimizer sgd", "opt_state.0.mu.hidden1.bias float32[256] is only in"),
        ("--resume --save-every 0", "--save-every 0 is too few"),
    ],
)
def test_another_run_among_the_checkpoints_is_refused(main, small, copy, options, sentence):
    before = files(copy)
    given = [*RESUMABLE, "--epochs", "2", "--output", copy]
    assert_refused(main(*given, *options.split()), sentence)
    assert files(copy) == before


def test_a_run_that_is_lost_says_where_to_look(main, small, tmp_path):
    options = ["--learning-rate", "1e30", "--output", tmp_path, "--save-every", "99"]
    result = main(*RESUMABLE, "--epochs", "2", *options)
    box = tmp_path / "checkpoints" / "black_box"
    assert (box / "checksums.txt").exists()
    assert result[0] == 2 and "Traceback" not in result[2]
    last = result[2].splitlines()[-1]
    assert last.startswith("error: the loss or a gradient of ")
    assert last.endswith(f"; look for the cause with `python -m eqxshard.replay {box}`.")


# Several processes


def launch(output, *options, restarts=0, script=SCRIPT):
    """Start the recipe in two processes with a device each."""
    how = ["--processes=2", "--devices-per-process=1", f"--restarts={restarts}"]
    # JAX warns of proxies, in every process.
    settings = {k: v for k, v in environment().items() if "proxy" not in k.lower()}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "eqxshard.launch", *how, str(script), "--output"),
            *(str(output), "--model", "mlp", "--save-every", "20", *options),
        ],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def workers_of(process):
    children = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True)
    return sorted(int(child) for child in children.split())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run of two processes, and what they printed."""
    output = tmp_path_factory.mktemp("two") / "run"
    process = launch(output, "--data=synthetic", "--epochs=1")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return output, out


@pytest.mark.slow
def test_two_processes_are_one_run(two, tmp_path):
    output, out = two
    options = ["--data", "synthetic", "--model", "mlp", "--epochs", 1, "--save-every", 20]
    one = tmp_path / "one"
    assert run(*options, "--devices", 2, "--output", one)[0] == 0
    ours, theirs = measured(output), measured(one)
    for line, expected in zip(ours, theirs, strict=True):
        assert line.pop("data") == expected.pop("data") == "synthetic"
        assert line == pytest.approx(expected, rel=2e-5)
    assert ours[-1]["eval/accuracy"] == theirs[-1]["eval/accuracy"]
    ours, theirs = ({p.name for p in f.iterdir()} for f in (output, one))
    assert ours == theirs
    assert saved_steps(output) == saved_steps(one)
    # The first process alone prints, and what one process prints.
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith("[0] ")] == []
    assert sum("SYNTHETIC DATA" in line for line in lines) == 1
    assert LAST_LINE.fullmatch(lines[-1].removeprefix("[0] ")), lines[-1]


@pytest.mark.slow
def test_a_run_goes_on_when_one_of_its_processes_is_killed(recipe, two, tmp_path):
    output = tmp_path / "killed"
    options = ["--data=synthetic", "--epochs=1", "--resume=auto"]
    process = launch(output, *options, restarts=1)
    while process.poll() is None and len(saved_steps(output)) < 3:
        time.sleep(0.01)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "process 1 of 2 was killed by SIGKILL" in out
    assert re.search(r"(?m)^\[0\] going on from step (60|80|1\d0|2\d0)\.$", out), out
    assert_ended_as(output, two[0], recipe)


@pytest.mark.slow
def test_a_mistake_is_one_line_from_each_process(earlier):
    process = launch(earlier, "--devices=1")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    says = "error: --devices 1 is not all of the 2 devices of 2 processes; leave it out,"
    printed = [line for line in out.splitlines() if line.startswith("[")]
    assert len(printed) == 2
    assert {line[: 4 + len(says)] for line in printed} == {f"[0] {says}", f"[1] {says}"}


ONE_HAS_DATA = f"""
import os, runpy
from eqxshard import data
if os.environ["EQXSHARD_PROCESS"] == "0":
    data.fashion_mnist = lambda split, data_dir: data.synthetic_fashion(split)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_hosts_that_have_other_data_do_not_start(earlier, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_HAS_DATA)
    process = launch(earlier, "--data=auto", script=script)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    says = (
        '"fashion_mnist" in process 0; "synthetic" in process 1. Start all of them alike.'
    )
    for number in range(2):
        assert (
            f"[{number}] error: the processes of this run differ in data name: {says}"
            in out
        )


# Ctrl-C


def interrupt(process):
    """Press Ctrl-C until it ends; return (status, stdout, stderr).

    Python loses an interrupt that comes in a destructor, and says so on stderr: then
    users press again.
    """
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            continue
        return (
            process.returncode,
            out,
            re.sub(r"(?s)Exception ignored .*?Interrupt: ?\n", "", err),
        )
    process.kill()
    raise AssertionError(f"Ctrl-C does not end it: {process.communicate()[1]}")


def assert_stopped(result):
    status, out, err = result
    assert (status, out) == (130, ""), err
    says = "stopped; what was logged and saved until now is kept: --resume goes on."
    assert err.splitlines()[-1] == says
    assert "Traceback" not in err


LONG = ["--data", "synthetic", "--model", "mlp", "--epochs", "1000"]


def test_stopped_in_training_what_was_logged_is_kept(tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "summary.json").write_text('{"of": "an earlier run"}')
    log = output / "metrics.jsonl"
    process = start(*LONG, "--output", output)
    while process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.05)
    assert_stopped(interrupt(process))
    lines = read_lines(output)
    assert lines[0]["step"] == 50
    assert all(line["data"] == "synthetic" for line in lines)
    assert (output / "curves.png").read_bytes().startswith(PNG)
    # Nothing that is of another run than the lines.
    names = {path.name for path in output.iterdir()}
    assert names == {"metrics.jsonl", "curves.png", "checkpoints"}
    # It stopped after a step, of which everything is kept.
    (step,) = eqxshard.Checkpointer(output / "checkpoints").steps()
    assert lines[-1]["step"] == step


def test_stopped_before_the_first_step(tmp_path):
    """JAX compiles then, which it cannot always be stopped in cleanly."""
    output = tmp_path / "output"
    process = start(*LONG, "--output", output)
    assert process.stderr is not None
    while (line := process.stderr.readline()) and not line.startswith("MLP on "):
        pass
    time.sleep(0.5)
    assert_stopped(interrupt(process))
    assert not (output / "summary.json").exists()


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    compiled = tmp_path / "compiled"
    options = ["--model", "mlp", "--epochs", 1, "--data", "synthetic"]
    settings = {"JAX_COMPILATION_CACHE_DIR": str(compiled)}

    def entries(number):
        status, _, err = run(*options, "--output", tmp_path / number, **settings)
        assert status == 0, err
        return {entry.name for entry in compiled.glob("*-cache")}

    first = entries("first")
    assert any(name.startswith("jit_train_step-") for name in first)
    assert entries("second") == first
