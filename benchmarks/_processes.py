"""Contestants that run in processes of their own: start, command and stop them."""

import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from _side_by_side import Turn

_PEERS = Path(__file__).parent / "_peers"


class ProcessEnded(Exception):
    """A contestant's process has ended."""


class Contestant:
    """A module of `_peers` in one process, or in several that train together.

    The processes are idle between commands, so each contestant has the devices and cores
    to itself while it works.
    """

    def __init__(
        self,
        module: str,
        task: Any,
        *,
        processes: int = 1,
        env: Mapping[str, str] | None = None,
    ):
        group = {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        self._name = module
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(_PEERS), module, json.dumps(dataclasses.asdict(task))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **(env or {}), **group, "RANK": str(rank)},
            )
            for rank in range(processes)
        ]

    def ready(self) -> None:
        """Wait until the contestant is built."""
        self._answers()

    def ask(self, command: str) -> dict[str, float]:
        """Run a command; return the first process's results and the slowest one's time."""
        for process in self._processes:
            assert process.stdin is not None
            # A process that has ended is reported below, when it does not answer.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(command + "\n")
                process.stdin.flush()
        answers = self._answers()
        return answers[0] | {"seconds": max(answer["seconds"] for answer in answers)}

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            # communicate() flushes stdin, but the process is gone.
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answers(self) -> list[dict[str, float]]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ProcessEnded(
                    f"The process of {self._name} has ended; see its output above."
                )
            lines.append(json.loads(line))
        return lines


def share_platform(device: str) -> bool:
    """Have this process and the contestants share a platform; True if it is a GPU.

    **Arguments:**

    - `device`: `cpu`, or `auto` for a GPU if there is one.
    """
    if device == "cpu":
        # For this process, which has already read the variable, and for the contestants.
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"
    # All contestants share the GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return jax.devices()[0].platform == "gpu"


def turn(
    name: str, process: Contestant, command: str, results: list[dict[str, float]]
) -> Turn:
    """A turn that gives a contestant a command, and adds its answer to a list.

    The first one waits until the contestant is built. If its process ends, the seconds are
    NaN, so that the others can go on.
    """

    def take() -> float:
        if not results:
            process.ready()
        result = process.ask(command)
        results.append(result)
        figures = {k: v for k, v in result.items() if not k.endswith("seconds")}
        text = "".join(f", {key} {value:.4f}" for key, value in figures.items())
        print(
            f"{name}, {command} {len(results)}: {result['seconds']:.2f} s{text}",
            file=sys.stderr,
        )
        return result["seconds"]

    return or_nan(take)


def or_nan(turn: Turn) -> Turn:
    """Wrap a turn to return NaN if its process ends, so that the others can go on."""

    def guarded() -> float:
        try:
            return turn()
        except ProcessEnded as error:
            print(error, file=sys.stderr)
            return math.nan

    return guarded


def without_failed(values: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Drop the contestants that failed in any round, with a message for each."""
    failed = [name for name, figures in values.items() if math.isnan(sum(figures))]
    for name in failed:
        print(f"{name} FAILED and is left out of the results.")
    return {name: figures for name, figures in values.items() if name not in failed}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
