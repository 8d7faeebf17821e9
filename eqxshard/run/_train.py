"""`train`: everything a training script does around `fit`."""

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..compiled._findings import Lint
from ..data._host import Transform
from ..data._loader import Loader, Remainder
from ..data._samplers import Sampler
from ..data._sources import Source
from ..distributed import (
    assert_same_on_all_processes,
    broadcast_from_first,
    is_main_process,
)
from ..loop._callbacks import Callback, check_callbacks
from ..loop._callbacks_steps import Profile
from ..loop._fit import fit
from ..loop._protocols import Tracker
from ..sharding._leaf_rules import replicate
from ..sharding._mesh import describe_mesh
from ..sharding._rule import Rule
from ..trackers._jsonl import or_nan
from ..training._config import Nonfinite
from ..training._init import abstract_state, init_state
from ..training._precision import Precision
from ..training._state import TrainState
from ..training._train_step import make_train_step
from ..training._unused_axes import unused_axes
from ._config import RunConfig, last_step, optim_for
from ._evaluation import Evaluation
from ._folder import RunFolder, default_folder, script_name
from ._planned import can_be_planned
from ._record import RunRecord, describe_devices, versions
from ._summary import flatten_settings, summarize

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What [`eqxshard.train`][] returns.

    - `state`: the state at the end.
    - `metrics`: the last evaluation, by metric.
    - `speed`: time per epoch and throughput: `14.7 s/epoch | 4,072 images/s`. A run of
      one epoch includes its compiling.
    - `title`: its name, devices and mesh: `LeNet on 2 x cpu (data=2)`.
    - `folder`: the folder of its files.
    - `summary`: the contents of its `summary.json`.
    """

    state: TrainState
    metrics: dict[str, float]
    speed: str
    title: str
    folder: Path
    summary: dict[str, Any]


@can_be_planned
def train(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[[Any, Any, Any], Any],
    metric_fn: Callable[[Any, Any], Mapping[str, Any]] | None,
    make_optim: optax.GradientTransformation
    | Callable[[int], optax.GradientTransformation],
    train_data: Source,
    eval_data: Source | None,
    *,
    config: RunConfig | None = None,
    name: str | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    mesh: str | Mesh = "data=-1",
    rule: Rule | None = None,
    trainable: PyTree = True,
    accumulate: int = 1,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    lint: Lint = "warn",
    remainder: Remainder = "pad",
    best: str | None = None,
    mode: Literal["max", "min"] = "max",
    load: Callable[[Any], PyTree] | None = None,
    sampler: Sampler | None = None,
    transform: Transform | None = None,
    workers: int = 0,
    trackers: tuple[Tracker, ...] = (),
    callbacks: Sequence[Callback] = (),
    settings: Any = None,
) -> RunResult:
    """Train and evaluate a model as a script does: devices, folder, resuming, summary.

    Makes the mesh, the state (or reads it from the newest checkpoint), the loaders and
    the steps, calls [`eqxshard.fit`][] with a progress bar, and writes to the run's
    folder: checkpoints, `metrics.jsonl`, `curves.png` (with Matplotlib), `tensorboard`
    (with TensorBoard), `summary.json` and a page to look at, `index.html`. Everything it
    does can be written by hand with the public names of this library.

    **Arguments:**

    - `make_model`: as for [`eqxshard.init_state`][].
    - `loss_fn`: as for [`eqxshard.make_train_step`][].
    - `metric_fn`: as for [`eqxshard.make_eval_step`][]; `None` to evaluate nothing.
    - `make_optim`: an optax optimizer; or a function from the number of steps to one, so
        that a schedule can span the run.
    - `train_data`, `eval_data`: as for [`eqxshard.Loader`][].
    - `config`: the user's options, of the script's command line.
    - `name`: the name of the run, in its title and in its default folder,
        `runs/SCRIPT-NAME`; by default, that of the script, in `runs/SCRIPT`.
    - `epochs`, `steps`: how long to train if `config` does not say.
    - `mesh`: the default mesh as text, for [`eqxshard.run.mesh_from_text`][]; or a mesh,
        which the options cannot change.
    - `rule`: as for [`eqxshard.init_state`][]; [`eqxshard.replicate`][] by default.
    - `trainable`, `precision`, `load`: as for [`eqxshard.init_state`][]. A run that resumes
        reads its checkpoint instead of calling `load`.
    - `accumulate`, `nonfinite`, `grad_norms`, `lint`: as for
        [`eqxshard.make_train_step`][]; `lint` is for evaluations, too.
    - `remainder`: as for [`eqxshard.Loader`][], of the training data. Evaluations always
        measure every example.
    - `best`, `mode`: as for [`eqxshard.Checkpointer`][].
    - `sampler`, `transform`, `workers`: as for [`eqxshard.Loader`][], of the training data.
    - `trackers`: more trackers, besides the folder's.
    - `callbacks`: as for [`eqxshard.fit`][].
    - `settings`: more settings to record in `summary.json`: the script's arguments, as a
        dataclass or a dict.

    **Returns:**

    An [`eqxshard.RunResult`][]. With several processes, every process gets one.

    **Raises:**

    `ValueError` with one clear sentence for each option that does not fit the devices,
    the data or the run's folder, and for a name that no metric has (`best`, of
    [`eqxshard.callbacks.EarlyStopping`][]); `TypeError` if `make_optim` is neither. All of
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
    config = RunConfig() if config is None else config
    config.check()
    # Before any code of the user's, which may change the working directory.
    folder = RunFolder(config.output or default_folder(name))
    mesh = config.make_mesh(mesh)
    title = f"{name or script_name() or 'run'} on {describe_mesh(mesh)}"
    data_name, warning = _describe_data(train_data)
    if warning:
        title += f" | {data_name} data"
    _check_batch_size(train_data, sampler, config)
    loader = Loader(
        train_data,
        batch_size=config.batch_size,
        mesh=mesh,
        seed=config.seed,
        remainder=remainder,
        sampler=sampler,
        transform=transform,
        workers=workers,
    )
    last = last_step(config, epochs, steps, len(loader))
    optim = optim_for(make_optim, last)
    evaluation = Evaluation(metric_fn, eval_data, mesh, config, precision, lint)
    check_callbacks(callbacks)
    callbacks = [*callbacks, *_profile(config, folder, last)]
    checkpointer = Checkpointer(
        folder.checkpoints,
        save_every=config.save_every or len(loader),
        best=best,
        mode=mode,
    )
    resumes = folder.should_resume(config.resume, checkpointer)
    rule = rule or replicate()
    key = jax.random.key(config.seed)
    with contextlib.closing(checkpointer), RunRecord(folder) as record:
        if resumes:
            like = abstract_state(
                make_model,
                optim,
                key=key,
                mesh=mesh,
                rule=rule,
                trainable=trainable,
                precision=precision,
            )
            state = checkpointer.restore(like)
        else:
            state = init_state(
                make_model,
                optim,
                key=key,
                mesh=mesh,
                rule=rule,
                trainable=trainable,
                precision=precision,
                load=load,
            )
        train_step = make_train_step(
            loss_fn,
            optim,
            accumulate=accumulate,
            nonfinite=nonfinite,
            grad_norms=grad_norms,
            lint=lint,
        )
        evaluation.check(state, best, callbacks)
        if is_main_process():
            lower = lambda: train_step.lower(state, loader.shapes())  # noqa: E731
            for text in unused_axes(state, mesh, rule, lower):
                print(f"warning: {text}", file=sys.stderr)
                record.warn(text)
        first = int(state.step)
        # A start that takes no step leaves what is written of the run as it is.
        kept = folder.read_summary() if first >= last else {}
        # Before the trackers, which empty the files of an earlier run.
        checkpointer.claim_run(first, loader)
        facts = {
            "data": data_name,
            "parameters": _count_parameters(state.model),
            "settings": flatten_settings({"settings": settings or {}, "config": config})
            | {"epochs": last / len(loader)},
            "versions": versions(),
        }
        if is_main_process():
            _announce(warning, first, last, resumes)
            about = {
                "title": title,
                "steps": last,
                "batch_size": config.batch_size,
                "unit": _unit(train_data),
                "best": best,
                "mode": mode,
                **describe_devices(mesh),
                **facts,
            }
            if not kept:
                trackers = (
                    *trackers,
                    *folder.trackers(
                        title=title,
                        total_steps=last,
                        first=first,
                        extra={"data": data_name} if data_name else {},
                        services=config.track,
                        settings=facts["settings"],
                    ),
                )
                record.begin(about, first)
        state = fit(
            state,
            train_step,
            loader,
            steps=last,
            evaluate=evaluation if evaluation.measures else None,
            evaluate_every=config.evaluate_every or "epoch",
            checkpointer=checkpointer,
            trackers=trackers,
            callbacks=callbacks,
            log_every=config.log_every,
            hang_seconds=config.hang_seconds,
        )
        facts["devices"] = describe_mesh(mesh)
        return _finish(folder, state, title, facts, train_data, sampler, kept)


def _unit(source: Source) -> str:
    """What an example is called."""
    return getattr(source, "unit", "examples")


def _describe_data(source: Source) -> tuple[str, str]:
    """A source's name and its warning; empty if it has none."""
    name, warning = getattr(source, "name", ""), getattr(source, "warning", "")
    # Hosts may differ in what they can download.
    assert_same_on_all_processes("data", {"name": name})
    return name, warning


def _check_batch_size(
    train_data: Source, sampler: Sampler | None, config: RunConfig
) -> None:
    # What is no source or no sampler is for the loader to refuse.
    if isinstance(train_data, Source) and isinstance(sampler, Sampler | None):
        examples = len(sampler or train_data)
        if config.batch_size > examples:
            raise ValueError(
                f"--batch-size {config.batch_size} is more than the {examples} examples; "
                "use fewer."
            )


def _profile(config: RunConfig, folder: RunFolder, last: int) -> list[Callback]:
    """The profile that `--profile` asks for."""
    if config.profile is None:
        return []
    start = int(config.profile.partition(":")[0])
    if start > last:
        raise ValueError(
            f"--profile {config.profile} begins after the last step, {last}; use steps "
            "of this run."
        )
    return [Profile.parse(config.profile, folder.path / "profile")]


def _announce(warning: str, first: int, last: int, resumes: bool) -> None:
    if warning:
        from rich.console import Console
        from rich.panel import Panel

        panel = Panel(warning, title="SYNTHETIC DATA", style="bold yellow")
        Console(stderr=True).print(panel)
    if first >= last:
        print(f"training already finished at step {first}; nothing is left to do.")
    elif resumes:
        print(f"resuming from step {first}.")


def _count_parameters(model: PyTree) -> int:
    return sum(map(jnp.size, jax.tree.leaves(eqx.filter(model, eqx.is_array))))


def _finish(
    folder: RunFolder,
    state: TrainState,
    title: str,
    facts: dict[str, Any],
    train_data: Source,
    sampler: Sampler | None,
    kept: dict[str, Any],
) -> RunResult:
    """Write the summary in process 0, unless one is kept, and share it."""
    summary, unit = None, _unit(train_data)
    if is_main_process():
        examples = len(sampler or train_data)
        summary = kept or summarize(folder.history(), examples, unit) | facts
        try:
            if not kept:
                folder.write_summary(summary)
        except OSError as error:
            _LOG.error(
                "%s cannot be written: %s. The run is finished.", folder.summary, error
            )
        # What reads it may be gone.
        with contextlib.suppress(OSError):
            print(f"metrics, checkpoints and a page, index.html, are in {folder.path}")
    summary = broadcast_from_first(summary)
    tests = {k: v for k, v in summary.items() if k.startswith("test_")}
    metrics = {
        key.removeprefix("test_"): or_nan(value)
        for key, value in tests.items()
        if not key.endswith("_by_epoch")
    }
    per_second = f"{or_nan(summary.get(f'{unit}_per_second')):,.0f}"
    pace = or_nan(summary.get("seconds_per_epoch"))
    speed = f"{pace:.1f} s/epoch | {per_second} {unit}/s"
    return RunResult(state, metrics, speed, title, folder.path, summary)
