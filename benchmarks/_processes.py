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
