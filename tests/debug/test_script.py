"""What a script calls its functions, and importing it without running it."""

import sys
import types

import pytest

from eqxshard.debug._script import import_script, name_in_script, refuse_import, script_path


def losses(model, batch, key):
    """At the top level of a module that is not the script."""


@pytest.fixture
def main(monkeypatch):
    """A script that runs, with a few names."""
    module = types.ModuleType("__main__")
    local = lambda model, batch, key: None  # noqa: E731
    vars(module).update(chosen=local, other=3)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_function_has_the_name_that_the_script_gives_it(main):
    assert name_in_script(main.chosen) == "chosen"
    assert name_in_script(losses) == "losses"
    assert name_in_script(lambda model, batch, key: None) is None


def test_a_notebook_has_no_script(main):
    assert script_path() is None
    main.__file__ = "/runs/train.py"
    assert script_path() == "/runs/train.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script; it is forgotten at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text):
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    yield write
    for name in ("eqxshard_imported_script", "beside_it"):
        sys.modules.pop(name, None)


def test_a_script_is_imported_once_with_the_modules_beside_it(script, tmp_path):
    (tmp_path / "beside_it.py").write_text("number = 3")
    path = script("from beside_it import number\nran = __name__ == '__main__'")
    module = import_script(path)
    assert (module.number, module.ran) == (3, False)
    assert import_script(path) is module


def test_work_at_the_top_level_is_refused_while_a_script_is_imported(script):
    refuse_import("this")
    path = script("from eqxshard.debug._script import refuse_import; refuse_import('x')")
    with pytest.raises(ValueError, match=r"x is called when .*; put the call"):
        import_script(path)
