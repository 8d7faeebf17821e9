"""`cli`: run a script's main function with arguments from the command line."""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

import jax
import platformdirs
import tyro

from .._errors import UsageError
from .._parser import allow_closed_stdout
from ..distributed import exit_process, initialize
from ..sharding._text import comma_list, say
from ._config import RunConfig, flag, option_names
from ._exit import exit_on_errors

_Args = TypeVar("_Args")

#: How to see the frames that a traceback leaves out, for scripts without `--traceback`.
_FILTERING = "JAX_TRACEBACK_FILTERING=off shows them"


def cli(
    main: Callable[[_Args], object],
    args_type: type[_Args],
    *,
    args: Sequence[str] | None = None,
) -> NoReturn:
    """Run a script's main function with arguments from the command line, and exit.

    Arguments are parsed by [tyro](https://brentyi.github.io/tyro/). Then the process
    joins others, if there are any ([`eqxshard.initialize`][]). JAX keeps what it compiles
    for the next start: in the folder that `JAX_COMPILATION_CACHE_DIR` names, else in one in
    the user's cache directory. With `--plan`, it does neither and uses only CPU devices:
    the script's call of [`eqxshard.train`][] prints a plan and ends the process.

    Arguments that tyro refuses end the script with exit status 2. So does an
    [`eqxshard.UsageError`][] (or its twin for types), whether this library raised it or the
    script: it is printed as one line on stderr. Devices that run out of memory are also
    reported without a traceback. Any other error is a bug: its traceback leaves out the
    frames of this library, JAX and Equinox, and `--traceback` of a `RunConfig` shows all of
    it. The exit status of both is 1. Ctrl-C ends with status 130, SIGTERM with 143.

    **Arguments:**

    - `main`: called with the parsed arguments. If it returns something, such as a text or
        the result of [`eqxshard.train`][], that is printed at the end. With several
        processes, only the first prints it.
    - `args_type`: a dataclass of the arguments: its docstring and those of its fields are
        the help. The options of a nested dataclass form a group, with the name of its
        field as their prefix, as in `--encoder.width`; those of [`eqxshard.RunConfig`][]
        have no prefix. A `RunConfig` carries all arguments, as they were parsed, and
        [`eqxshard.train`][] records them.
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
    words = sys.argv[1:] if args is None else args
    try:
        with allow_closed_stdout():
            with exit_on_errors(remedy=_FILTERING):
                parsed, run = _parse(args_type, words)
            with _errors_of(run):
                if run is not None:
                    run.check()
                if run is not None and run.plan is not None:
                    _plan(main, parsed, run.plan)
                else:
                    _run(main, parsed)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr, flush=True)
        # Whatever reads stdout may be gone.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        # Not sys.exit: JAX 0.10 crashes at exit if a compilation was interrupted.
        os._exit(130)
    exit_process(0)


def _errors_of(run: RunConfig | None) -> contextlib.AbstractContextManager[None]:
    """The context in which errors end a script with these options."""
    if run is None:
        return exit_on_errors(remedy=_FILTERING)
    return exit_on_errors(whole_traceback=run.traceback)


def _plan(main: Callable[[_Args], object], parsed: _Args, plan: str) -> None:
    """Call the main function: its call of `train` prints the plan and ends the process."""
    # A plan needs none of the accelerators of this machine.
    jax.config.update("jax_platforms", "cpu")
    main(parsed)
    raise UsageError(
        f"{flag('plan')} {plan} plans the step of eqxshard.train, which this script did "
        f"not call; leave {flag('plan')} out."
    )


def _run(main: Callable[[_Args], object], parsed: _Args) -> None:
    """Call the main function, and print what it returns."""
    # Otherwise absl's logging, which Grain uses, would print the name of the logger before
    # each message.
    logging.basicConfig(format="%(message)s")
    _cache_compiled()
    initialize()
    result = main(parsed)
    if result is not None and jax.process_index() == 0:
        say(str(result))


def _cache_compiled() -> None:
    """Have JAX keep everything that it compiles in a folder, for the next start."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        folder = platformdirs.user_cache_path("eqxshard") / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default, JAX does not keep what compiles in less than a second, as most programs of
    # a small model do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _parse(args_type: type[_Args], args: Sequence[str]) -> tuple[_Args, RunConfig | None]:
    """The arguments, and the options of a run among them, if there are any.

    **Raises:**

    `SystemExit` with status 2, once tyro has said what is wrong; `ValueError` as
    `_check_names` does.
    """
    _check_names(args_type)
    parsed: Any = tyro.cli(args_type, args=args, config=(tyro.conf.DisallowNone,))
    for field in dataclasses.fields(parsed):
        run = getattr(parsed, field.name)
        if isinstance(run, RunConfig):
            run = _one_length(run, field.default)
            # `train` records them.
            run = dataclasses.replace(run, arguments=parsed)
            return dataclasses.replace(parsed, **{field.name: run}), run
    return parsed, parsed if isinstance(parsed, RunConfig) else None


def _check_names(args_type: type) -> None:
    """Refuse arguments that would be confused with the options of a `RunConfig`.

    **Raises:**

    `ValueError` if an argument of the script has the name of an option, or several
    arguments are a `RunConfig`.
    """
    types = get_type_hints(args_type)
    runs = [name for name, kind in types.items() if kind is RunConfig]
    if len(runs) > 1:
        raise UsageError(
            f"{comma_list(runs)} of {args_type.__name__} are all a RunConfig; keep one."
        )
    options = option_names() if runs else []
    for name in filter(types.__contains__, options):
        raise UsageError(
            f"{flag(name)} is an option of RunConfig and an argument of this script, "
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
