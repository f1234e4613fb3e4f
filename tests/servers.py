"""Real servers on loopback for tests: ours, Prometheus, Alertmanager, and a webhook that keeps what it is sent.

Each is started on a free port and ended by its own process id.
"""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import REPOSITORY, free_port, wait_for


def need(binary: str, package: str) -> None:
    """Skip the test where a binary is missing, naming the Debian package that has it."""
    if not shutil.which(binary):
        pytest.skip(f"{binary} is missing (Debian package {package}; `make test` installs it when root)")


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of a GET; 0 when nobody answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


def get_json(url: str) -> Any:
    """Body of a GET as JSON; None when there is none."""
    status, body = get(url)
    return json.loads(body) if status == 200 else None


@contextmanager
def process(command: Sequence[str], ready: str, log: Path, seconds: float = 20.0,
            environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that answers 200 at the URL ``ready``; ended when the context is left."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=REPOSITORY,
                                 env=environment)
        try:
            wait_for(lambda: child.poll() is not None or get(ready)[0] == 200, seconds, f"{ready}")
            assert child.poll() is None, log.read_text()
            yield child
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def monitor(*sources: Path, log: Path, options: Sequence[str] = (),
            environment: dict[str, str] | None = None) -> Iterator[str]:
    """`verl-monitor serve`; yields its base URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "monitor.cli", "serve", "--listen", f"127.0.0.1:{port}", "--poll", "0.2", *options,
               *map(str, sources)]
    with process(command, f"{url}/-/ready", log, environment=environment):
        yield url


@contextmanager
def prometheus(config: str, folder: Path) -> Iterator[str]:
    """The real Prometheus with this configuration; yields its base URL."""
    need("prometheus", "prometheus")
    with _configured("prometheus", "prometheus", config, folder, "--storage.tsdb.path") as url:
        yield url


@contextmanager
def alertmanager(config: str, folder: Path) -> Iterator[str]:
    """The real Alertmanager with this configuration; yields its base URL."""
    need("prometheus-alertmanager", "prometheus-alertmanager")
    with _configured("prometheus-alertmanager", "alertmanager", config, folder, "--storage.path",
                     "--cluster.listen-address=") as url:
        yield url


@contextmanager
def _configured(binary: str, name: str, config: str, folder: Path, storage: str, *flags: str) -> Iterator[str]:
    port, file = free_port(), folder / f"{name}.yml"
    file.write_text(config)
    url = f"http://127.0.0.1:{port}"
    command = [binary, f"--config.file={file}", f"{storage}={folder / f'{name}-data'}",
               f"--web.listen-address=127.0.0.1:{port}", *flags]
    with process(command, f"{url}/-/ready", folder / f"{name}.log"):
        yield url


class Webhook:
    """What arrived at the webhook: ``(time, path, body)`` in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str, dict[str, Any]]] = []
        self.url = ""

    def at(self, path: str, status: str) -> list[dict[str, Any]]:
        """Bodies that came to a path with this status."""
        return [body for _, where, body in self.calls if where == path and body["status"] == status]


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A webhook receiver."""
    kept = Webhook()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.calls.append((time.time(), self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def samples(text: str, name: str, **labels: str) -> list[float]:
    """Values of a metric in exposition text whose labels include these."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            found.append(float(match[2]))
    return found
