"""`python -m eqxshard.replay DUMP SCRIPT`: find the first value that was not finite.

Goes through the step of a crash dump that [`eqxshard.fit`][] left behind on one device, one
operation at a time: the batch, the parameters, the loss, the gradients. The dump has the
arrays. The model and the loss function come from the script, which must be yours.
"""

import sys
from types import ModuleType
from typing import Any

from ._errors import UsageError
from ._parser import Parser, allow_closed_stdout
from .checkpoint._folder import folder_path
from .debug._crash_dump import read_crash_dump
from .debug._replay import replay
from .debug._script import import_script
from .run._errors import exit_on_errors


def main() -> int:
    """The command."""
    parser = Parser(
        prog="python -m eqxshard.replay",
        description="Find the first value that was not finite in the step of a crash dump.",
    )
    parser.add_argument("folder", help="the crash_dump folder that a run named")
    parser.add_argument("script", help="your script, which is imported")
    parser.add_argument(
        "--model",
        default="make_model",
        metavar="NAME",
        help="the script's function that makes the model from a key (default: make_model)",
    )
    parser.add_argument(
        "--loss", metavar="NAME", help="the script's loss function (default: loss_fn)"
    )
    parser.add_argument(
        "--traceback", action="store_true", help="at an error, show the whole traceback"
    )
    args = parser.parse_args()
    with exit_on_errors(whole_traceback=args.traceback):
        script = import_script(args.script)
        make_model = _function(script, args.model, "--model", "makes the model from a key")
        dump = read_crash_dump(folder_path(args.folder), make_model)
        # Another one would find nothing, or something else.
        if args.loss is None and dump.loss_name != "loss_fn":
            was = repr(dump.loss_name) if dump.loss_name else "a function without a name"
            raise UsageError(
                f"the loss function of the run was {was}; give its name in {args.script} "
                "by --loss."
            )
        loss_fn = _function(script, args.loss or "loss_fn", "--loss", "is the loss")
    first, last = dump.steps[0], dump.steps[-1]
    print(f"steps {first} to {last} were not finite; step {first}:")
    print(replay(dump, loss_fn))
    return 0


def _function(script: ModuleType, name: str, option: str, does: str) -> Any:
    found = getattr(script, name, None)
    if not callable(found):
        raise UsageError(
            f"{script.__file__} has no function {name}; name the one that {does} by "
            f"{option} NAME."
        )
    return found


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
