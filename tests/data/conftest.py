"""A mirror to download from, which can be made to misbehave, and no old threads."""

import gc
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Mirror:
    """Serves `files`, by the paths of their URLs, and records requests and responses.

    By path, `cut` is the number of bytes after which a response breaks off, and `pause` the
    number after which it waits for a function to return. A mirror that is not `resumable`
    ignores ranges.
    """

    def __init__(self, url: str):
        self.url = url
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.pause: dict[str, tuple[int, Callable[[], object]]] = {}
        self.resumable = True
        self.requests: list[tuple[str, str | None]] = []  # path and range
        self.sent: list[int] = []  # sizes of bodies

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        path, asked = handler.path, handler.headers["Range"]
        self.requests.append((path, asked))
        body = self.files.get(path)
        if body is None:
            return handler.send_error(404)
        start = 0
        if asked and self.resumable:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                return handler.send_error(416)
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(body) - start))
        handler.end_headers()
        part = body[start : start + self.cut.get(path, len(body))]
        # Before the client has read it all, and looks here.
        self.sent.append(len(part))
        before, wait = self.pause.get(path, (0, lambda: None))
        handler.wfile.write(part[:before])
        wait()
        handler.wfile.write(part[before:])


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            mirror.respond(self)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        mirror = Mirror(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield mirror
        server.shutdown()
        thread.join()


@pytest.fixture
def dead_mirror():
    """The URL of a server that does not exist."""
    # The port is taken, so that nobody else listens there.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module", autouse=True)
def no_threads_of_earlier_tests():
    """Iterators that tests elsewhere left to the garbage collector have threads, too."""
    gc.collect()
