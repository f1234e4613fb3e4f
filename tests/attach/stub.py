"""A push API that can be absent, fail, hang, and come back on the same port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


class Stub:
    """What was received, by run and kind; how to answer is settable at any time."""

    def __init__(self, port: int = 0, received: list[tuple[str, str, dict[str, Any]]] | None = None) -> None:
        self.status = 200
        self.hang_seconds = 0.0
        self.headers: dict[str, str] = {}
        self.received = received if received is not None else []
        self.refused = 0
        self.closed = False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if stub.closed:  # as a killed service: no answer, on kept connections neither
                    self.close_connection = True
                    return
                stub.headers = dict(self.headers)
                time.sleep(stub.hang_seconds)
                if stub.status == 200:
                    def no(token: str) -> None:
                        raise AssertionError(token)

                    run, kind = self.path.removeprefix("/api/v1/runs/").split("/")
                    stub.received.append((unquote(run), kind, json.loads(raw, parse_constant=no)))
                else:
                    stub.refused += 1
                self.send_response(stub.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Silent."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that gave up."""

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.closed = True
        self.server.shutdown()
        self.server.server_close()

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of one kind, in order."""
        return [body for _, k, body in list(self.received) if k == kind]

    def steps(self) -> list[int]:
        """Numbers of the steps received, each once, in order of arrival."""
        return list(dict.fromkeys(step["step"] for body in self.bodies("steps") for step in body["steps"]))
