"""SIGTERM and SIGINT: the state is saved, and the run ends as the signal would end it."""

import os
import re
import signal
import sys

import pytest
from loop_helpers import Recorder, make_loader, run
from process_helpers import read_until, started

import eqxshard

SCRIPT = """
import sys, time
import equinox as eqx, jax, numpy as np, optax
import eqxshard
jax.config.update("jax_num_cpu_devices", 2)
mesh = eqxshard.make_mesh()
where = {"mesh": mesh, "rule": eqxshard.replicate()}
source = eqxshard.data.ArraySource({"x": np.ones((64, 4), np.float32)})
def slowly(batch):
    time.sleep(0.02)
    return batch
loader = eqxshard.Loader(source, batch_size=8, mesh=mesh, transform=slowly)
optim = optax.adam(1e-3)
make_model = lambda key: eqx.nn.MLP(4, 1, 8, 1, key=key)
state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
step = eqxshard.make_train_step(
    lambda model, batch, key: (jax.vmap(model)(batch["x"])[:, 0] - 1) ** 2, optim, **where
)
class Prints:
    def log(self, step, values): print("step", step, flush=True)
    def close(self, error=None): print("closed", flush=True)
checkpointer = eqxshard.Checkpointer(sys.argv[1])
eqxshard.fit(state, step, loader, steps=100_000, log_every=1, checkpointer=checkpointer,
             trackers=[Prints()])
"""


@pytest.fixture
def running(tmp_path):
    """A run that has taken some steps."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with started([sys.executable, script, tmp_path / "run"]) as process:
        read_until(process, process.stdout, "step 5\n")
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(running, tmp_path, number):
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    (step,) = eqxshard.Checkpointer(tmp_path / "run").steps()
    assert out.splitlines()[-2:] == [f"step {step}", "closed"]
    assert "stopping after this step, to save a checkpoint; a second signal" in err
    assert f"stopped after step {step}; the checkpoint of step {step} is saved." in err
    assert err.count("is saved") == 1
    assert re.search(r"^goodput \d+ % of \d+\.\d s \| ", err, re.MULTILINE), err
    if number == signal.SIGTERM:
        assert running.returncode == 128 + signal.SIGTERM
        assert "Traceback" not in err
    else:
        assert running.returncode in (-signal.SIGINT, 130)


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(running):
    running.send_signal(signal.SIGTERM)
    read_until(running, running.stderr, "stopping after")
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def handlers():
    """The handlers of this process, restored afterwards."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_in_the_last_evaluation_ends_the_run(tmp_path, handlers, capfd, number):
    """Once its result is reported and the state is saved."""
    recorder = Recorder()

    def evaluate(model):
        os.kill(os.getpid(), number)
        return {"score": 1.0}

    ends = {signal.SIGTERM: SystemExit, signal.SIGINT: KeyboardInterrupt}[number]
    with pytest.raises(ends):
        run(tmp_path, make_loader(), epochs=1, evaluate=evaluate, trackers=[recorder])
    assert recorder.lines[-1][1]["eval/score"] == 1
    assert eqxshard.Checkpointer(tmp_path).steps()[-1] == 6
    said = "stopped after step 6; the checkpoint of step 6 is saved."
    assert said in capfd.readouterr().err
    assert {each: signal.getsignal(each) for each in NUMBERS} == handlers


def test_signals_that_are_ignored_stay_ignored(tmp_path, handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    class Interrupts:
        def log(self, step, values):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)

        def close(self, error=None):
            pass

    state = run(tmp_path, make_loader(), steps=3, log_every=1, trackers=[Interrupts()])
    assert int(state.step) == 3


def test_without_a_checkpointer_signals_are_not_handled(handlers):
    seen = []

    class Looks:
        def log(self, step, values):
            seen.append({number: signal.getsignal(number) for number in NUMBERS})

        def close(self, error=None):
            pass

    run(None, make_loader(), steps=1, trackers=[Looks()])
    assert seen == [handlers]
