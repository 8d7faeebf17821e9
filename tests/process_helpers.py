"""Child processes that leave nothing behind."""

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes for stdout and stderr; at the end it is killed if it runs."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], **piped | options)
    # Closes the pipes.
    with process:
        try:
            yield process
        finally:
            process.kill()


def finished(command: Sequence[Any], *, seconds: float = 300, **options: Any) -> Any:
    """The status of a process, its stdout and its stderr."""
    with started(command, **options) as process:
        out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def read_until(
    process: subprocess.Popen[str], stream: IO[str] | None, text: str, seconds: float = 300
) -> list[str]:
    """The lines of a stream up to one that contains a text."""
    assert stream is not None
    lines: list[str] = []
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        for line in stream:
            lines.append(line)
            if text in line:
                return lines
    finally:
        timer.cancel()
    out, err = process.communicate()
    raise AssertionError(f"no line with {text!r}:\n{''.join(lines)}{out or ''}{err or ''}")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a launcher, in the order of their numbers."""
    children = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True)

    # Not in the order of their ids, which the system starts again from the lowest.
    numbers = {}
    for child in children.split():
        environment = Path(f"/proc/{child}/environ").read_text()
        for number in re.findall(r"\bEQXSHARD_PROCESS=(\d+)", environment):
            numbers[int(number)] = int(child)
    return [numbers[number] for number in sorted(numbers)]
