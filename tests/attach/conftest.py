"""A process state of one's own for each test, and a stub of the push API."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from monitor.attach import recorder, rows
from tests.attach.stub import Stub


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No recorder of one test is left to the next."""
    for name in ("URL", "LISTEN", "TOKEN", "SPOOL", "SPOOL_MB", "QUEUE_ROWS", "DISABLE", "LINGER"):
        monkeypatch.delenv(f"VERL_MONITOR_{name}", raising=False)
    rows.counts.clear()
    yield
    for target in recorder.process.targets.values():
        target.drop()
        thread = getattr(target, "_thread", None)
        if thread is not None:
            thread.join(5)
    recorder.process.targets, recorder.process.recorders = {}, []
    recorder.process._flush_left = recorder.FLUSH_SECONDS
    rows.counts.clear()


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A service that answers."""
    server = Stub()
    yield server
    server.close()


@pytest.fixture
def absent_port() -> Iterator[int]:
    """A port on which nobody listens, kept from other tests; a stub may take it all the same."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])
