"""Compile several steps at a time, and keep what they need on disk."""

import os
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from ._backends import Backend
from ._kept import keep_plan, read_plan
from ._make_plan import make_plan
from ._plan import Plan
from ._request import Request, dump_request

#: What a compile takes, of memory.
_EACH = 4e9


def default_folder() -> Path:
    """Where plans are kept: in the user's cache."""
    return platformdirs.user_cache_path("eqxshard") / "plans"


def default_workers() -> int:
    """How many compiles cores and memory allow at a time."""
    cores = os.cpu_count() or 1
    return max(1, min(cores, int(_free_memory() / _EACH)))


def _free_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(free[0]) if free else float("inf")


def compile_all(
    requests: Mapping[str, Request], where: Backend, folder: Path, workers: int
) -> dict[str, Plan | str]:
    """Plan each request, unless its plan is in the folder.

    **Arguments:**

    - `requests`: by their fingerprints, in the order to compile them.
    - `where`: the compiler.
    - `folder`: where plans are kept, each in a file named by its fingerprint.
    - `workers`: how many to compile at a time.

    **Returns:**

    By fingerprint, the plan, or why there is none.
    """
    kept = {key: read_plan(folder / f"{key}.json") for key in requests}
    found: dict[str, Plan | str] = {k: plan for k, plan in kept.items() if plan is not None}
    queue = [key for key in requests if key not in found]
    if not queue:
        return found
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    progress = Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    )
    bar = progress.add_task("compiling", total=len(queue))
    running: dict[Future[Plan], str] = {}
    # Nothing waits in the pool: an interrupt ends what runs, and starts no more.
    with progress, ThreadPoolExecutor(workers) as pool:
        while queue or running:
            while queue and len(running) < workers:
                key = queue.pop(0)
                # Here, because JAX's settings may be those of a thread.
                data = dump_request(requests[key])
                running[pool.submit(make_plan, data, where)] = key
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(done)
                found[key] = made = _result(done)
                # Errors may be of this moment, and are not kept.
                if isinstance(made, Plan):
                    keep_plan(made, folder / f"{key}.json")
                progress.advance(bar)
    return found


def _result(done: Future[Plan]) -> Plan | str:
    try:
        return done.result()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error).strip().split("\n")[0]
