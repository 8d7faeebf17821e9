import threading

import pytest

from eqxshard.trackers._service import KeptRun, Sender


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


def test_calls_are_made_in_order_and_errors_come_later():
    called, ready = [], threading.Event()

    def fails():
        ready.wait()
        raise RuntimeError("no route to host")

    sender = Sender("MLflow")
    sender.send(fails)
    for i in range(3):
        sender.send(lambda i=i: called.append(i))
    ready.set()
    with pytest.raises(OSError, match="MLflow refused a report: no route to host"):
        sender.close(lambda: called.append("the end"), 60)
    assert called == [0, 1, 2, "the end"]


def test_a_server_that_hangs_holds_nothing_up():
    ready, ended = threading.Event(), threading.Event()
    sender = Sender("MLflow")
    for _ in range(1_000):
        sender.send(ready.wait)
    with pytest.raises(OSError, match="MLflow is too slow, so a report is lost"):
        for _ in range(2):
            sender.send(ready.wait)
    with pytest.raises(OSError, match=r"not taken the last \d+ reports in 0.01 s"):
        sender.close(ended.set, 0.01)
    # It answers again while the run waits for room.
    threading.Timer(0.1, ready.set).start()
    sender.close(ended.set, 60)
    assert ended.is_set()
