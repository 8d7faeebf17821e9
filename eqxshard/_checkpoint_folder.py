"""The folder of a run's checkpoints: which there are, which are whole, which may go."""

import json
import logging
import os
from collections.abc import Collection
from typing import Any

from ._sealed import find_damage, is_sealed, seal, unseal
from .distributed import from_first, is_first

_LOG = logging.getLogger(__name__)

#: What a checkpoint says of itself, for people and for whoever reads it.
_DESCRIPTION = "description.json"


class CheckpointFolder:
    """A folder with a sealed folder for each step that was saved.

    **Arguments:**

    - `path`: of the folder, which need not be there yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        # Late: Orbax's paths take a while to import, and not every run has them.
        from etils import epath

        remote = "://" in os.fspath(path)
        self.path = epath.Path(path if remote else os.path.abspath(path))
        #: The steps whose checkpoints were found damaged.
        self._damaged: set[int] = set()

    def at(self, step: int) -> Any:
        """The folder of a step."""
        return self.path / str(step)

    def in_words(self, step: int) -> str:
        """The checkpoint of a step, for messages."""
        return f"the checkpoint of step {step} in {self.path}"

    def steps(self) -> list[int]:
        """The steps that there are finished checkpoints of, in order."""
        if not self.path.exists():
            return []
        folders = [path for path in self.path.iterdir() if _is_step(path.name)]
        return sorted(int(path.name) for path in folders if is_sealed(path))

    def good_steps(self) -> list[int]:
        """Those of them that were not found damaged."""
        return [step for step in self.steps() if step not in self._damaged]

    def described(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step says of itself, if it is whole."""
        return json.loads((self.at(step) / _DESCRIPTION).read_text())

    def check(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself; raise if it is not there, or damaged."""
        steps = self.steps()
        if step not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.path}; there is: "
                f"{listed(steps)}."
            )
        damage = find_damage(self.at(step))
        if damage is not None:
            others = [other for other in steps if other != step]
            raise ValueError(
                f"{self.in_words(step)} is damaged: {damage}; use another: "
                f"{listed(others)}."
            )
        return self.described(step)

    def choose(self, step: int | None) -> tuple[int, dict[str, Any]]:
        """The newest checkpoint that is whole, or that of a step, and what it says.

        The first process looks, for all of them.
        """
        found = from_first(self._find(step) if is_first() else None)
        self._damaged.update(found["damaged"])
        if found["error"] is not None:
            kind = FileNotFoundError if found["missing"] else ValueError
            raise kind(found["error"])
        return found["step"], found["described"]

    def _find(self, step: int | None) -> dict[str, Any]:
        """As `choose`, in words that processes can send each other."""
        found: dict[str, Any] = {"damaged": [], "error": None, "missing": False}
        if step is not None:
            try:
                return found | {"step": step, "described": self.check(step)}
            except (FileNotFoundError, ValueError) as error:
                missing = isinstance(error, FileNotFoundError)
                return found | {"error": str(error), "missing": missing}
        damages = []
        for candidate in reversed(self.steps()):
            damage = find_damage(self.at(candidate))
            if damage is None:
                return found | {"step": candidate, "described": self.described(candidate)}
            found["damaged"].append(candidate)
            damages.append(f"step {candidate}: {damage}")
            _LOG.warning(
                "%s is damaged (%s); using the one before it.",
                self.in_words(candidate),
                damage,
            )
        if damages:
            error = (
                f"all checkpoints in {self.path} are damaged ({', '.join(damages)}); start "
                "anew in another directory."
            )
            return found | {"error": error}
        error = f"there is no checkpoint in {self.path}; start a run there first."
        return found | {"error": error, "missing": True}

    def finish(self, described: dict[str, Any]) -> None:
        """Seal the checkpoint that is described, whose arrays are written."""
        folder = self.at(described["step"])
        (folder / _DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n")
        seal(folder)
        self._damaged.discard(described["step"])

    def keep_only(self, steps: Collection[int | None]) -> None:
        """Remove the checkpoints of other steps."""
        for step in set(self.steps()) - set(steps):
            unseal(self.at(step))
            self.remove(step)
            self._damaged.discard(step)

    def remove(self, step: int) -> None:
        """Remove what there is of a step."""
        _remove(self.at(step))

    def clean(self) -> None:
        """Make the folder; remove what was being written when a run was killed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            begun = path.name.partition(".orbax-checkpoint-tmp")[0]
            if _is_step(begun) and not (begun == path.name and is_sealed(path)):
                _remove(path)


def listed(steps: list[int]) -> str:
    """Steps in words."""
    return ", ".join(f"step {step}" for step in steps) or "none"


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _remove(folder: Any) -> None:
    if folder.exists():
        folder.rmtree(missing_ok=True)
