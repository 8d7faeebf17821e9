"""The services that a run can send its metrics to, by name."""

from typing import Literal, NamedTuple

from .._errors import UsageError
from ..sharding._text import comma_list
from ._mlflow import MLflow
from ._wandb import WandB

#: The keys of `SERVICES`.
ServiceName = Literal["wandb", "mlflow"]


class Service(NamedTuple):
    """A service that a run can send its metrics to.

    - `tracker`: its tracker, which imports the package when it is made.
    - `package`: the package that the tracker needs.
    - `extra`: the extra of eqxshard that installs the package.
    """

    tracker: type[WandB] | type[MLflow]
    package: str
    extra: str


SERVICES = {
    "wandb": Service(WandB, package="wandb", extra="wandb"),
    "mlflow": Service(MLflow, package="mlflow", extra="mlflow"),
}


def find_service(name: str) -> Service:
    """The service of this name; raise `ValueError` if there is none."""
    if name not in SERVICES:
        raise UsageError(
            f"{name!r} is not a service that metrics can be sent to; use one of "
            f"{comma_list(SERVICES)}."
        )
    return SERVICES[name]
