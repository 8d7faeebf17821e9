"""What C++ writes to standard error meanwhile, read without keeping it from anybody."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator

#: File descriptor 2 belongs to the process: one thread at a time.
_LOCK = threading.Lock()
#: Processes that were started meanwhile may keep their copy of the pipe.
_PATIENCE = 0.5


@contextlib.contextmanager
def read_stderr() -> Iterator[Callable[[], str]]:
    """Yields a function that returns, afterwards, what was written to standard error.

    All of it still goes where it went. (By a process of its own, `tee`: if a compiler
    crashes, its last words must not be lost with this process.) Where that cannot be, and
    in all but the first of several threads, the text is empty.
    """
    tee = shutil.which("tee")
    if tee is None or not _LOCK.acquire(blocking=False):
        yield lambda: ""
        return
    try:
        with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
            redirected = _redirect(tee, file.fileno(), stack)
            yield lambda: text
            stack.close()
            file.seek(0)
            text = file.read().decode(errors="replace") if redirected else ""
    finally:
        _LOCK.release()


def _redirect(tee: str, file: int, stack: contextlib.ExitStack) -> bool:
    """Send standard error through a `tee`, until the stack is closed."""
    try:
        original = os.dup(2)
    except OSError:  # A daemon may have closed it.
        return False
    stack.callback(os.close, original)
    process = subprocess.Popen(
        # Interrupts are for this process; its own ends when all writers are gone.
        [tee, "-i", f"/dev/fd/{file}"],
        stdin=subprocess.PIPE,
        stdout=original,
        stderr=subprocess.DEVNULL,
        pass_fds=(file,),
        start_new_session=True,
    )
    assert process.stdin is not None
    stack.callback(_wait, process)
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    stack.callback(os.dup2, original, 2)
    return True


def _wait(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
    # Not an error if it lives on for somebody else.
    process.returncode = process.returncode or 0
