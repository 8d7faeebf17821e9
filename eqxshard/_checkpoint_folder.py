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
_KEYS = {"step", "leaves", "loader", "metrics"}
#: What says that the numbered folders beside it are ours.
_MARK = "eqxshard.txt"
_MARK_SAYS = (
    "The numbered folders here are checkpoints of eqxshard, which removes old ones.\n"
)


class CheckpointFolder:
    """A folder with a sealed folder for each step that was saved.

    **Arguments:**

    - `path`: of the folder, which need not be there yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = folder_path(path)
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
        if not self.path.is_dir():
            raise ValueError(
                f"{self.path} is a file and not a folder; give the checkpoints a folder."
            )
        folders = [path for path in self.path.iterdir() if _is_step(path.name)]
        return sorted(int(path.name) for path in folders if is_sealed(path))

    def good_steps(self) -> list[int]:
        """Those of them that were not found damaged."""
        return [step for step in self.steps() if step not in self._damaged]

    def described(self, step: int) -> Any:
        """What the checkpoint of a step says of itself: a dict, if it is ours."""
        return json.loads((self.at(step) / _DESCRIPTION).read_text())

    def check(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself; raise if it is not there, or damaged."""
        steps = self.steps()
        if step not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.path}; there is: "
                f"{listed(steps)}."
            )
        damage, described = self._inspect(step)
        if damage is not None:
            others = [other for other in steps if other != step]
            raise ValueError(
                f"{self.in_words(step)} is damaged: {damage}; use another: "
                f"{listed(others)}."
            )
        return described

    def _inspect(self, step: int) -> tuple[str | None, Any]:
        """What is wrong with a checkpoint, if anything, and what it says of itself."""
        damage = find_damage(self.at(step))
        if damage is not None:
            return damage, None
        try:
            described = self.described(step)
        except (OSError, ValueError):
            described = ()
        ours = all(key in described for key in _KEYS)
        return None if ours else f"{_DESCRIPTION} is not of eqxshard", described

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
            except FileNotFoundError as error:
                return found | {"error": str(error), "missing": True}
            except ValueError as error:
                return found | {"error": str(error), "damaged": [step]}
        damages = []
        for candidate in reversed(self.steps()):
            damage, described = self._inspect(candidate)
            if damage is None:
                return found | {"step": candidate, "described": described}
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

    def claim(self) -> str | None:
        """Make the folder ours; why that cannot be, in words, or `None`.

        What is in it with a number for a name is removed one day, and must not be others'.
        """
        try:
            if (self.path / _MARK).exists():
                return None
            there = self.path.iterdir() if self.path.exists() else ()
            numbered = [path.name for path in there if _is_ours(path.name)]
            if numbered and not self.steps():
                return (
                    f"{self.path} has {min(numbered)!r}, which is no checkpoint of "
                    "eqxshard; give the run a folder of its own."
                )
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / _MARK).write_text(_MARK_SAYS)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return (
                f"checkpoints cannot be written to {self.path}: {error.strerror or error}; "
                "give a folder that can be written to."
            )
        return None

    def remove(self, step: int) -> None:
        """Remove what there is of a step."""
        _remove(self.at(step))

    def clean(self) -> None:
        """Remove what was being written when a run was killed."""
        for path in self.path.iterdir():
            if _is_ours(path.name) and not (_is_step(path.name) and is_sealed(path)):
                _remove(path)


def folder_path(path: str | os.PathLike[str]) -> Any:
    """A folder, local or not, as an `etils.epath.Path`."""
    # Late: Orbax's paths take a while to import, and not every run has them.
    from etils import epath

    remote = "://" in os.fspath(path)
    try:
        return epath.Path(path if remote else os.path.abspath(path))
    except (ImportError, KeyError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is on no file system that is known here ({error}); use a "
            "local folder, or install what reaches it, such as gcsfs for gs://."
        ) from error


def listed(steps: list[int]) -> str:
    """Steps in words."""
    return ", ".join(f"step {step}" for step in steps) or "none"


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _is_ours(name: str) -> bool:
    """Whether a folder is a step's, or one that Orbax is making for it."""
    return _is_step(name.partition(".orbax-checkpoint-tmp")[0])


def _remove(folder: Any) -> None:
    if folder.exists():
        folder.rmtree(missing_ok=True)
