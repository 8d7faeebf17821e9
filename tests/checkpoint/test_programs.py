"""Programs that are kept, and how they are refused."""

import contextlib
import hashlib
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_equal, copied, lenient, make_batch, make_mesh, stack

import eqxshard

OPTIM = lenient(optax.sgd(1e-2, momentum=0.9))
BATCHES = [make_batch(seed=seed) for seed in range(3)]


def make_model(key):
    return eqx.nn.Linear(8, 4, key=key)


def make_state(mesh="data=2"):
    where = {"mesh": make_mesh(mesh), "rule": eqxshard.replicate()}
    return eqxshard.init_state(make_model, OPTIM, key=jax.random.key(0), **where)


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def metric_fn(model, batch):
    return {"x": jnp.mean(jax.vmap(model)(batch["x"]), axis=-1)}


def other_loss(model, batch, key):
    return 2 * loss_fn(model, batch, key)


def make_step(loss_fn=loss_fn):
    return eqxshard.make_train_step(loss_fn, OPTIM, lint="off")


def start(state, batches, *, loss_fn=loss_fn, metric_fn=metric_fn):
    """As after a restart: steps that JAX knows nothing of."""
    step = make_step(loss_fn)
    for batch in batches:
        state, _ = step(state, batch)
    evaluate = eqxshard.make_eval_step(metric_fn, lint="off")
    return state, evaluate(state.model, BATCHES[0]).compute()


@contextlib.contextmanager
def compiled():
    """The steps that JAX compiles meanwhile."""
    steps = []

    def listen(event, duration_secs, **about):
        if "step" in str(about.get("fun_name")) and event.endswith(
            "backend_compile_duration"
        ):
            steps.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield steps
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run of one step, and the state after it."""
    folder = tmp_path_factory.mktemp("kept") / "programs"
    with eqxshard.keep_programs(folder, resume=False):
        state, _ = start(make_state(), BATCHES[:1])
    return folder, state


@pytest.fixture
def run(first, tmp_path):
    """A copy of both."""
    return shutil.copytree(first[0], tmp_path / "moved"), copied(first[1])


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_with_the_programs_it_was_started_with(run):
    folder, state = run
    before = files(folder)
    with compiled() as steps, eqxshard.keep_programs(folder, resume=True):
        resumed, metrics = start(state, BATCHES[1:])
    assert steps == [] and files(folder) == before and state.model.weight.is_deleted()
    uninterrupted, expected = start(make_state(), BATCHES)
    assert_equal(resumed, uninterrupted)
    assert metrics == expected


def listed(folder):
    return json.loads((folder / "0" / "programs.json").read_text())


def entry(folder, name="train_step"):
    """The file of a program."""
    (digest,) = [digest for digest, x in listed(folder).items() if x["name"] == name]
    return folder / "0" / digest


def flip(folder):
    data = bytearray(entry(folder).read_bytes())
    data[len(data) // 2] ^= 1
    entry(folder).write_bytes(data)


def write(text):
    return lambda folder: (folder / "0" / "programs.json").write_text(text)


def say(**facts):
    """Let a program have been compiled with something else."""

    def edit(folder):
        programs = listed(folder)
        for each in programs.values():
            each["made_with"] |= facts
        write(json.dumps(programs))(folder)

    return edit


def pretend(folder):
    """Another program, with the right checksum."""
    entry(folder).write_bytes(b"nonsense")
    programs = listed(folder)
    programs[entry(folder).name]["sha256"] = hashlib.sha256(b"nonsense").hexdigest()
    write(json.dumps(programs))(folder)


FAULTS = {
    "flipped bit": (flip, "is damaged"),
    "no file": (lambda folder: entry(folder).unlink(), "No such file"),
    "nonsense": (pretend, "JAX cannot load"),
    "half a list": (write("{"), "is not JSON"),
    "odd list": (write("[3]"), "cannot be read"),
    "no folder": (lambda folder: shutil.rmtree(folder), "has no programs, as of a run"),
    "JAX": (say(jax="0.0.1"), f"(jax 0.0.1 -> {jax.__version__})"),
    "cuDNN": (say(**{"nvidia-cudnn-cu12": "9.1"}), "(nvidia-cudnn-cu12 9.1 -> none)"),
    "device": (say(device="NVIDIA H200"), "(device NVIDIA H200 -> cpu)"),
    "others": (lambda folder: (folder / "0").chmod(0o777), "other users may write"),
}


def refusal(folder, state, step):
    """What a step says that is refused: nothing is compiled, written or donated."""
    before = files(folder)
    with (
        compiled() as steps,
        eqxshard.keep_programs(folder, resume=True),
        pytest.raises(ValueError) as error,
    ):
        step(state, BATCHES[1])
    assert steps == [] and files(folder) == before
    assert not state.model.weight.is_deleted()
    return str(error.value)


def test_what_cannot_be_used_is_refused(run, tmp_path, monkeypatch):
    folder, state = run
    step = make_step()
    for number, (spoil, message) in enumerate(FAULTS.values()):
        spoilt = shutil.copytree(folder, tmp_path / str(number))
        spoil(spoilt)
        said = refusal(spoilt, state, step)
        assert message in said and "resume without keep_programs" in said
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops --xla_dump_to=here")
    message = "--xla_gpu_deterministic_ops none -> true"
    assert message in refusal(folder, state, step)


def test_another_program_is_refused(run):
    folder, state = run
    assert "the model, loss, optimizer" in refusal(folder, state, make_step(other_loss))
    message = "mesh 2 x cpu (data=2) -> 4 x cpu (data=4)"
    assert message in refusal(folder, make_state("data=4"), make_step())


@pytest.mark.slow
def test_another_evaluation_is_compiled(run, caplog):
    folder, state = run

    def new_metrics(model, batch):
        return {"y": metric_fn(model, batch)["x"]}

    new_metrics.__name__ = "metric_fn"
    with eqxshard.keep_programs(folder, resume=True):
        start(state, BATCHES[1:], metric_fn=new_metrics)
    (said,) = [record.message for record in caplog.records if "again" in record.message]
    assert said.startswith("eval_step of metric_fn is compiled again: the model, loss,")
    assert len(listed(folder)) == 3


@pytest.mark.slow
def test_other_numbers_of_batches_are_added(run):
    folder, state = run
    with eqxshard.keep_programs(folder, resume=True):
        step = make_step()
        state, _ = step.many(state, stack(BATCHES[:2]))
        state, _ = step.many(state, stack(BATCHES))
        state, _ = step.many(state, stack(BATCHES))
    names = [each["name"] for each in listed(folder).values()]
    assert names[2:] == ["train_step.many (length 2)", "train_step.many (length 3)"]


@pytest.mark.slow
def test_batches_of_other_shapes_are_added_once_the_run_goes_on(run):
    folder, state = run
    half = jax.tree.map(lambda x: x[: len(x) // 2], BATCHES[1])
    with eqxshard.keep_programs(folder, resume=True):
        start(state, [BATCHES[1], half])
    assert [x["name"] for x in listed(folder).values()].count("train_step") == 2
    with compiled() as steps, eqxshard.keep_programs(folder, resume=True):
        start(make_state(), [BATCHES[1], half])
    assert steps == []


@pytest.mark.slow
def test_a_run_that_begins_anew_keeps_its_own(run):
    folder, state = run
    old = entry(folder)
    # What is read from JAX's cache is not always whole when it is written again.
    cached = jax.config.values["jax_enable_compilation_cache"]
    with eqxshard.keep_programs(folder, resume=False):
        state, _ = start(state, BATCHES[:1], loss_fn=other_loss)
    assert not old.exists() and jax.config.values["jax_enable_compilation_cache"] == cached
    with compiled() as steps, eqxshard.keep_programs(folder, resume=True):
        start(state, BATCHES, loss_fn=other_loss)
    assert steps == []


@pytest.mark.slow
def test_what_cannot_be_kept_is_refused(tmp_path):
    step, state = make_step(), make_state()
    state, _ = step(state, BATCHES[0])
    keeping = eqxshard.keep_programs(tmp_path / "programs", resume=False)
    with keeping, pytest.raises(ValueError, match="it was compiled before; make the step"):
        step(state, BATCHES[0])


@pytest.mark.slow
def test_a_step_that_calls_back_to_python_is_refused(tmp_path):
    def loud_loss(model, batch, key):
        jax.debug.print("here")
        return loss_fn(model, batch, key)

    keeping = eqxshard.keep_programs(tmp_path / "programs", resume=False)
    with keeping, pytest.raises(ValueError, match=r"such as by jax\.debug\.print, leave"):
        make_step(loud_loss)(make_state(), BATCHES[0])
    assert not (tmp_path / "programs").exists()
