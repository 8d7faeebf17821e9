"""`python -m eqxshard COMMAND`: write the page of a run, or print facts about a machine.

`page` writes the page of a run's folder. `info` prints something even where JAX cannot be
imported, so this module imports neither JAX nor the rooms that do.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._info import info
from ._parser import Parser, allow_closed_stdout


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = Parser(
        prog="python -m eqxshard",
        description="Write the page of a run, or print facts about this machine.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_page(commands)
    _add(
        commands,
        "info",
        info,
        "Print versions, environment variables and devices, to paste into an issue.",
    )
    args = sys.argv[1:] if args is None else args
    options = parser.parse_args(args)
    try:
        if options.run is info:
            info()
        else:
            _run(options)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    import jax

    from .run._exit import exit_on_errors

    # The accelerators of this machine are not needed.
    jax.config.update("jax_platforms", "cpu")
    with exit_on_errors(whole_traceback=options.traceback):
        options.run(options)


def _add(
    commands: Any, name: str, run: Callable[..., Any], text: str
) -> argparse.ArgumentParser:
    """Add a command with the text of its help."""
    parser = commands.add_parser(name, allow_abbrev=False, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _add_page(commands: Any) -> None:
    page = _add(
        commands,
        "page",
        _page,
        "Write index.html into the folder of a run that was killed or is still running, or "
        "again after a plan was put into the folder as plan.json.",
    )
    page.add_argument("folder", metavar="RUN", help="the folder of a run")
    page.add_argument(
        "--traceback", action="store_true", help="show the whole traceback of an error"
    )


def _page(options: argparse.Namespace) -> None:
    from .run._page import save_page
    from .run._paths import RunPaths

    paths = RunPaths(options.folder)
    save_page(paths)
    print(paths.page)


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
