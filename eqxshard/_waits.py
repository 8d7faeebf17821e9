"""Waits for other processes: each has a name and a limit, at which all say who is missing.

In each process, a thread watches its waits. When one takes too long, the thread asks all
processes where they are, through the key-value store of JAX's coordination service; then it
decides whether all of them end, and tells them.
"""

import atexit
import contextlib
import itertools
import json
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ._errors import UsageError

#: How often a process looks for questions, at most.
_LOOK_SECONDS = 5.0
#: How long a process may take to answer.
_ANSWER_SECONDS = 30.0
#: Of how many missing processes the stacks are printed, and how many frames of each.
_STACKS, _FRAMES = 3, 20

#: The waits of this process, and those that are over, with when they ended.
_waits: list["Wait"] = []
_over: deque[tuple[str, float]] = deque(maxlen=100)
_gathers = itertools.count()
#: The one that looks at them, once there are several processes.
watches: list["Watch"] = []


@dataclass(eq=False)
class Wait:
    """What a thread does, or waits for.

    - `what`: what is waited for, in words.
    - `name`: what all processes call it.
    - `for_others`: whether this process does nothing itself meanwhile.
    - `thread`: the thread that waits.
    - `began`, `since`: when it began, and from when its limit counts.
    """

    what: str
    name: str
    for_others: bool
    thread: int
    began: float
    since: float


@contextlib.contextmanager
def waiting(what: str, *, for_others: bool = False, name: str = "") -> Iterator[None]:
    """Name what is done in a `with` block, in which processes may wait for each other.

    It may take any time while all processes are in it; and no longer than the limit while
    one of them is elsewhere.

    **Arguments:**

    - `what`: completes "waiting for ..."; the same in all processes.
    - `for_others`: whether the block only waits, for other processes or for devices, so
        that the limit is for all.
    - `name`: tells it from others that are called the same.
    """
    now = time.monotonic()
    wait = Wait(what, name or what, for_others, threading.get_ident(), now, now)
    _waits.append(wait)
    try:
        yield
    finally:
        _waits.remove(wait)
        _over.append((wait.name, time.monotonic()))


def gather(what: str | None, value: Any) -> list[Any]:
    """The JSON value of each process, in each process.

    **Arguments:**

    - `what`: what it is for; by default, what this thread is waiting for.
    - `value`: this process's own.

    **Raises:**

    `ValueError` if the processes are at different places.
    """
    (watch,) = watches
    service, number, me = watch.service, next(_gathers), jax.process_index()
    if what is None:
        mine = [wait.what for wait in _waits if wait.thread == threading.get_ident()]
        what = mine[-1] if mine else "the answers of all processes"
    with waiting(what, for_others=True, name=f"gather {number}"):
        folder = f"eqxshard/gather/{number}/"
        service.key_value_set(f"{folder}{me}", json.dumps([what, value]))
        # The watch ends the process long before.
        service.wait_at_barrier("eqxshard", int(2000 * watch.limit + 60_000))
        found = sorted((int(p), said) for p, said in _read(service, folder).items())
    # All have read what was before.
    if number:
        service.key_value_delete(f"eqxshard/gather/{number - 1}/{me}")
    if differ := differences(f"for {place}" for _, (place, _) in found):
        raise UsageError(
            f"the processes of this run wait for different things: {differ}. Start all of "
            "them alike."
        )
    return [theirs for _, (_, theirs) in found]


def differences(said: Iterable[str]) -> str | None:
    """Which processes say what, given what each says; `None` if it is the same."""
    processes: dict[str, list[str]] = {}
    for process, text in enumerate(said):
        processes.setdefault(text, []).append(str(process))
    if len(processes) == 1:
        return None
    return "; ".join(
        f"{text} in process {', '.join(numbers)}" for text, numbers in processes.items()
    )


def _coordinator() -> Any:
    """The client of JAX's coordination service, which has no public name."""
    from jax.experimental import multihost_utils

    module: Any = multihost_utils
    return module.distributed.global_state.client


class Watch(threading.Thread):
    """Looks at the waits of this process, and answers questions of the others.

    **Arguments:**

    - `limit`: how long, in seconds, one may wait.
    - `end`: prints a text, and ends the process.
    """

    def __init__(self, limit: float, end: Callable[[str], None]):
        super().__init__(name="eqxshard-waits", daemon=True)
        self.limit = limit
        self.end = end
        self._stopped = threading.Event()
        self.service = _coordinator()
        self._me, self._count = jax.process_index(), jax.process_count()
        host = json.dumps(socket.gethostname())
        self.service.key_value_set(f"eqxshard/host/{self._me}", host)
        #: How many questions there were.
        self._round = 0

    def run(self) -> None:
        """Look, until stopped."""
        while not self._stopped.wait(min(_LOOK_SECONDS, self.limit / 10)):
            # Without the service, JAX ends the process itself.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._look()

    def stop(self) -> None:
        """Stop looking: Python would abort if it ended while this thread is in C++."""
        self._stopped.set()
        self.join()

    def _look(self) -> None:
        folder = f"eqxshard/question/{self._round}/"
        question = self._read(folder).get("asked")
        if question is None:
            late = [w for w in [*_waits] if time.monotonic() - w.since >= self.limit]
            if not late:
                return
            question = self._ask(folder, late[-1])
        answer = json.dumps(self._answer(question["name"]))
        self.service.key_value_set(f"{folder}answer/{self._me}", answer, True)
        self._round += 1
        if question["process"] == self._me:
            says = self._decide(question, self._collect(f"{folder}answer/"))
            self.service.key_value_set(f"{folder}says", json.dumps(says), True)
        else:
            # If it does not say, because it is frozen itself, another one will ask.
            wait = int(2000 * min(_ANSWER_SECONDS, self.limit) + 2000)
            says = json.loads(self.service.blocking_key_value_get(f"{folder}says", wait))
        if says is not None:
            is_ours = question["process"] == self._me
            own = "" if is_ours else f"{self._own_words(question['name'])}\n"
            self.end(f"{own}{says}")
        # All are there, and go on. The limit counts from now.
        for wait in [w for w in [*_waits] if w.name == question["name"]]:
            wait.since = time.monotonic()
        self.service.key_value_delete(f"{folder}answer/{self._me}")

    def _ask(self, folder: str, wait: Wait) -> dict[str, Any]:
        question = {"what": wait.what, "name": wait.name, "for_others": wait.for_others}
        question |= {"process": self._me, "waited": time.monotonic() - wait.began}
        # Another one may ask at the same time.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.service.key_value_set(f"{folder}asked", json.dumps(question))
        return self._read(folder)["asked"]

    def _answer(self, name: str) -> dict[str, Any]:
        """Where this process is, and for how long it has not been at a wait."""
        now, waits = time.monotonic(), [*_waits]
        left = max((when for other, when in [*_over] if other == name), default=None)
        frames = sys._current_frames()
        threads = {threading.main_thread().ident, *(w.thread for w in waits)}
        stacks = [
            traceback.format_stack(frames[thread], _FRAMES)
            for thread in threads
            if thread in frames
        ]
        return {
            "away": 0 if any(w.name == name for w in waits) else left and now - left,
            "waits": any(w.for_others for w in waits),
            "what": waits[-1].what if waits else None,
            "stack": "".join(line for stack in stacks for line in stack),
        }

    def _collect(self, folder: str) -> list[dict[str, Any] | None]:
        """The answer of each process; `None` of one that does not answer in time."""
        until = time.monotonic() + min(_ANSWER_SECONDS, self.limit)
        while True:
            found = self._read(folder)
            if len(found) == self._count or time.monotonic() > until:
                return [found.get(str(process)) for process in range(self._count)]
            time.sleep(0.1)

    def _decide(
        self, question: dict[str, Any], answers: list[dict[str, Any] | None]
    ) -> str | None:
        """What all processes say before they end; `None` if they go on."""
        if not any(w.name == question["name"] for w in [*_waits]):
            return None  # The last one has come meanwhile.
        missing = {
            p: says for p, says in enumerate(answers) if says is None or says["away"] != 0
        }
        # Those that wait themselves are not the cause.
        causes = {
            p: says for p, says in missing.items() if says is None or not says["waits"]
        }
        if not question["for_others"]:
            # Each that waits asks itself, once its own time is over.
            waits = len(causes) < len(missing)
            if waits or not any(
                _is_long_gone(says, self.limit) for says in causes.values()
            ):
                return None
        hosts = self._read("eqxshard/host/")
        names = [f"process {p} on {hosts.get(str(p), '?')}" for p in range(self._count)]
        says = [
            f"{names[self._me]} has waited {question['waited']:.0f} s for "
            f"{question['what']}, longer than wait_seconds={self.limit:g}."
        ]
        if not missing:
            says += ["All wait for it; see whether the network between them works."]
        named = [*(causes or missing)]
        for process in named[:_STACKS]:
            says += [_describe(names[process], answers[process])]
        if len(named) > _STACKS:
            says += [f"Nor have come: {', '.join(names[p] for p in named[_STACKS:])}."]
        says += [
            "All processes end with status 1; start the run again, to resume from its "
            "newest checkpoint, or give wait_seconds or $EQXSHARD_WAIT_SECONDS more."
        ]
        return "\n".join(says)

    def _own_words(self, asked: str) -> str:
        mine = [wait for wait in [*_waits] if wait.for_others or wait.name == asked]
        if not mine:
            return f"the others wait for process {self._me}."
        waited = time.monotonic() - mine[-1].began
        return f"process {self._me} has waited {waited:.0f} s for {mine[-1].what}."

    def _read(self, folder: str) -> dict[str, Any]:
        return _read(self.service, folder)


def watch(limit: float, end: Callable[[str], None]) -> None:
    """Watch the waits of this process until its end, for which all wait.

    **Arguments:**

    - `limit`: how long, in seconds, one may wait.
    - `end`: prints a text, and ends the process.
    """
    if not watches:
        watches.append(Watch(limit, end))
        watches[0].start()
        # Before JAX's own, whose end is a stack of C++.
        atexit.register(_leave, watches[0])


def _leave(watch: Watch) -> None:
    try:
        if jax.distributed.is_initialized():
            gather("the end of the script", None)
    except Exception:
        watch.end(traceback.format_exc())
    finally:
        watch.stop()


def _read(service: Any, folder: str) -> dict[str, Any]:
    """The JSON values below a key."""
    found = service.key_value_dir_get(folder)
    return {key.removeprefix(folder): json.loads(value) for key, value in found}


def _is_long_gone(answer: dict[str, Any] | None, limit: float) -> bool:
    return answer is None or answer["away"] is None or answer["away"] >= limit


def _describe(name: str, answer: dict[str, Any] | None) -> str:
    """A process that is missing."""
    if answer is None:
        return f"{name} does not answer: it, or its host, is frozen or gone."
    stack = answer["stack"].rstrip()
    at = f"at {answer['what']}" if answer["what"] else "here"
    return f"{name} has not come; it is {at}:\n{stack}"
