"""A mirror to download from, which can be made to misbehave, and no old threads."""

import gc
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Mirror:
    """Serves `files`, by the paths of their URLs, and records requests.

    By path, `cut` is the number of bytes after which a response breaks off; those in
    `silent` get none before the end of the test.
    """

    def __init__(self, url: str):
        self.url = url
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.silent: set[str] = set()
        self.ended = threading.Event()
        self.requests: list[str] = []

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.requests.append(path)
        body = self.files.get(path)
        if body is None:
            return handler.send_error(404)
        if path in self.silent:
            self.ended.wait()
            return None
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cut.get(path, len(body))])


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
        mirror.ended.set()
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
