import hashlib
import signal
import sys
import threading
import time

import numpy as np
import pytest

from eqxshard.data import _download
from eqxshard.data._download import download

# Several times the size of a read, and not a multiple of it.
CONTENT = np.random.default_rng(0).bytes(400_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = 3 * 2**16


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "garments.gz"


@pytest.fixture
def url(mirror):
    mirror.files = {"/garments.gz": CONTENT}
    return f"{mirror.url}/garments.gz"


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def wait_for_part(path, size):
    """Wait until this much of a running download is on disk."""
    for _ in range(1000):
        if sum(part.stat().st_size for part in path.parent.glob("*.part")) >= size:
            return
        time.sleep(0.01)


def test_a_complete_download(mirror, url, path):
    download(path, [url], sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert names(path) == ["garments.gz"]
    assert mirror.requests == [("/garments.gz", None)]


def test_prints_one_line_without_a_terminal(url, path, capsys):
    download(path, [url], sha256=SHA256)
    assert capsys.readouterr() == ("", f"downloading {url}\n")


def test_shows_a_bar_on_a_terminal(url, path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    monkeypatch.setenv("TERM", "xterm")
    download(path, [url], sha256=SHA256)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "downloading garments.gz" in shown.err
    assert "400.0/400.0 kB" in shown.err
    assert url not in shown.err


def test_the_next_mirror_is_tried_if_the_first_is_dead(mirror, url, dead_mirror, path):
    download(path, [f"{dead_mirror}/garments.gz", url], sha256=SHA256)
    assert path.read_bytes() == CONTENT


def test_the_error_has_the_reason_of_every_mirror(mirror, url, dead_mirror, path):
    dead, missing = f"{dead_mirror}/garments.gz", f"{mirror.url}/elsewhere.gz"
    with pytest.raises(ConnectionError) as caught:
        download(path, [dead, missing], sha256=SHA256)
    first, second = str(caught.value).split("; ")
    assert first.startswith(f"{dead}: ")
    assert "refused" in first
    assert second == f"{missing}: HTTP status 404 (Not Found)"
    assert names(path) == []


def test_a_silent_mirror_times_out(mirror, url, path, monkeypatch):
    done = threading.Event()
    mirror.files["/silent.gz"] = CONTENT
    mirror.pause["/silent.gz"] = (HALF, lambda: done.wait(60))
    try:
        with (
            monkeypatch.context() as patch,
            pytest.raises(ConnectionError, match=r"connection broke \(timed out\)"),
        ):
            patch.setattr(_download, "_TIMEOUT", 1.0)
            download(path, [f"{mirror.url}/silent.gz"], sha256=SHA256)
        download(path, [url], sha256=SHA256)
    finally:
        done.set()
    assert path.read_bytes() == CONTENT


def test_resumes_where_it_stopped(mirror, url, path):
    mirror.cut["/garments.gz"] = 150_000
    with pytest.raises(ConnectionError, match="closed after 150,000 of 400,000 bytes"):
        download(path, [url], sha256=SHA256)
    assert names(path) == ["garments.gz.part"]
    mirror.cut.clear()
    download(path, [url], sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert names(path) == ["garments.gz"]
    assert mirror.requests[1] == ("/garments.gz", "bytes=150000-")
    assert mirror.sent == [150_000, 250_000]


def test_resumes_from_another_mirror(mirror, url, path):
    mirror.files["/breaks.gz"] = CONTENT
    mirror.cut["/breaks.gz"] = 150_000
    download(path, [f"{mirror.url}/breaks.gz", url], sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert mirror.sent == [150_000, 250_000]


def test_starts_again_if_the_server_cannot_resume(mirror, url, path):
    mirror.resumable = False
    mirror.cut["/garments.gz"] = 150_000
    with pytest.raises(ConnectionError):
        download(path, [url], sha256=SHA256)
    mirror.cut.clear()
    download(path, [url], sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert mirror.sent == [150_000, 400_000]


@pytest.mark.parametrize("size", [1_000, len(CONTENT), 500_000])
def test_starts_again_if_the_part_belongs_to_another_file(mirror, url, path, size):
    path.parent.mkdir()
    path.with_name("garments.gz.part").write_bytes(b"x" * size)
    download(path, [url], sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert names(path) == ["garments.gz"]


def test_wrong_content_is_deleted(mirror, url, path):
    mirror.files["/garments.gz"] = b"<html>Sign in to this network</html>"
    with pytest.raises(ConnectionError, match=f"SHA-256 [0-9a-f]{{64}}, not {SHA256}"):
        download(path, [url], sha256=SHA256)
    assert names(path) == []
    assert len(mirror.requests) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot signal a thread")
def test_a_keyboard_interrupt_keeps_the_part(mirror, url, path):
    def interrupt():
        wait_for_part(path, HALF)
        seen.extend(names(path))
        signal.pthread_kill(main_thread, signal.SIGINT)

    main_thread = threading.get_ident()
    seen: list[str] = []
    mirror.pause["/garments.gz"] = (HALF, interrupt)
    with pytest.raises(KeyboardInterrupt):
        download(path, [url], sha256=SHA256)
    assert seen
    assert "garments.gz" not in seen
    assert names(path) == ["garments.gz.part"]
    mirror.pause.clear()
    download(path, [url], sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert mirror.requests[1] == ("/garments.gz", f"bytes={HALF}-")


def test_two_downloads_at_once(mirror, url, path):
    def download_too():
        wait_for_part(path, HALF)
        download(path, [url], sha256=SHA256)
        seen.append(path.read_bytes() == CONTENT)

    seen: list[bool] = []
    mirror.files["/slow.gz"] = CONTENT
    mirror.pause["/slow.gz"] = (HALF, download_too)
    download(path, [f"{mirror.url}/slow.gz"], sha256=SHA256)
    assert seen == [True]
    assert path.read_bytes() == CONTENT
    assert names(path) == ["garments.gz"]


def test_a_folder_that_cannot_be_created(url, tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(OSError, match="folder"):
        download(tmp_path / "folder" / "garments.gz", [url], sha256=SHA256)
