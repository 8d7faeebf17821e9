"""`python -m eqxshard COMMAND`: plans, pages of runs, and facts of a machine.

`plan` and `search` take a script of [`eqxshard.train`][], which is planned instead of run;
see [`eqxshard.plan`][] and [`eqxshard.plan_search`][]. `page` and `compare` make pages of
run folders. `info` prints something even where JAX cannot be imported, so this module
imports neither JAX nor the rooms that do.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ._errors import UsageError
from ._info import info
from ._parser import Parser, allow_closed_stdout


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser(
        prog="python -m eqxshard",
        description="Plan runs, look at runs, and print facts of a machine.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_search(commands)
    _add_pages(commands)
    _add(
        commands,
        "info",
        info,
        "Print versions, variables of the environment and devices, to paste into an issue.",
    )
    args = sys.argv[1:] if args is None else args
    options, others = parser.parse_known_args(args)
    if others and options.run not in (_plan, _search):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        if options.run is info:
            info()
        else:
            _run(options, others)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace, others: Sequence[str]) -> None:
    import jax

    from .run._errors import exit_on_errors

    # The accelerators of this machine are not needed.
    jax.config.update("jax_platforms", "cpu")
    with exit_on_errors(whole_traceback=options.traceback):
        options.run(options, others)


def _add(
    commands: Any, name: str, run: Callable[..., Any], text: str
) -> argparse.ArgumentParser:
    """Add a command, and the text of its help."""
    parser = commands.add_parser(name, allow_abbrev=False, help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--traceback", action="store_true", help="at an error, show the whole traceback"
    )
    return parser


def _add_plan(commands: Any) -> None:
    parser = _add(
        commands,
        "plan",
        _plan,
        "Compile the step of a script for devices that are not there, and print its "
        "memory, its communication and the least time that it takes.",
    )
    _add_script(parser)
    for name, metavar, text in (
        ("--json", "FILE", "also write the plan as JSON"),
        ("--html", "FILE", "also write the plan as a page"),
        ("--trace", "FILE", "also write the time line as a trace for Perfetto and Chrome"),
        ("--cache", "DIR", "also keep the compiled step in this folder, as JAX's cache"),
    ):
        kind = str if metavar == "DIR" else _new_file
        parser.add_argument(name, metavar=metavar, type=kind, help=text)


def _add_search(commands: Any) -> None:
    parser = _add(
        commands,
        "search",
        _search,
        "Plan the step of a script on one mesh after the other, and rank those that fit. "
        "The script's --mesh is not used.",
    )
    _add_script(parser)
    parser.add_argument(
        "--search-axes",
        metavar="AXES",
        default="data,fsdp,tensor",
        help="of these meshes, some of data, fsdp, context and tensor (default: "
        "data,fsdp,tensor)",
    )
    parser.add_argument(
        "--search-accumulate",
        metavar="COUNTS",
        type=_counts,
        help="numbers of microbatches to try, such as 1,2,4 (default: the script's)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=_new_file, help="also write the search as JSON"
    )


def _add_pages(commands: Any) -> None:
    page = _add(
        commands,
        "page",
        _page,
        "Write index.html into the folder of a run: of one that was killed, or still runs, "
        "or after a plan was put beside it as plan.json.",
    )
    page.add_argument("folder", metavar="RUN", help="the folder of a run")
    compare = _add(
        commands,
        "compare",
        _compare,
        "Write one page of several runs: their curves over each other, their results, and "
        "in what they differ.",
    )
    compare.add_argument("folders", metavar="RUN", nargs="+", help="the folder of a run")
    compare.add_argument(
        "--output",
        metavar="FILE",
        type=_new_file,
        default="compare.html",
        help="the page (default: compare.html)",
    )


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "All other options are the script's, such as --batch-size 512."
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
        help="their kind: a100, h100, h200 (the default), b200, b300, gb200, tpu-v4, "
        "tpu-v5e, tpu-v5p, tpu-v6e or cpu",
    )
    parser.add_argument(
        "--backend",
        choices=("gpu", "tpu", "cpu"),
        help="the compiler (default: that of the device, or cpu if it is not installed)",
    )


def _plan(options: argparse.Namespace, others: Sequence[str]) -> None:
    from rich.console import Console

    from .planning._make_plan import plan
    from .run._planned import PlannedRun, plan_script

    if options.html and Path(options.html).suffix.lower() != ".html":
        raise UsageError(f"--html {options.html} is no page; give a name like plan.html.")

    def planner(run: PlannedRun, notes: list[str]) -> None:
        with Console(stderr=True).status("compiling"):
            made = plan(
                **run.for_mesh(options.devices),
                target=options.device,
                backend=options.backend,
                cache=options.cache,
            )
        made = dataclasses.replace(made, notes=(*made.notes, *notes))
        print(made)
        if options.html:
            made.save(options.html)
        _write(options.json, made.to_json)
        _write(options.trace, made.to_trace)

    plan_script(options.script, others, planner)


def _search(options: argparse.Namespace, others: Sequence[str]) -> None:
    from rich.console import Console

    from .planning._search import plan_search
    from .run._planned import PlannedRun, plan_script

    def planner(run: PlannedRun, notes: list[str]) -> None:
        arguments = run.for_any_mesh(options.devices)
        arguments["accumulate"] = options.search_accumulate or arguments["accumulate"]
        console = Console(stderr=True)
        with console.status("compiling") as status:

            def progress(tried: int, of: int) -> None:
                said = f"tried {tried} of {of} candidates"
                status.update(said)
                if not console.is_terminal and tried % -(-of // 5) == 0:
                    print(said, file=sys.stderr, flush=True)

            found = plan_search(
                arguments.pop("make_model"),
                progress=progress,
                devices=options.devices,
                axes=[axis for axis in options.search_axes.split(",") if axis],
                target=options.device,
                backend=options.backend,
                **arguments,
            )
        print(found)
        for note in notes:
            print(f"note: {note}.")
        _write(options.json, found.to_json)

    plan_script(options.script, others, planner)


def _page(options: argparse.Namespace, others: Sequence[str]) -> None:
    from .run._folder import RunFolder
    from .run._page import save_page

    folder = RunFolder(options.folder)
    save_page(folder)
    print(folder.page)


def _compare(options: argparse.Namespace, others: Sequence[str]) -> None:
    from .run._compare_page import compare_runs

    print(compare_runs(options.folders, options.output))
    print(f"the page is {Path(options.output).resolve()}")


def _write(file: str | None, to_json: Callable[[], Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(to_json(), indent=2) + "\n")


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not a list of numbers; use one such as 1,2,4."
        ) from None


def _new_file(text: str) -> str:
    """A path that can be written, checked before a plan takes minutes."""
    folder = Path(text).parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}; make it first.")
    return text


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
