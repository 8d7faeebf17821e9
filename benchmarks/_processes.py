"""Contestants that are processes: started, asked to do their work once, and ended."""

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


class Ended(Exception):
    """A process that was to work is no more."""


class Contestant:
    """A module of `_peers` in a process, or in several that work together.

    Each stands still, without any work of its own, until it is asked. (So that each has
    the devices and the threads that it would have alone.)
    """

    def __init__(
        self,
        module: str,
        task: Any,
        *,
        processes: int = 1,
        env: Mapping[str, str] | None = None,
    ):
        together = {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        self._name = module
        self._all = [
            subprocess.Popen(
                [sys.executable, str(_PEERS), module, json.dumps(dataclasses.asdict(task))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **(env or {}), **together, "RANK": str(rank)},
            )
            for rank in range(processes)
        ]

    def ready(self) -> None:
        """Wait until everything is built."""
        self._answers()

    def ask(self, order: str) -> dict[str, float]:
        """Have it work, and wait: what the slowest process took, what the first found."""
        for process in self._all:
            assert process.stdin is not None
            # One that has ended is found out when it does not answer.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(order + "\n")
                process.stdin.flush()
        answers = self._answers()
        return answers[0] | {"seconds": max(answer["seconds"] for answer in answers)}

    def close(self) -> None:
        for process in self._all:
            process.kill()
            # It is not told anything any more.
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
        for process in self._all:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Ended(f"{self._name} ended; what it wrote says why.")
            lines.append(json.loads(line))
        return lines


def or_nan(turn: Turn) -> Turn:
    """So that one that ends does not end the others."""

    def tried() -> float:
        try:
            return turn()
        except Ended as error:
            print(error, file=sys.stderr)
            return math.nan

    return tried


def without_failed(values: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """The figures of those that went on to the end; of the others, it is said."""
    failed = [name for name, figures in values.items() if math.isnan(sum(figures))]
    for name in failed:
        print(f"{name} FAILED, and is left out.")
    return {name: figures for name, figures in values.items() if name not in failed}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
