"""`python -m eqxshard plan SCRIPT --devices 512 --device h200`: what a run will need.

The script is one of [`eqxshard.train`][], which is planned instead of run; see
[`eqxshard.plan`][].
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

from .planning._make_plan import plan
from .run._cli import exit_on_errors
from .run._planned import collect


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see {self.prog} --help.", file=sys.stderr)
        sys.exit(2)


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    parser = _Parser(
        prog="python -m eqxshard",
        description="What a run will need, before there is hardware.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_plan(commands)
    options, others = parser.parse_known_args(args)
    # The accelerators of this machine are not needed.
    jax.config.update("jax_platforms", "cpu")
    try:
        with exit_on_errors():
            options.run(options, others)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130
    return 0


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="the memory, communication and time of a step, as tables",
        description="Compile the step of a script for devices that are not there, and "
        "print its memory, its communication and the least time that it takes. No data "
        "are needed, and nothing is written.",
        epilog="All other options are the script's, such as --mesh data=8,fsdp=64 and "
        "--batch-size 512.",
    )
    parser.set_defaults(run=_plan)
    _add_script(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="also write the plan as a page")


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script", metavar="SCRIPT", help="the path of a script that calls eqxshard.train"
    )
    parser.add_argument(
        "--devices", metavar="INT", type=int, required=True, help="how many"
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="h200",
        help="their kind: a100, h100, h200 (the default), b200, tpu-v4, tpu-v5e, tpu-v5p, "
        "tpu-v6e or cpu",
    )
    parser.add_argument(
        "--backend",
        choices=("gpu", "tpu", "cpu"),
        help="the compiler (default: that of the device, or cpu if it is not installed)",
    )


def _plan(options: argparse.Namespace, others: Sequence[str]) -> None:
    for file in filter(None, (options.json, options.html)):
        # Before the minutes that it may take to compile.
        if not Path(file).parent.is_dir():
            raise ValueError(f"there is no folder {Path(file).parent}; make it first.")
    console = Console(stderr=True)
    with (
        collect(options.script, others, devices=options.devices) as (arguments, notes),
        console.status(f"compiling for {options.devices} x {options.device}"),
    ):
        made = plan(**arguments, target=options.device, backend=options.backend)
    made = dataclasses.replace(made, notes=(*made.notes, *notes))
    print(made)
    if options.json:
        Path(options.json).write_text(json.dumps(made.to_json(), indent=2) + "\n")
    if options.html:
        made.save(options.html)  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    sys.exit(main())
