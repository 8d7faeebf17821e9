"""`train`: everything a training script does around `fit`."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._folder import Mode, best_mode
from ..checkpoint._match import Changes, Missing, Unused
from ..compiled._findings import Lint
from ..data._batches import Transform
from ..data._loader import Remainder
from ..data._order import Sampler
from ..data._sources import Source
from ..distributed import broadcast_from_first, is_main_process
from ..loop._batches import Position
from ..loop._callbacks import Callback, check_callbacks, why_ended
from ..loop._clock import announced
from ..loop._fit import fit
from ..loop._loop import Loop
from ..loop._ready_callbacks import Profile
from ..pages._format import format_number
from ..sharding._leaf_rules import replicate
from ..sharding._mesh import describe_mesh
from ..sharding._rule import Rule
from ..sharding._text import comma_list, say
from ..trackers._jsonl import or_nan
from ..trackers._tracker import Tracker, check_trackers
from ..training._advice import short_traceback
from ..training._eval_step import make_eval_step
from ..training._init import init_state
from ..training._precision import Precision
from ..training._state import states_of, step_of, unused_axes
from ..training._train_step import TrainStep
from ..training._update import Nonfinite
from ._config import MakeOptim, RunConfig, last_step, parse_profile
from ._parts import (
    Evaluation,
    MakeModel,
    Step,
    Training,
    TrainingData,
    check_metrics,
    make_evaluation_loader,
)
from ._plan_run import plan_run
from ._read_run import RecordedRun, describe_evaluations, summarize
from ._record import RunRecord, describe_devices, name_settings, versions
from ._resume import restore_position, restore_state
from ._run_folder import RunFolder, default_folder, script_name

#: Steps between checkpoints, and between evaluations, with data that have no epochs.
_WITHOUT_EPOCHS = 1000


@dataclass(frozen=True)
class RunResult:
    """What [`eqxshard.train`][] returns.

    - `state`: the [`eqxshard.TrainState`][] at the end; of several models, a dict of them.
    - `metrics`: the last evaluation, by metric.
    - `speed`: time per epoch and throughput: `14.7 s/epoch | 4,072 images/s`, by the
      median step. Only a run of one report includes its compiling.
    - `title`: its name, devices and mesh: `LeNet on 2 x cpu (data=2)`.
    - `folder`: the folder of its files.
    - `summary`: the contents of its `summary.json`.
    """

    # What a notebook shows of it is without these two, which are long.
    state: Any = field(repr=False)
    metrics: dict[str, float]
    speed: str
    title: str
    folder: Path
    summary: dict[str, Any] = field(repr=False)


def train(
    make_model: MakeModel | Mapping[str, MakeModel],
    loss_fn: Callable[[Any, Any, Any], Any] | None,
    metric_fn: Callable[[Any, Any], Mapping[str, Any]] | None,
    make_optim: MakeOptim | Mapping[str, MakeOptim],
    train_data: Source | Mapping[str, Any] | Iterable[Any],
    eval_data: Source | Mapping[str, Any] | Iterable[Any] | None,
    *,
    config: RunConfig | None = None,
    name: str | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    train_step: Step | None = None,
    mesh: str | Mapping[str, int] | Mesh = "data=-1",
    rule: Rule | None = None,
    trainable: PyTree = True,
    accumulate: int = 1,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    lint: Lint = "warn",
    compiler_options: Mapping[str, Any] | None = None,
    remainder: Remainder = "pad",
    best: str | None = None,
    mode: Mode | None = None,
    load: Callable[[Any], PyTree] | None = None,
    rename: Mapping[str, str | None] = {},
    missing: Missing = "error",
    unused: Unused = "error",
    sampler: Sampler | None = None,
    transform: Transform | None = None,
    read_options: Any = None,
    workers: int = 0,
    trackers: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
    settings: Any = None,
) -> RunResult:
    """Train and evaluate a model as a script does: devices, folder, resuming, summary.

    Makes the mesh, the state (or reads it from the newest checkpoint), the loaders and
    the steps, calls [`eqxshard.fit`][] with a progress bar, and writes to the run's
    folder: checkpoints, `metrics.jsonl`, `curves.png` (with Matplotlib), `tensorboard`
    (with TensorBoard), `summary.json` and a page to look at, `index.html`. Everything it
    does can be written by hand with the public names of this library.

    With `config.plan` it does none of this: it prints the [`eqxshard.plan`][] of the step,
    and ends the process with exit status 0.

    **Arguments:**

    - `make_model`: as for [`eqxshard.init_state`][]; or several by name, such as the
        `{"generator": ..., "discriminator": ...}` of a GAN, for a step of your own.
    - `loss_fn`: as for [`eqxshard.make_train_step`][]; `None` with a step of your own.
    - `metric_fn`: as for [`eqxshard.make_eval_step`][]; `None` to evaluate nothing.
    - `make_optim`: an optax optimizer; or a function from the number of steps to one, so
        that a schedule can span the run. Of several models, one for all or a dict.
    - `train_data`, `eval_data`: as for [`eqxshard.Loader`][]: arrays or a
        `grain.MapDataset` of examples (without `.batch(n)`), of which batches of
        `config.batch_size` are made; or batches of as many rows, such as of a
        `grain.IterDataset`. The last batch of examples is filled up; batches that a
        dataset makes must all be whole. An evaluation reads `eval_data` to their end.
    - `config`: the user's options, of the script's command line. `overwrite` removes an
        earlier run from the folder once options, data and model are known to fit: its
        checkpoints, and the files that this run writes anew. Other files stay.
    - `name`: the name of the run, in its title and in its default folder,
        `runs/SCRIPT-NAME`; by default, that of the script, in `runs/SCRIPT`.
    - `epochs`, `steps`: how long to train if `config` does not say.
    - `train_step`: a step of your own, as for [`eqxshard.fit`][], in place of the one that
        is made of `loss_fn`. Of several models, it gets their states by name.
    - `mesh`: the default mesh as text, for [`eqxshard.run.mesh_from_text`][], or its axes,
        such as `{"data": -1, "fsdp": 4}`; or a mesh, which the options cannot change.
    - `rule`: as for [`eqxshard.init_state`][]; [`eqxshard.replicate`][] by default.
    - `trainable`, `precision`, `load`: as for [`eqxshard.init_state`][]. A run that resumes
        reads its checkpoint instead of calling `load`.
    - `rename`, `missing`, `unused`: as for [`eqxshard.Checkpointer.restore`][], for a run
        that resumes with another model or optimizer. (Arrays that are missing are made as
        by `init_state`.)
    - `accumulate`, `nonfinite`, `grad_norms`, `lint`, `compiler_options`: as for
        [`eqxshard.make_train_step`][]; `lint` is for evaluations, too.
    - `remainder`: as for [`eqxshard.Loader`][], of the training data. Evaluations always
        measure every example.
    - `best`, `mode`: as for [`eqxshard.Checkpointer`][].
    - `sampler`, `transform`, `read_options`, `workers`: as for [`eqxshard.Loader`][], of
        the training data.
    - `trackers`: more trackers, besides the folder's.
    - `callbacks`: as for [`eqxshard.fit`][].
    - `settings`: more settings to record in `summary.json`: the script's arguments, as a
        dataclass or a dict. Those of a group in it have their path, `encoder.width`; one
        that is called as an option of `config` is there as `settings.seed`, say.

    **Returns:**

    An [`eqxshard.run.RunResult`][]. With several processes, every process gets one.

    **Raises:**

    `ValueError` with one clear sentence for each option that does not fit the devices,
    the data or the run's folder, and for a name that no metric has (`best`, of
    [`eqxshard.callbacks.EarlyStopping`][]); `TypeError` if `make_optim` is no optimizer
    and no function of the number of steps. All of
    these, and what `metric_fn` raises for the shapes of the evaluation data, come before
    the first step and leave no run in the folder. Then as [`eqxshard.fit`][] does.

    !!! Example

        ```python
        run = eqxshard.train(
            make_model,
            loss_fn,
            metric_fn,
            lambda steps: optax.adamw(optax.cosine_decay_schedule(1e-3, steps)),
            train_data,
            eval_data,
            name="mlp",
            epochs=10,
        )
        print(run.metrics["accuracy"], run.speed)
        ```
    """
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    config = RunConfig() if config is None else config
    config.check()
    if best is not None:
        mode = best_mode(best, mode)
    check_trackers(trackers)
    check_callbacks(callbacks)
    changes = Changes(rename, missing, unused)
    named = name_settings(settings, config)
    data = TrainingData(train_data, sampler, transform, remainder, read_options, workers)
    training = Training(
        make_model=make_model,
        make_optim=make_optim,
        loss_fn=loss_fn,
        train_step=train_step,
        rule=replicate() if rule is None else rule,
        trainable=trainable,
        precision=precision,
        accumulate=accumulate,
        nonfinite=nonfinite,
        grad_norms=grad_norms,
        lint=lint,
        compiler_options=compiler_options,
    )
    if config.plan is not None:
        plan_run(config, mesh, data, training, epochs, steps)
        raise SystemExit(0)
    # Before any code of the user's, which may change the working directory.
    folder = RunFolder(config.output or default_folder(name))
    mesh = config.make_mesh(mesh)
    loader = data.make_loader(config, mesh)
    last = last_step(config, epochs, steps, loader.steps)
    timed = training.for_steps(last)
    step = timed.make_step()
    evaluation = None
    if metric_fn is not None and eval_data is not None:
        evaluation = Evaluation(
            make_eval_step(metric_fn, precision=precision, lint=lint),
            make_evaluation_loader(eval_data, config, mesh),
        )
    if config.profile is not None:
        callbacks = [*callbacks, _profile(config.profile, folder, last)]
    epoch = None if loader.steps is None else len(loader)
    checkpointer = Checkpointer(
        folder.checkpoints,
        save_every=config.save_every or epoch or _WITHOUT_EPOCHS,
        best=best,
        mode=mode,
    )
    resumes = folder.should_resume(config.resume, checkpointer, overwrite=config.overwrite)
    key = jax.random.key(config.seed)
    with (
        short_traceback(),
        contextlib.closing(checkpointer),
        RunRecord(folder) as record,
    ):
        with announced("reading the checkpoint" if resumes else "making the state"):
            if resumes:
                state = restore_state(checkpointer, timed, changes, key, mesh)
            else:
                state = timed.make_states(partial(init_state, load=load), key, mesh)
        first, lowered = step_of(state), None
        if resumes and (position := checkpointer.description(first)["loader"]):
            restore_position(loader, position, config)
            # Epochs that began with another batch size have other numbers of steps.
            last = last_step(config, epochs, steps, loader.steps)
            timed = training.for_steps(last)
            step = timed.make_step()
        ended = None
        if resumes:
            ended = why_ended(callbacks, checkpointer.description(first)["callbacks"])
        goes_on = first < last and ended is None
        if isinstance(step, TrainStep) and goes_on:
            # A mistake in the loss function leaves no run behind.
            lowered = step.lower(state, loader.shapes())
        if goes_on:
            check_metrics(evaluation, state, lowered, best, callbacks)
        # Before the trackers, which empty the files of an earlier run.
        if config.overwrite:
            checkpointer.start_over()
        checkpointer.claim_run(first, Position.of(loader, first))
        title = f"{name or script_name() or 'run'} on {describe_mesh(mesh)}"
        facts = {
            "title": f"{title} | {data.name} data" if data.warning else title,
            "steps": last,
            "unit": data.unit,
            "best": best,
            "mode": mode,
            "data": data.name,
            "parameters": _count_parameters(state),
            "settings": {
                **named,
                "epochs": None if loader.steps is None else loader.steps.epochs(last),
            },
            "versions": versions(),
            **describe_devices(mesh),
        }
        # A start that takes no step leaves what is written of the run as it is.
        summary = {} if goes_on else folder.read_summary()
        if is_main_process():
            # If a callback has ended the run, fit says so.
            if ended is None:
                _announce(record, data.warning, facts, first)
            if lowered is not None:
                record.warn(unused_axes(state, mesh, training.rule, lambda: lowered))
            if not summary:
                own = folder.trackers(
                    title=facts["title"],
                    total_steps=last,
                    first=first,
                    extra={"data": data.name} if data.name else {},
                    services=config.track,
                    settings=facts["settings"],
                )
                trackers = (*trackers, *own)
                record.begin(facts, first)
        kept = _KeepsLoop()
        with _saying_how_to_go_on(checkpointer):
            state = fit(
                state,
                step,
                loader,
                steps=last,
                evaluate=evaluation,
                evaluate_every=config.evaluate_every
                or ("epoch" if epoch else _WITHOUT_EPOCHS),
                checkpointer=checkpointer,
                trackers=trackers,
                callbacks=[*callbacks, kept],
                log_every=config.log_every,
                hang_seconds=config.hang_seconds,
            )
        if kept.loop is not None:
            record.stopped = kept.loop.stop_reason or ""
        if is_main_process() and not summary:
            of_run = ("title", "data", "parameters", "settings", "versions")
            summary = {
                **summarize(RecordedRun(folder), epoch, data.unit),
                **{name: facts[name] for name in of_run},
                "devices": describe_mesh(mesh),
                **kept.skipped(),
            }
            folder.write_summary(summary)
        summary = broadcast_from_first(summary)
    if is_main_process():
        # What reads it may be gone.
        with contextlib.suppress(OSError):
            if evaluated := describe_evaluations(RecordedRun(folder)):
                say(evaluated)
            print(f"metrics, checkpoints and a page, index.html, are in {folder.path}")
    # Of a run that was finished already, it is that of the devices that it ran on.
    title = summary.get("title", facts["title"])
    return _result(state, summary, title, folder, data.unit)


class _KeepsLoop(Callback):
    """Keeps the loop of a run, which knows at the end which steps were skipped."""

    every = None
    loop: Loop | None = None

    def after_save(self, loop: Loop) -> None:
        """Called at the end of every run that takes a step."""
        self.loop = loop

    def skipped(self) -> dict[str, Any]:
        """The entry of the summary, if steps were skipped."""
        found = None if self.loop is None else self.loop.report.skipped
        if found is None or not found.steps:
            return {}
        entry = {"steps": found.steps, "first": found.first, "found": found.found}
        return {"skipped": entry}


def _result(
    state: Any, summary: dict[str, Any], title: str, folder: RunFolder, unit: str
) -> RunResult:
    pace = or_nan(summary.get("seconds_per_epoch"))
    speed = or_nan(summary.get(f"{unit}_per_second"))
    evaluated = [name for name in summary if name.startswith("test_")]
    return RunResult(
        state=state,
        metrics={
            name.removeprefix("test_"): or_nan(summary[name])
            for name in evaluated
            if not name.endswith("_by_epoch")
        },
        speed=f"{format_number(pace)} s/epoch | {format_number(speed)} {unit}/s",
        title=title,
        folder=folder.path,
        summary=summary,
    )


def _profile(steps: str, folder: RunFolder, last: int) -> Profile:
    """The profile that `--profile` asks for."""
    first, end = parse_profile(steps)
    if first > last:
        raise UsageError(
            f"--profile {steps} begins after the last step, {last}; use steps of this run."
        )
    return Profile(first, end, folder.path / "profile")


def _count_parameters(states: Any) -> int:
    models = [state.model for state in states_of(states)]
    return sum(map(jnp.size, jax.tree.leaves(eqx.filter(models, eqx.is_array))))


def _announce(record: RunRecord, warning: str, facts: dict[str, Any], first: int) -> None:
    if warning:
        record.warn([f"SYNTHETIC DATA: {warning}"])
    if first >= facts["steps"]:
        say(f"training already finished at step {first}; nothing is left to do.")
    elif first:
        changes = record.changes(facts)
        what = f"; changed: {comma_list(changes)}" if changes else ""
        say(f"resuming from step {first}{what}.")


@contextlib.contextmanager
def _saying_how_to_go_on(checkpointer: Checkpointer) -> Iterator[None]:
    """Say how to continue a run that somebody stops, if something of it is saved."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        # Nothing that fails here may take the place of what stops the run.
        with contextlib.suppress(Exception):
            if is_main_process() and checkpointer.steps():
                say("--resume auto continues it.", sys.stderr)
        raise
