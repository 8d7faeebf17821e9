"""A server to download from, which can be made to misbehave, and no old threads."""

import gc
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server:
    """Serves `files`, by the paths of their URLs, and records requests.

    A response in `cut` breaks off half-way; one in `silent` gets no byte before the end of
    the test.
    """

    def __init__(self, url: str):
        self.url = url
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.silent: set[str] = set()
        self.ended = threading.Event()
        self.requests: list[str] = []

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.requests.append(path)
        body = self.files.get(path)
        if path in self.silent:
            self.ended.wait()
        elif body is None:
            handler.send_error(404)
        else:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2] if path in self.cut else body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found.respond(self)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        found = Server(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.ended.set()
        http.shutdown()
        thread.join()


@pytest.fixture(scope="module", autouse=True)
def no_threads_of_earlier_tests():
    """Iterators that tests elsewhere left to the garbage collector have threads, too."""
    gc.collect()
