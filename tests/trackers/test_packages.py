import importlib
import sys

import pytest

import eqxshard
from eqxshard.trackers._packages import is_installed


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    names = ("wandb", "mlflow", "tensorboard")
    for name in names:
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert not any(map(is_installed, names))
    with pytest.raises(ValueError, match="needs the package wandb, which is not installed"):
        eqxshard.RunConfig(track=("wandb",)).check()
    with pytest.raises(ImportError, match=r"pip install 'eqxshard\[mlflow\]'"):
        eqxshard.trackers.MLflow(tmp_path)
