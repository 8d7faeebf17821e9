"""Optional packages: folders of their name, and errors that say how to install them."""

import importlib
import subprocess
import sys

import pytest

import eqxshard
from eqxshard.trackers._packages import is_installed


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    # Imported before nothing can be found any more.
    config, tracker = eqxshard.RunConfig(track=("wandb",)), eqxshard.trackers.MLflow
    names = ("wandb", "mlflow", "tensorboard")
    for name in names:
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert not any(map(is_installed, names))
    with pytest.raises(ValueError, match="needs the package wandb, which is not installed"):
        config.check()
    with pytest.raises(ImportError, match=r"pip install 'eqxshard\[mlflow\]'"):
        tracker(tmp_path)


@pytest.mark.parametrize(
    "tracker, package, command",
    [
        ("TensorBoard", "tensorboard", "tensorboard"),
        ("WandB", "wandb", "'eqxshard[wandb]'"),
        ("MLflow", "mlflow", "'eqxshard[mlflow]'"),
    ],
)
def test_without_the_package_the_error_says_how_to_install_it(
    tmp_path, tracker, package, command
):
    code = f"""if True:
        import sys
        from eqxshard import trackers
        assert not {{"wandb", "mlflow", "tensorboard"}} & {{*sys.modules}}
        sys.modules["{package}"] = None  # as if it were not installed
        trackers.{tracker}("run")
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.endswith(f"; install it with `pip install {command}`.")
    assert list(tmp_path.iterdir()) == []
