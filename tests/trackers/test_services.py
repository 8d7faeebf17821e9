import subprocess
import sys
from typing import Any, get_args

import pytest

from eqxshard.run import RunConfig, RunFolder
from eqxshard.trackers._services import SERVICES, ServiceName


def test_the_names_of_services_are_those_of_the_type():
    assert get_args(ServiceName) == (*SERVICES,)


def test_the_table_imports_no_package():
    packages = [service.package for service in SERVICES.values()]
    code = (
        "import sys, eqxshard.trackers._services; "
        f"assert sys.modules.keys().isdisjoint({packages})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Elsewhere:
    """A tracker of a service that is not in the table."""

    def __init__(self, directory, **options):
        self.options = options

    def log(self, step, values):
        pass

    def close(self, error=None):
        pass


def test_a_service_is_checked_and_started_by_the_table(tmp_path, monkeypatch, unannotated):
    wandb: Any = SERVICES["wandb"]
    other = wandb._replace(tracker=Elsewhere, package="no_such_package", extra="elsewhere")
    monkeypatch.setitem(SERVICES, "other", other)
    services: Any = ("other",)
    with pytest.raises(ValueError, match=r"package no_such_package, .*eqxshard\[elsewhere"):
        RunConfig(track=services).check()
    trackers = RunFolder(tmp_path / "run").trackers(
        title="small", total_steps=4, services=services, settings={"width": 64}
    )
    (started,) = [x for x in trackers if isinstance(x, Elsewhere)]
    assert started.options == {"name": "small", "settings": {"width": 64}, "resume": False}
    for tracker in trackers:
        tracker.close()


def test_an_unknown_service_starts_no_run(tmp_path, unannotated):
    services: Any = ("wandb", "tensorboard")
    with pytest.raises(ValueError, match="'tensorboard' is not a service that metrics can"):
        RunFolder(tmp_path).trackers(title="small", total_steps=4, services=services)
    assert not (tmp_path / "metrics.jsonl").exists()
