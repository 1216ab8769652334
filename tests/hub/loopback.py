"""The Hub over HTTP at a free port of 127.0.0.1, for clients in processes of their own."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from hub.repositories import Answer, Hub


class LoopbackHub(Hub):
    """A Hub that listens; `serving` starts and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ending = threading.Event()
        self._locked = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        # Another host to clients, which send it no token.
        self.storage_address = f"http://localhost:{self._server.server_port}"

    def answer_in_turn(self, *request: object) -> Answer:
        """Answer one request at a time, since clients ask in many threads."""
        with self._locked:
            return self.answer(*request)  # type: ignore[arg-type]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer requests in the context; at its end those that wait for silent answers are let go."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.is_ending.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *message: object) -> None:
        pass

    def _handle(self) -> None:
        address = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        answer = self.hub.answer_in_turn(self.command, unquote(address.path), address.query, headers, body)
        fault = answer.fault
        if fault is not None and fault.silent:
            self._wait_for_the_client()
            return
        sent = answer.body if fault is None or fault.cut_after is None else answer.body[: fault.cut_after]
        if fault is None or fault.cut_after:
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(sent)
        self.close_connection |= fault is not None

    def _wait_for_the_client(self) -> None:
        """Say nothing until the client hangs up, or the test ends."""
        self.connection.settimeout(0.1)
        while not self.hub.is_ending.is_set():
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = _handle
