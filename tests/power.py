"""A loss of power, simulated: only what was synced is on the disk.

A `Disk` records what `os.fsync` makes safe of a folder: the bytes of a file; of a folder,
which files and folders it has under which names, though not what is in these. What other
libraries sync by themselves is not recorded, so more is lost than would be.
"""

import contextlib
import ctypes
import json
import os
import random
import shutil
import stat
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOT_THROUGH_LINKS, _WHEN_BORN = 0x100, 0x800


def _identity(path: str) -> str:
    """The identity of a file or folder, whatever its name: inode numbers are reused."""
    found = ctypes.create_string_buffer(256)
    where = ctypes.c_char_p(os.fsencode(path))
    if _LIBC.statx(-100, where, _NOT_THROUGH_LINKS, _WHEN_BORN, found):
        raise OSError(ctypes.get_errno(), "statx", path)
    seconds, nanoseconds = struct.unpack_from("<qI", found.raw, 80)
    return f"{os.lstat(path).st_ino}-{seconds}-{nanoseconds}"


class Disk:
    """The contents of a folder on the disk.

    **Arguments:**

    - `root`: the folder.
    - `safe`: another folder, for the records.
    """

    def __init__(self, root: Path, safe: Path):
        self.root, self.safe = root, safe
        safe.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this process syncs."""
        fsync = os.fsync

        def synced(file: Any) -> None:
            fsync(file)
            number = file if isinstance(file, int) else file.fileno()
            path = os.readlink(f"/proc/self/fd/{number}")
            if Path(path).is_relative_to(self.root):
                self._record(path)

        os.fsync = synced
        try:
            yield
        finally:
            os.fsync = fsync

    def _record(self, path: str) -> None:
        part = self.safe / f"part-{uuid.uuid4().hex}"
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                kinds = {x.name: (x.is_dir(), _identity(x.path)) for x in entries}
            part.write_text(json.dumps(kinds))
        else:
            shutil.copyfile(path, part)
        part.rename(self.safe / _identity(path))

    def lose(self, into: Path, rng: random.Random | None = None) -> None:
        """Write what is left after a loss of power.

        **Arguments:**

        - `into`: a new folder.
        - `rng`: chance decides on each thing that was not synced; without it, all of them
            are lost.
        """
        self._lose(self.root, _identity(os.fspath(self.root)), into, rng)

    def _lose(
        self, now: Path | None, identity: str, into: Path, rng: random.Random | None
    ) -> None:
        """Like `lose`, for a folder whose present contents are in `now`."""
        into.mkdir()
        record = self.safe / identity
        there = json.loads(record.read_text()) if record.exists() else {}
        present = {}
        if rng is not None and now is not None and now.is_dir():
            for path in now.iterdir():
                present[path.name] = (path.is_dir(), _identity(os.fspath(path)))
        for name in sorted({*there, *present}):
            old, new = there.get(name), present.get(name)
            entry = new if rng is not None and rng.random() < 0.5 else old
            if entry is None:
                continue
            is_folder, identity = entry
            path = None if new is None or [*new] != [*entry] or now is None else now / name
            if is_folder:
                self._lose(path, identity, into / name, rng)
            else:
                (into / name).write_bytes(self._bytes(path, identity, rng))

    def _bytes(self, now: Path | None, identity: str, rng: random.Random | None) -> bytes:
        record = self.safe / identity
        old = record.read_bytes() if record.exists() else b""
        if now is None or rng is None or not stat.S_ISREG(now.lstat().st_mode):
            return old
        new = now.read_bytes()
        if old == new:
            return old
        # Some file systems keep the size and lose the bytes.
        return rng.choice([old, new, new[: rng.randrange(len(new) + 1)], bytes(len(new))])

    def start_again(self) -> None:
        """After a loss: all that is there now is on the disk."""
        shutil.rmtree(self.safe)
        self.safe.mkdir()
        for top, _, files in os.walk(self.root):
            for path in (top, *(os.path.join(top, name) for name in files)):
                self._record(path)
