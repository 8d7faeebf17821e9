"""`cli`: run a script's main function with arguments from the command line."""

import contextlib
import dataclasses
import io
import itertools
import logging
import operator
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

import jax
import tyro

from .._errors import UsageError
from .._parser import allow_closed_stdout
from ..data._datasets import is_planning
from ..distributed import exit_process, initialize
from ..planning._script import refuse_import
from ..sharding._text import comma_list, say
from ..transforms._cache import cache_compilations
from ._config import RunConfig, command_line, option
from ._errors import exit_on_errors
from ._planned import planned_by, print_plan

_Args = TypeVar("_Args")


def cli(
    main: Callable[[_Args], str | None],
    args_type: type[_Args],
    *,
    args: Sequence[str] | None = None,
) -> NoReturn:
    """Run a script's main function with arguments from the command line, and exit.

    Arguments are parsed by [tyro](https://brentyi.github.io/tyro/). Then the process
    joins others, if there are any ([`eqxshard.initialize`][]), and keeps compiled
    programs ([`eqxshard.cache_compilations`][]). With `--plan`, it runs up to its call of
    [`eqxshard.train`][], which is then planned instead.

    What this library raised on purpose, and an [`eqxshard.UsageError`][] of the script,
    ends it with one line on stderr and exit status 2. Another error is a bug: the
    traceback shows the user's own code, down to the line to look at, and `--traceback`
    all of it; the exit status is 1. Ctrl-C ends with status 130, SIGTERM with 143.

    **Arguments:**

    - `main`: called with the parsed arguments; returns the last line to print, if any. Of
        several processes, the first prints it.
    - `args_type`: a dataclass of the arguments: its docstring and those of its fields are
        the help. The options of a nested dataclass are a group of their own, with the
        name of its field before them, as in `--encoder.width`; those of
        [`eqxshard.RunConfig`][] have none.
    - `args`: the arguments, those of the command line by default.

    !!! Example

        ```python
        @dataclass(frozen=True)
        class Args:
            \"\"\"Train a classifier.\"\"\"

            run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64)
            learning_rate: float = 1e-3


        if __name__ == "__main__":
            eqxshard.cli(main, Args)
        ```
    """
    refuse_import("eqxshard.cli")
    words = sys.argv[1:] if args is None else args
    errors = exit_on_errors(whole_traceback="--traceback" in words)
    try:
        with allow_closed_stdout(), errors, command_line():
            parsed, plan = _parse(args_type, words)
            if is_planning():
                main(parsed)
            elif plan is not None:
                # The accelerators of this machine are not needed.
                jax.config.update("jax_platforms", "cpu")
                with planned_by(print_plan(plan)):
                    main(parsed)
            else:
                # Orbax's logging would put the names of loggers before what they say.
                logging.basicConfig(format="%(message)s")
                cache_compilations()
                initialize()
                last_line = main(parsed)
                if last_line is not None and jax.process_index() == 0:
                    say(last_line)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr, flush=True)
        # What reads it may be gone.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        # Not sys.exit: JAX 0.10 crashes at exit if a compilation was interrupted.
        os._exit(130)
    exit_process(0)


def _parse(args_type: type[_Args], args: Sequence[str]) -> tuple[_Args, str | None]:
    """The arguments, and what `--plan` says if they have the options of a run.

    **Raises:**

    `ValueError` with one sentence if they are wrong.
    """
    # `--resume` alone means yes.
    given = [
        "--resume=yes" if word == "--resume" and following.startswith("-") else word
        for word, following in itertools.pairwise([*args, "-"])
    ]
    _check_names(args_type)
    config = (tyro.conf.DisallowNone,)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            parsed: Any = tyro.cli(args_type, args=given, config=config)
    except SystemExit as stop:
        if not stop.code:
            raise  # After --help.
        raise UsageError(_first_sentence(box.getvalue())) from None
    for field in dataclasses.fields(parsed):
        run = getattr(parsed, field.name)
        if isinstance(run, RunConfig):
            run = _one_length(run, field.default)
            run.check()
            return dataclasses.replace(parsed, **{field.name: run}), run.plan
    return parsed, parsed.plan if isinstance(parsed, RunConfig) else None


def _check_names(args_type: type) -> None:
    """Refuse an argument of a script whose option `RunConfig` has, too."""
    types = get_type_hints(args_type)
    runs = [name for name, kind in types.items() if kind is RunConfig]
    if len(runs) > 1:
        raise UsageError(
            f"{comma_list(runs)} of {args_type.__name__} are all a RunConfig; keep one."
        )
    options = [field.name for field in dataclasses.fields(RunConfig)] if runs else []
    for name in filter(types.__contains__, options):
        raise UsageError(
            f"{option(name)} is an option of RunConfig and an argument of this script, "
            f"{args_type.__name__}.{name}; give the argument another name."
        )


def _one_length(config: RunConfig, default: Any) -> RunConfig:
    """Let `--steps` replace the script's own number of epochs, and the reverse."""
    if isinstance(default, RunConfig):
        if config.steps != default.steps and config.epochs == default.epochs:
            return dataclasses.replace(config, epochs=None)
        if config.epochs != default.epochs and config.steps == default.steps:
            return dataclasses.replace(config, steps=None)
    return config


def _first_sentence(box: str) -> str:
    """The error in tyro's box, without the borders and the help."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()[1:]]
    # Where stdout cannot show these, there are only rules of dashes.
    lines = ["" if set(line) == {"-"} else line for line in lines]
    message = itertools.takewhile(bool, itertools.dropwhile(operator.not_, lines))
    hint = re.search(r"Perhaps you meant:.*?(--[\w.-]+)", " ".join(lines))
    suggestion = f" Did you mean {hint[1]}?" if hint else ""
    return f"{' '.join(message).rstrip('.')}.{suggestion} See --help."
