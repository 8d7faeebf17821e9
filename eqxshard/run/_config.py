"""`RunConfig`: the options that every training script has.

A script gets them by a field `run: RunConfig = RunConfig()` in the dataclass of its
arguments, where it may set other defaults, and passes them to `train` as `config`.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

import optax
import tyro
from jax.sharding import Mesh

from .._errors import UsageError, UsageTypeError
from ..data._order import Steps
from ..trackers._metrics import is_installed
from ..trackers._services import ServiceName, find_service
from ..training._optimizer import is_optimizer
from ._devices import mesh_from_text, parse_mesh

Resume = Literal["no", "yes", "auto"]

#: An optimizer, or a function from the number of steps to one.
MakeOptim = optax.GradientTransformation | Callable[[int], optax.GradientTransformation]


def flag(name: str) -> str:
    """An option of `RunConfig` as it is typed, such as `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def default(text: str, metavar: str | None = None) -> Any:
    """Describe the default of an option whose value is `None`, for its help.

    **Arguments:**

    - `text`: the default that the help shows.
    - `metavar`: the placeholder of the value in the help, such as `DIR`.

    **Returns:**

    An annotation for [tyro](https://brentyi.github.io/tyro/).

    !!! Example

        ```python
        learning_rate: Annotated[float | None, eqxshard.run.default("0.005")] = None
        ```
    """
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {text})")


# Its options are `--seed` and the like, whatever a script calls the field.
@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class RunConfig:
    """How long to run, on which devices, and where to write."""

    epochs: Annotated[int | None, default("the script's", "INT")] = None
    """How many times to go through the training data."""
    steps: Annotated[int | None, default("as --epochs says", "INT")] = None
    """How many steps to train for, instead of --epochs."""
    batch_size: int = 256
    """Examples per step, over all devices."""
    seed: int = 0
    """Decides the initial parameters and the order of the data."""
    devices: Annotated[int | None, default("all; CPU: one per core", "INT")] = None
    """How many devices to use. CPU devices are simulated."""
    mesh: Annotated[str | None, default("the script's", "AXIS=SIZE,...")] = None
    """Sizes of mesh axes, such as data=4,fsdp=2; -1 takes the remaining devices."""
    output: Annotated[str | None, default("runs/SCRIPT-NAME", "DIR")] = None
    """The folder for checkpoints, metrics, curves and the summary."""
    resume: Resume = "no"
    """Continue from the newest checkpoint; auto: if there is one."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Remove the run that is in --output, if there is one, and start over."""
    save_every: Annotated[int | None, default("an epoch, or 1000", "INT")] = None
    """Steps between checkpoints."""
    evaluate_every: Annotated[int | None, default("an epoch, or 1000", "INT")] = None
    """Steps between evaluations."""
    log_every: int = 50
    """Steps between reports."""
    track: Annotated[tuple[ServiceName, ...], default("none")] = ()
    """Services that get the metrics, too: one or several."""
    hang_seconds: Annotated[float | None, default("never", "SECONDS")] = None
    """End a run that waits longer than this, so that it can be started again."""
    profile: Annotated[str | None, default("none", "START:STOP")] = None
    """Write a profile of these steps to the folder profile in --output."""
    plan: Annotated[str | None, default("none", "COUNTxDEVICE")] = None
    """Plan a step on devices that are not there, such as 512xh200, instead of training."""
    plan_file: Annotated[str | None, default("none", "FILE")] = None
    """Write the plan of --plan to this file: a page, .html; .json; or .trace.json."""
    traceback: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """At an error, show the whole traceback."""
    # Not an option of the command line. It may be of any type, also of one without a hash.
    arguments: Annotated[Any, tyro.conf.Suppress] = field(
        default=None, repr=False, compare=False
    )
    """The script's own arguments, to be recorded: [`eqxshard.cli`][] puts them here."""

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` if an option makes no sense.

        [`eqxshard.cli`][] and [`eqxshard.train`][] call this. (Not `__post_init__`: tyro
        would report its errors in a box of its own.)
        """
        counts = ("epochs", "steps", "batch_size", "devices")
        for name in (*counts, "save_every", "evaluate_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag(name)} {value} is too small; use 1 or more.")
        if self.hang_seconds is not None and not self.hang_seconds > 0:
            raise UsageError(
                f"--hang-seconds {self.hang_seconds} is too small; use more than the "
                "longest evaluation or compilation takes."
            )
        for one, other in (("epochs", "steps"), ("plan", "devices")):
            values = getattr(self, one), getattr(self, other)
            if None not in values:
                raise UsageError(
                    f"{flag(one)} {values[0]} and {flag(other)} {values[1]} contradict "
                    "each other; give one of them."
                )
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed {self.seed} is out of range; use 0 to 2**32 - 1.")
        if self.output == "":
            raise UsageError("--output is empty; give a folder, or leave the option out.")
        if self.resume not in get_args(Resume):
            raise UsageError(f"--resume {self.resume} is unknown; use no, yes or auto.")
        if self.overwrite and self.resume != "no":
            raise UsageError(
                f"--overwrite starts over and --resume {self.resume} continues a run; give "
                "one of them."
            )
        if isinstance(self.track, str):
            raise UsageTypeError(
                f"track={self.track!r} is a string; give a tuple of names, such as "
                f"track=({self.track!r},)."
            )
        for name in self.track:
            service = find_service(name)
            if not is_installed(service.package):
                raise UsageError(
                    f"--track {name} needs the package {service.package}, which is not "
                    f"installed; install it with `pip install 'eqxshard[{service.extra}]'`."
                )
        if self.mesh is not None:
            parse_mesh(self.mesh)
        if self.profile is not None:
            parse_profile(self.profile)
        if self.plan is not None:
            parse_plan(self.plan)
        if self.plan_file is not None:
            from ..planning._plan import check_plan_file

            check_plan_file(self.plan_file)
            if self.plan is None:
                raise UsageError(
                    f"{flag('plan_file')} {self.plan_file} is the file of a plan; give "
                    f"{flag('plan')}, too."
                )

    def make_mesh(self, mesh: str | Mesh) -> Mesh:
        """The mesh that the options ask for.

        **Arguments:**

        - `mesh`: the default, as text for [`eqxshard.run.mesh_from_text`][]; or a mesh,
            which the options cannot change.

        **Returns:**

        The mesh. With `plan`, a mesh given as text consists of simulated CPU devices, as
        many as the plan has.

        **Raises:**

        `ValueError` if the options do not fit the devices, or would change a mesh that is
        not given as text.
        """
        if isinstance(mesh, str):
            devices = self.devices if self.plan is None else parse_plan(self.plan)[0]
            return mesh_from_text(
                self.mesh or mesh, devices=devices, batch_size=self.batch_size
            )
        if self.mesh is not None or self.devices is not None:
            raise UsageError(
                "this script makes its own mesh; leave out --mesh and --devices, or let it "
                "give a mesh as text."
            )
        return mesh


def option_names() -> list[str]:
    """The names of the options of `RunConfig`."""
    return [each.name for each in fields(RunConfig) if each.name != "arguments"]


def parse_plan(text: str) -> tuple[int, str]:
    """The number and the kind of devices in a text such as `512xh200`."""
    match = re.fullmatch(r"([1-9]\d*)x(\S+)", text)
    if match is None:
        raise UsageError(
            f"--plan {text} is not a number and a kind of devices; write one such as "
            "512xh200."
        )
    return int(match[1]), match[2]


def parse_profile(text: str) -> tuple[int, int]:
    """The first and the last step in a text such as `10:15`."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last)):
        raise UsageError(
            f"{text!r} are not steps to profile; write START:STOP, such as 10:15, with "
            "2 <= START <= STOP."
        )
    return int(first), int(last)


def make_optimizer(make_optim: MakeOptim, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run: `make_optim`, or what it returns for the number of steps.

    **Raises:**

    `TypeError` if `make_optim` is neither an optimizer nor a function, or is a function of
    the learning rate, such as `optax.adam`.
    """
    if is_optimizer(make_optim):
        return make_optim  # pyright: ignore[reportReturnType]
    name = getattr(make_optim, "__name__", type(make_optim).__name__)
    if not callable(make_optim):
        raise UsageTypeError(
            f"make_optim is a {name}; give an optimizer, such as optax.adam(1e-3), or a "
            "function from the number of steps to one."
        )
    # These would take the number of steps as their learning rate.
    is_optax = (getattr(make_optim, "__module__", None) or "").startswith("optax")
    first = next(iter(inspect.signature(make_optim).parameters), None)
    if is_optax or first == "learning_rate":
        raise UsageTypeError(
            f"make_optim={name} would get the number of steps, {steps}, as its learning "
            f"rate; give an optimizer, such as {name}(1e-3), or a function of the steps, "
            f"such as lambda steps: {name}(1e-3)."
        )
    return make_optim(steps)


def last_step(
    config: RunConfig, epochs: int | None, steps: int | None, of: Steps | None
) -> int:
    """The step to end at, by the user's options or else by the script's arguments.

    **Arguments:**

    - `config`: the user's options.
    - `epochs`, `steps`: the script's arguments of these names.
    - `of`: which epoch each step is in; `None` for data without epochs.

    **Raises:**

    `ValueError` unless exactly one of both is given, if epochs are given for data without,
    or if the step does not fit into 32 bits.
    """
    if config.steps is not None or config.epochs is not None:
        epochs, steps = config.epochs, config.steps
    if (epochs is None) == (steps is None):
        raise UsageError("train needs one of epochs= and steps=; give exactly one.")
    if steps is None and of is None:
        raise UsageError(
            f"these data have no epochs, because they are endless or do not say how long "
            f"they are; give {flag('steps')} instead of epochs."
        )
    last = steps if of is None or steps is not None else of.end(epochs or 0)
    assert last is not None
    # Optax counts steps in 32 bits.
    if not 1 <= last < 2**31:
        raise UsageError(f"{last} steps are not between 1 and 2**31 - 1; use others.")
    return last
