"""Which epoch a step is in, and where in it, also where the batch size has changed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Steps with one batch size; the epoch that they start in may have begun before.

    - `first`: the first of them.
    - `size`: the batch size.
    - `epoch`, `start`: the epoch of the first, and the place in it where its batch starts.
    - `passed`: the part of that epoch that had passed then, from 0 to 1.
    - `length`: the number of places in an epoch.
    - `fills`: whether the last batch of an epoch is filled up, or dropped.
    """

    first: int
    size: int
    epoch: int
    start: int
    passed: float
    length: int
    fills: bool

    @property
    def left(self) -> int:
        """The number of steps that are left of the epoch of the first one."""
        return self._count(self.length - self.start)

    @property
    def each(self) -> int:
        """The number of steps in each later epoch."""
        return self._count(self.length)

    @property
    def remainder(self) -> int:
        """The places of an epoch that fill no batch: of the first one, or of a later."""
        return (self.length - self.start) % self.size or self.length % self.size

    def _count(self, places: int) -> int:
        return places // self.size + (self.fills and places % self.size > 0)


@dataclass(frozen=True)
class Steps:
    """Where the batch of each step is in the order of the examples.

    - `stretches`: one for each batch size, in order; the first starts at step 0.
    """

    stretches: tuple[Stretch, ...]

    @staticmethod
    def of(size: int, length: int, *, fills: bool = True) -> "Steps":
        """The steps of a run with one batch size, and epochs of some length."""
        return Steps((Stretch(0, size, 0, 0, 0.0, length, fills),))

    @staticmethod
    def with_sizes(
        sizes: Iterable[tuple[int, int]], length: Callable[[int], int], *, fills: bool
    ) -> "Steps":
        """The steps of a run, given from which step on it had which batch size.

        **Arguments:**

        - `sizes`: pairs of a step and a batch size, in order, the first for step 0.
        - `length`: the number of places in an epoch, given the batch size.
        """
        (_, size), *later = sizes
        steps = Steps.of(size, length(size), fills=fills)
        for first, size in later:
            steps = steps.change(first, size, length(size))
        return steps

    def change(self, step: int, size: int, length: int) -> "Steps":
        """These until a step, and from there on those of another batch size."""
        fills = self.last.fills
        before = Steps(tuple(each for each in self.stretches if each.first < step))
        if not before.stretches:
            return Steps.of(size, length, fills=fills)
        if before.last.size == size:
            return before
        epoch, start = before.place(step)
        passed = before.epochs(step) - epoch
        new = Stretch(step, size, epoch, start, passed, length, fills)
        return Steps((*before.stretches, new))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """From which step on there was which batch size."""
        return [(each.first, each.size) for each in self.stretches]

    @property
    def last(self) -> Stretch:
        """The last stretch, which does not end."""
        return self.stretches[-1]

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step's batch, and the place in it where the batch starts."""
        at = self._stretch(step)
        taken = step - at.first
        if taken < at.left:
            return at.epoch, at.start + taken * at.size
        later, batch = divmod(taken - at.left, at.each)
        return at.epoch + 1 + later, batch * at.size

    def size(self, step: int) -> int:
        """The batch size of a step."""
        return self._stretch(step).size

    def epochs(self, step: int) -> float:
        """How many epochs have passed before a step's batch."""
        at = self._stretch(step)
        taken = step - at.first
        if taken < at.left:
            return at.epoch + at.passed + (1 - at.passed) * taken / at.left
        return ((at.epoch + 1) * at.each + taken - at.left) / at.each

    def end(self, epochs: int) -> int:
        """The number of steps after which some epochs have ended."""
        for at in reversed(self.stretches):
            if epochs > at.epoch:
                return at.first + at.left + (epochs - at.epoch - 1) * at.each
        return 0

    def next_end(self, step: int) -> int:
        """The number of steps after which the epoch of a step's batch has ended."""
        return self.end(self.place(step)[0] + 1)

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch has ended after some steps."""
        return self.end(self.place(step)[0]) == step

    def _stretch(self, step: int) -> Stretch:
        return next(each for each in reversed(self.stretches) if each.first <= step)
