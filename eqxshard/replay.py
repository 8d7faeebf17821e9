"""`python -m eqxshard.replay DIR`: find the first value of a step that was not finite.

Reads the crash dump that [`eqxshard.fit`][] left behind, and goes through the step on one
device, one operation at a time: the batch, the parameters, the loss, the gradients.
"""

import sys

from ._parser import Parser, allow_closed_stdout
from .checkpoint._folder import folder_path
from .debug._crash_dump import read_crash_dump
from .debug._replay import replay


def main() -> int:
    """The command."""
    parser = Parser(
        prog="python -m eqxshard.replay",
        description="Find the first value that was not finite in the step of a crash dump.",
    )
    parser.add_argument("folder", help="the crash_dump folder that a run named")
    folder = parser.parse_args().folder
    try:
        dump = read_crash_dump(folder_path(folder))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    first, last = dump.steps[0], dump.steps[-1]
    print(f"steps {first} to {last} were not finite; step {first}:")
    print(replay(dump))
    return 0


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
