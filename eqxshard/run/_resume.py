"""Decide whether a run resumes from its folder, starts anew, or is refused."""

import os

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._folder import is_claimed
from ..distributed import broadcast_from_first
from ._config import Resume
from ._paths import RunPaths, read_values


def should_resume(
    paths: RunPaths, resume: Resume, checkpointer: Checkpointer, *, overwrite: bool
) -> bool:
    """Decide whether to continue an earlier run; see `RunFolder.should_resume`.

    **Raises:**

    `ValueError` if there is a run and there should be none, or the reverse; or files that
    no run wrote have the names of a run's files.
    """
    # All processes go by what process 0 finds, before it creates the folder.
    found = [checkpointer.steps(), paths.path.is_dir(), is_claimed(paths.path)]
    found.append(_find_foreign(paths))
    steps, exists, has_checkpoints, foreign = broadcast_from_first(found)
    if has_checkpoints:
        raise UsageError(
            f"{paths.path} is a folder of checkpoints, not of a run; give the run's, "
            f"such as {paths.path.parent}."
        )
    if foreign is not None:
        raise UsageError(
            f"{paths.path / foreign} is not of a run of eqxshard, and this run would "
            "replace it; give another --output."
        )
    if resume == "no" and steps and not overwrite:
        raise UsageError(
            f"{paths.path} has a run at step {steps[-1]}; use --resume auto to continue "
            "it, --overwrite to remove it and start over, or another --output."
        )
    if resume == "yes" and not exists:
        raise UsageError(
            f"{paths.path} has no run to resume; leave --resume out, or use --resume auto."
        )
    return bool(steps) and resume != "no"


def _find_foreign(paths: RunPaths) -> str | None:
    """The name of a file that a run would replace, but that no run of ours wrote."""
    here = [file for file in paths.files if os.path.lexists(file)]
    links = [file for file in here if file.is_symlink()]
    is_ours = is_claimed(paths.checkpoints) or "starts" in read_values(paths.record)
    return next((file.name for file in (links if is_ours else here)), None)
