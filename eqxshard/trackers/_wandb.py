"""Runs of Weights & Biases."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..distributed import is_main_process
from ._files import KeptRun
from ._packages import load, one_line
from ._tracker import Image, Value

_LOG = logging.getLogger(__name__)


class WandB:
    """Sends each report to a run of [Weights & Biases](https://docs.wandb.ai).

    Where it goes is set as for W&B itself: by `wandb login`, and by the environment's
    `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_TAGS` and the like. With `WANDB_MODE=offline`,
    or while the server cannot be reached when the run starts, everything is written to the
    folder, and `wandb sync` uploads it later. With several processes, only process 0 has a
    run.

    **Arguments:**

    - `directory`: for W&B's files, and `wandb.json`, in which the run's id is kept. Created
        if necessary.
    - `name`: the run's name; by default, W&B makes one up.
    - `settings`: what the run's config is to have, such as the script's arguments.
    - `resume`: continue the run whose id the folder has, if there is one. Steps that it has
        already are not sent again.

    **Raises:**

    `ImportError` if wandb is not installed. `ValueError` if W&B refuses the run, because
    nobody is logged in, say. During training, nothing: what fails is logged.

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
        self._wandb = load("wandb", "WandB", "'eqxshard[wandb]'")
        self._run: Any = None
        if not is_main_process():
            return
        self._kept = KeptRun(Path(directory) / "wandb.json", resume=resume)
        options = {"dir": os.fspath(directory), "name": name, "config": dict(settings)}
        # Beside other runs of the process, which a script may have.
        options |= {"id": self._kept.id, "resume": "allow", "reinit": "create_new"}
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            # Otherwise a server that is away at the end would hold the devices for ever.
            options["settings"] = {"finish_timeout": 600}
        self._run = self._start(options)
        self._kept.id = self._kept.id or self._run.id
        self._kept.keep(self._kept.after)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the values of a step; nothing waits until they have arrived."""
        if self._run is None or step <= self._kept.after:
            return
        try:
            sent = {name: self._native(value) for name, value in values.items()}
            self._run.log(sent, step=step)
        except Exception as error:
            # `fit` logs errors of this type, and goes on.
            raise OSError(f"W&B did not take the values of step {step}: {error}") from error
        self._kept.keep(step)

    def close(self, error: BaseException | None = None) -> None:
        """Finish the run, as finished or as failed; waits until all has arrived.

        If that takes longer than `WANDB_FINISH_TIMEOUT` seconds, ten minutes by default,
        the rest stays in the folder, for `wandb sync`.
        """
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=0 if error is None else 1)
        except Exception as failure:
            raise OSError(f"W&B did not finish the run: {failure}") from failure

    def _start(self, options: dict[str, Any]) -> Any:
        errors = self._wandb.errors
        try:
            return self._wandb.init(**options)
        except (errors.UsageError, errors.AuthenticationError) as error:
            raise UsageError(
                f"W&B refuses the run: {one_line(error)} Log in with `wandb login`, or set "
                "WANDB_MODE=offline to write files that `wandb sync` uploads later."
            ) from error
        except errors.CommError as error:
            # Under a new id, because this process still has the other in use.
            run = self._wandb.init(**(options | {"id": None}), mode="offline")
            _LOG.error(
                "W&B cannot be reached: %s Upload the run later: `wandb sync --id %s %s`.",
                one_line(error),
                self._kept.id or run.id,
                Path(run.dir).parent,
            )
            return run

    def _native(self, value: Value) -> Any:
        return self._wandb.Image(value.pixels) if isinstance(value, Image) else float(value)
