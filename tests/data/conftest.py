"""A server to download from, and no old threads."""

import gc
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server:
    """Serves `files`, by the paths of their URLs, and records requests."""

    def __init__(self, url: str):
        self.url = url
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        body = self.files.get(handler.path)
        if body is None:
            handler.send_error(404)
        else:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)


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
        http.shutdown()
        thread.join()


@pytest.fixture(scope="module", autouse=True)
def no_threads_of_earlier_tests():
    """Iterators that tests elsewhere left to the garbage collector have threads, too."""
    gc.collect()
