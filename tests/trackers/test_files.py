import pytest

from eqxshard.trackers._files import KeptRun


def test_a_run_is_kept_for_those_that_resume(tmp_path):
    path = tmp_path / "new" / "wandb.json"
    first = KeptRun(path, resume=True)
    assert (first.id, first.after) == (None, -1)
    first.id = "a1"
    first.keep(7)
    again = KeptRun(path, resume=True)
    assert (again.id, again.after) == ("a1", 7)
    assert KeptRun(path, resume=False).id is None
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"id": "a1"}', '{"id": 1, "step": {}}'])
def test_a_damaged_file_names_no_run(tmp_path, text):
    path = tmp_path / "wandb.json"
    path.write_text(text)
    assert KeptRun(path, resume=True).after == -1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file and not a folder; use a path in"):
        KeptRun(tmp_path / "file" / "wandb.json", resume=False)
