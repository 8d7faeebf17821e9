"""`train`: everything a training script does around `fit`."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
from ..loop._callbacks import Callback, check_callbacks
from ..loop._fit import fit
from ..loop._loop import Loop
from ..loop._position import Position
from ..loop._ready_callbacks import Profile
from ..loop._tracker import Tracker, check_trackers
from ..sharding._leaf_rules import replicate
from ..sharding._mesh import describe_mesh
from ..sharding._rule import Rule
from ..sharding._text import comma_list, say
from ..training._advice import short_traceback
from ..training._precision import Precision
from ..training._state import states_of, unused_axes
from ..training._train_step import TrainStep
from ..training._update import Nonfinite
from ._config import MakeOptim, RunConfig, last_step, parse_profile
from ._evaluation import Evaluation, check_metrics
from ._exit import filtering_tracebacks
from ._facts import describe_devices, versions
from ._parts import MakeModel, Step, Training, TrainingData
from ._paths import default_folder, script_name
from ._record import RunRecord
from ._result import RunResult, make_result, read_summary, summarize
from ._run_folder import RunFolder
from ._settings import name_settings
from ._start import Saved, Start, resume, start_anew

#: Steps between checkpoints, and between evaluations, with data that have no epochs.
_WITHOUT_EPOCHS = 1000
#: The facts of a run that its summary repeats.
_OF_SUMMARY = ("title", "data", "parameters", "settings", "versions")


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
        that a schedule can span the run. For several models, one for all or a dict.
    - `train_data`, `eval_data`: as for [`eqxshard.Loader`][]: arrays or a
        `grain.MapDataset` of examples (without `.batch(n)`), of which batches of
        `config.batch_size` are made; or batches with as many rows, such as those of a
        `grain.IterDataset`. The last batch of examples is filled up; batches that a
        dataset makes must all be whole. An evaluation reads `eval_data` to their end.
    - `config`: the user's options, from the script's command line. `overwrite` removes an
        earlier run from the folder once options, data and model are known to fit: its
        checkpoints, and the files that this run writes anew. Other files stay.
    - `name`: the name of the run, in its title and in its default folder,
        `runs/SCRIPT-NAME`; by default, that of the script, in `runs/SCRIPT`.
    - `epochs`, `steps`: how long to train if `config` does not say.
    - `train_step`: a step of your own, as for [`eqxshard.fit`][], in place of the one that
        is made of `loss_fn`. With several models, it gets their states by name.
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
    - `settings`: what to record of the run besides its options, as a dataclass or a dict;
        by default the script's arguments, if [`eqxshard.cli`][] has parsed them. Settings
        in a group are recorded by path, as `encoder.width`, and one that has the name of an
        option of `config` with a prefix, as `settings.seed`.

    **Returns:**

    An [`eqxshard.run.RunResult`][], which prints as a line; a script's main function may
    return it. With several processes, every process gets one.

    **Raises:**

    `ValueError` with one clear sentence for each option that does not fit the devices,
    the data or the run's folder, and if no metric has the name that `best` or
    [`eqxshard.callbacks.EarlyStopping`][] gives; `TypeError` if `make_optim` is neither an
    optimizer nor a function of the number of steps. All of these, and what `metric_fn`
    raises for the shapes of the evaluation data, come before the first step and leave no
    run in the folder. (But with callbacks of your own, which may report metrics of any
    name, a wrong name may come to light only at the first evaluation.) Then as
    [`eqxshard.fit`][] does. `SystemExit` once the plan of `config.plan` is printed.

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
    config = RunConfig() if config is None else config
    config.check()
    check_trackers(trackers)
    check_callbacks(callbacks)
    changes = Changes(rename, missing, unused)
    mode = mode if best is None else best_mode(best, mode)
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
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    if config.plan is not None:
        from ._plan_run import plan_run

        plan_run(config, mesh, data, training, epochs, steps)
        raise SystemExit(0)
    # Before any code of the user's, which may change the working directory.
    folder = RunFolder(config.output or default_folder(name))
    mesh = config.make_mesh(mesh)
    loader = data.make_loader(config, mesh)
    epoch = None if loader.steps is None else len(loader)
    evaluation = Evaluation.of(
        metric_fn, eval_data, config, mesh, precision=precision, lint=lint
    )
    checkpointer = Checkpointer(
        folder.checkpoints,
        save_every=config.save_every or epoch or _WITHOUT_EPOCHS,
        best=best,
        mode=mode,
    )
    find_last = partial(last_step, config, epochs, steps)
    if config.profile is not None:
        profile = _profile(config.profile, folder, find_last(loader.steps))
        callbacks = [*callbacks, profile]
    with (
        filtering_tracebacks("off") if config.traceback else short_traceback(),
        contextlib.closing(checkpointer),
        RunRecord(folder) as record,
    ):
        if folder.should_resume(config.resume, checkpointer, overwrite=config.overwrite):
            saved = Saved(checkpointer, changes, callbacks)
            start = resume(saved, training, loader, find_last, config, mesh)
        else:
            start = start_anew(training, find_last(loader.steps), config, mesh, load)
        step, lowered = start.training.make_step(), None
        if start.goes_on:
            # A mistake in the loss or the metrics leaves no run behind.
            if isinstance(step, TrainStep):
                lowered = step.lower(start.state, loader.shapes())
            check_metrics(evaluation, start.state, lowered, best, callbacks)
        # Before the trackers, which empty the files of an earlier run.
        if config.overwrite:
            checkpointer.start_over()
        checkpointer.claim_run(start.step, Position.of(loader, start.step))
        title = f"{name or script_name() or 'run'} on {describe_mesh(mesh)}"
        reached = None if loader.steps is None else loader.steps.epochs(start.last)
        if reached is not None and reached.is_integer():
            reached = int(reached)
        facts = {
            "title": title,
            "steps": start.last,
            "unit": data.unit,
            "best": best,
            "mode": mode,
            "data": data.name,
            "parameters": _count_parameters(start.state),
            "settings": {**named, "epochs": reached},
            "versions": versions(),
            **describe_devices(mesh),
        }
        # A start that takes no step leaves what is written of the run as it is.
        summary = {} if start.goes_on else read_summary(folder)
        if is_main_process():
            _announce(record, data.warning, facts, start)
            if lowered is not None:
                record.warn(unused_axes(start.state, mesh, training.rule, lambda: lowered))
            if not summary:
                trackers = (*trackers, *_begin(folder, record, facts, start, config))
        kept = _KeepsLoop()
        with _saying_how_to_go_on(checkpointer):
            state = fit(
                start.state,
                step,
                loader,
                steps=start.last,
                evaluate=evaluation,
                evaluate_every=config.evaluate_every
                or ("epoch" if epoch else _WITHOUT_EPOCHS),
                checkpointer=checkpointer,
                trackers=trackers,
                callbacks=[*callbacks, kept],
                log_every=config.log_every,
                hang_seconds=config.hang_seconds,
            )
        record.stopped = kept.stop_reason
        if is_main_process() and not summary:
            summary = _summarize(folder, facts, epoch, mesh) | kept.skipped
            folder.write_summary(summary)
        summary = broadcast_from_first(summary)
    if is_main_process():
        # Whatever reads stdout may be gone.
        with contextlib.suppress(OSError):
            print(f"metrics, checkpoints and a page, index.html, are in {folder.path}")
    # The title of a run that was finished before names the devices that it had.
    return make_result(state, folder.path, summary, facts["title"], data.unit)


def _begin(
    folder: RunFolder,
    record: RunRecord,
    facts: Mapping[str, Any],
    start: Start,
    config: RunConfig,
) -> list[Tracker]:
    """Write the record of a run, and make the trackers that write to its folder."""
    trackers = folder.trackers(
        title=facts["title"],
        total_steps=start.last,
        first=start.step,
        extra={"data": facts["data"]} if facts["data"] else {},
        services=config.track,
        settings=facts["settings"],
    )
    record.begin(facts, start.step)
    return trackers


def _summarize(
    folder: RunFolder, facts: Mapping[str, Any], epoch: int | None, mesh: Mesh
) -> dict[str, Any]:
    """The summary of a run, from its log and from the facts known at its start."""
    from ._recorded_run import RecordedRun

    run = RecordedRun(folder, folder.waiting)
    return {
        **summarize(run, epoch, facts["unit"]),
        **{name: facts[name] for name in _OF_SUMMARY},
        "devices": describe_mesh(mesh),
    }


class _KeepsLoop(Callback):
    """Keeps the loop of a run, to ask it at the end how the run went."""

    every = None
    _loop: Loop | None = None

    def after_save(self, loop: Loop) -> None:
        """Called at the end of every run that takes a step."""
        self._loop = loop

    @property
    def stop_reason(self) -> str:
        """Why a callback has ended the run; empty if none has."""
        return (self._loop and self._loop.stop_reason) or ""

    @property
    def skipped(self) -> dict[str, Any]:
        """The entry of the summary, if steps were skipped."""
        found = None if self._loop is None else self._loop.report.skipped
        if found is None or not found.steps:
            return {}
        entry = {"steps": found.steps, "first": found.first, "found": found.found}
        return {"skipped": entry}


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


def _announce(record: RunRecord, warning: str, facts: dict[str, Any], start: Start) -> None:
    if start.ended is not None:
        return  # `fit` says so.
    if warning:
        record.warn([warning])
    if start.step >= start.last:
        say(f"training already finished at step {start.step}; nothing is left to do.")
    elif start.step:
        changes = record.changes(facts)
        what = f"; changed: {comma_list(changes)}" if changes else ""
        say(f"resuming from step {start.step}{what}.")


@contextlib.contextmanager
def _saying_how_to_go_on(checkpointer: Checkpointer) -> Iterator[None]:
    """Say how to continue a run that somebody stops, if it has a checkpoint."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        # Nothing that fails here may take the place of what stops the run.
        with contextlib.suppress(Exception):
            if is_main_process() and checkpointer.steps():
                say("--resume auto continues it.", sys.stderr)
        raise
