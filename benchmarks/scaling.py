"""Examples per second by the number of simulated devices and of processes.

Weak scaling gives each device the same number of examples, strong scaling divides the same
batch over all. The baseline is `jax.jit` by hand, over the same mesh in the same processes,
which `eqxshard.launch` starts. All devices share the machine's cores: with more devices
than cores, examples per second can at best stay the same, an exponent of 0.

    python benchmarks/scaling.py --output build/benchmarks
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _side_by_side import Contest, Growth, Report, parser

#: Rows of a batch: of each device for weak scaling, of all for strong scaling.
WEAK, STRONG = 128, 512
STEPS = Path(__file__).parent / "_scaling_steps.py"


def measure(
    processes: int, devices: int, batch_sizes: Sequence[int], rounds: int, steps: int
) -> dict[int, dict[str, list[float]]]:
    """By batch size, the figures of both contestants in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launch = ["eqxshard.launch", "--processes", processes]
        launch += ["--devices-per-process", devices]
        script = [STEPS, result, "--rounds", rounds, "--steps", steps, "--batch-sizes"]
        words = [sys.executable, "-m", *launch, *script, *batch_sizes]
        subprocess.run([str(word) for word in words], check=True)
        found = json.loads(result.read_text())
    return {int(size): values for size, values in found.items()}


def scale(name: str, each: str, counts: Sequence[int], found: dict) -> list[Growth]:
    """Weak and strong scaling over `counts` devices or processes."""
    growths = []
    for kind, size in (("weak", lambda n: WEAK * n), ("strong", lambda n: STRONG)):
        contests = [
            Contest(
                f"{kind} scaling, {count} {each}, batch of {size(count)}",
                "examples/s",
                found[count][size(count)],
            )
            for count in counts
        ]
        growths.append(Growth(f"{kind} scaling over {name}", counts, contests))
    return growths


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N"
    )
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    options.add_argument("--steps", type=int, default=20, help="steps of each turn")
    args = options.parse_args()

    def both(processes: int, devices: int) -> dict[int, dict[str, list[float]]]:
        sizes = sorted({WEAK * processes * devices, STRONG})
        return measure(processes, devices, sizes, args.rounds, args.steps)

    of_devices = {count: both(1, count) for count in args.devices}
    of_processes = {
        count: of_devices[1] if count == 1 and 1 in of_devices else both(count, 1)
        for count in args.processes
    }
    growths = [
        *scale("simulated devices", "device(s)", args.devices, of_devices),
        *scale("processes", "process(es)", args.processes, of_processes),
    ]
    setting = {"rounds": args.rounds, "steps": args.steps}
    Report("scaling", [], setting, growths).show_and_write(args.output)


if __name__ == "__main__":
    main()
