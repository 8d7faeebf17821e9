"""Runs of Weights & Biases."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..distributed import is_main_process
from ._metrics import Value, numbers
from ._writing import write_whole


class WandB:
    """Sends the numbers of each report to a run of [Weights & Biases](https://docs.wandb.ai).

    `wandb login` and W&B's own environment variables (`WANDB_PROJECT`, `WANDB_ENTITY`,
    `WANDB_TAGS` and others) choose the account, the project and the tags. With
    `WANDB_MODE=offline`, everything is written to the folder, and `wandb sync` uploads it
    later. With several processes, only process 0 has a run.

    **Arguments:**

    - `directory`: the folder of W&B's files, and of `wandb_run_id`, the file with the run's
        id. Created if necessary.
    - `name`: the run's name; by default, W&B makes one up.
    - `settings`: entries of the run's config, such as the script's arguments.
    - `resume`: continue the run whose id the folder has, if there is one. Steps that are
        taken again are sent again, and W&B ignores those that it has.

    **Raises:**

    `ImportError` if wandb is not installed: `pip install 'eqxshard[wandb]'`. `ValueError`
    if W&B refuses the run, for example because nobody is logged in, or if its server cannot
    be reached at the start. `log` and `close` raise `OSError` for other failures, which
    [`eqxshard.fit`][] logs.

    !!! Example

        ```python
        tracker = eqxshard.trackers.WandB("runs/mlp", name="mlp", settings={"width": 64})
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str | None = None,
        settings: Mapping[str, Any] = {},
        resume: bool = False,
    ):
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = None
        if not is_main_process():
            return
        file = Path(directory) / "wandb_run_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        options = {"dir": os.fspath(directory), "name": name, "config": dict(settings)}
        if resume and file.exists():
            options |= {"id": file.read_text(), "resume": "allow"}
        # Otherwise a server that is away at the end would hold the devices for ever.
        limit = float(os.environ.get("WANDB_FINISH_TIMEOUT", 600))
        try:
            # A script may have other runs in this process.
            self._run = wandb.init(
                **options, reinit="create_new", settings={"finish_timeout": limit}
            )
        except wandb.errors.Error as error:
            raise UsageError(
                f"W&B cannot start the run ({' '.join(str(error).split())}); log in with "
                "`wandb login`, or set WANDB_MODE=offline to write files that `wandb sync` "
                "uploads later."
            ) from error
        write_whole(file, self._run.id)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the numbers of a step, without waiting until they have arrived."""
        if self._run is None:
            return
        try:
            self._run.log({k: float(x) for k, x in numbers(values).items()}, step=step)
        except Exception as error:
            # `fit` logs errors of this type, and goes on.
            raise OSError(f"W&B did not take the values of step {step}: {error}") from error

    def close(self, error: BaseException | None = None) -> None:
        """End the run as finished or as failed; waits until everything has arrived.

        If that takes longer than `WANDB_FINISH_TIMEOUT` seconds, ten minutes by default,
        the rest stays in the folder, for `wandb sync`.
        """
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=0 if error is None else 1)
        except Exception as failure:
            raise OSError(f"W&B did not finish the run: {failure}") from failure
