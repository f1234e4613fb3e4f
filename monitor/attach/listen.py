"""Target VERL_MONITOR_LISTEN: detectors and /metrics inside the trainer's process, without a service.

The only file of this folder that uses the rest of the package. That is imported when the target is made, in the
trainer's thread, once: a fork amid an import in another thread would leave the child half a module. The engine takes
about a millisecond for each step, in this target's thread; a scrape renders in its own.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monitor import api
from monitor.attach.recorder import Event, Recorder
from monitor.attach.rows import counts, settled
from monitor.attach.settings import Settings, clock, fault, say
from monitor.engine import Engine
from monitor.exporter import MonitorView, Renderer, SourceView
from monitor.model import RawStep, RunEnded, RunPhase, RunStarted, RunState

TURN_SECONDS = 0.25
TICK_SECONDS = 1.0
BIND_AGAIN_SECONDS = 15.0
STUCK_AFTER_SECONDS = 15.0
MAX_REQUESTS = 8
LINGER_SECONDS = 20.0
"""Longest wait for a last scrape, which is to see that the run has ended: a target that is gone while its runs were
active is a monitor that died. Prometheus scrapes every 15 seconds unless told otherwise."""
SOURCE = "attach"


class Listen:
    """A bounded queue, the thread that feeds the engine from it, and the server's threads."""

    def __init__(self, settings: Settings, recorders: Callable[[], Sequence[Recorder]]) -> None:
        host, _, port = settings.listen.rpartition(":")
        self._address = (host.strip("[]") or "0.0.0.0", int(port))
        if not host or not 0 <= self._address[1] < 65536:
            raise ValueError(f"VERL_MONITOR_LISTEN must look like 0.0.0.0:8000, not {settings.listen!r}")
        self._queue: deque[Event] = deque(maxlen=settings.queue_rows)
        self._recorders = recorders
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._lock = threading.Lock()  # engine, renderer
        self._wake = threading.Event()
        self._drained = threading.Event()
        self._dropped = False
        self._engine, self._renderer = Engine(), Renderer()
        self._phases: dict[str, tuple[str | None, float]] = {}
        self._now = self._ticked = clock()
        self._records = 0
        self._scrapes: deque[float] = deque(maxlen=2)
        self._scraped = threading.Event()
        self._server: _Server | None = None

    def put(self, event: Event) -> None:
        """Queue an event; when the queue is full the oldest is lost and counted."""
        if self._dropped:
            return
        if len(self._queue) == self._queue.maxlen:
            counts["queue"] += 1
        self._queue.append(event)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="verl-monitor-listen", daemon=True)
                    self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until the engine has judged everything; when all runs are over and somebody scrapes, until that was
        seen as well."""
        if self._dropped or self._thread is None:
            return True
        self._drained.clear()
        self._wake.set()
        judged = self._drained.wait(seconds)
        if judged and all(recorder.over for recorder in self._recorders()):
            self._linger()
        return judged

    def _linger(self) -> None:
        scrapes = list(self._scrapes)
        if len(scrapes) < 2:
            return
        every, last = scrapes[1] - scrapes[0], clock() - scrapes[1]
        if every <= LINGER_SECONDS and last <= 2 * every + 1:
            self._scraped.clear()
            self._scraped.wait(min(LINGER_SECONDS, every + 1))
        self._scrapes.clear()  # once is enough

    def drop(self) -> None:
        """After a fork, in the child. The server's socket is inherited, but nobody accepts on it."""
        self._dropped = True
        self._queue.clear()

    def close(self) -> None:
        """Serve no more."""
        self._dropped = True
        if self._server is not None:
            self._server.shutdown()

    # --- the engine's thread

    def _run(self) -> None:
        server = threading.Thread(target=self._serve, name="verl-monitor-http", daemon=True)
        server.start()
        while not self._dropped:
            try:
                with self._lock:
                    self._turn()
            except Exception as error:  # noqa: BLE001 - the thread must outlive any error
                fault("judging", error)
            if not self._queue:
                self._drained.set()
            self._wake.wait(TURN_SECONDS)
            self._wake.clear()

    def _turn(self) -> None:
        for _ in range(100):  # then the lock is let go, for a scrape
            try:
                event = self._queue.popleft()
            except IndexError:
                break
            self._now = max(self._now, event.when)
            self._take(event)
        else:
            self._wake.set()
        self._note_phases()
        if clock() - self._ticked >= TICK_SECONDS:
            self._now = self._ticked = max(self._now, clock())
            self._engine.tick(self._now)

    def _take(self, event: Event) -> None:
        who = event.who
        if event.kind == "steps":
            self._records += 1
            values = settled(event.values)
            self._engine.handle(RawStep(who.run, event.step, self._now, values, project=who.project), SOURCE)
        elif event.kind == "config":
            again = self._engine.snapshot().find(who.run) is not None
            self._engine.handle(RunStarted(who.run, self._now, project=who.project, restarted=again), SOURCE)
        elif event.values["exit_code"]:
            reason = f"the trainer ended with exit code {event.values['exit_code']}"
            self._engine.handle(RunEnded(who.run, self._now, RunState.FAILED, reason), SOURCE)
        else:
            self._engine.handle(RunEnded(who.run, self._now, RunState.FINISHED, "the trainer finished"), SOURCE)

    def _note_phases(self) -> None:
        for recorder in list(self._recorders()):
            who, now = recorder.who, recorder.phase_now
            if recorder.over or self._phases.get(who.incarnation, (None, 0.0))[0] is now[0] is None:
                continue
            if self._phases.get(who.incarnation) is not now:  # the object: the same stage may have come again
                self._phases = {**dict(list(self._phases.items())[-100:]), who.incarnation: now}
                self._now = max(self._now, now[1])
                self._engine.handle(RunPhase(who.run, self._now, now[0] or ""), SOURCE)

    # --- the server's threads

    def _serve(self) -> None:
        told = False
        while not self._dropped:
            try:
                with _Server(self._address, self) as server:
                    self._server = server
                    say(f"serving http://{self._address[0]}:{server.server_address[1]}/metrics")
                    server.serve_forever(0.1)
                return
            except Exception as error:  # noqa: BLE001 - most often the port of a trainer that is about to end
                if not told:
                    told = True
                    say(f"cannot listen on {self._address[0]}:{self._address[1]}: {error}; training goes on, and so "
                        "do attempts to listen")
            threading.Event().wait(BIND_AGAIN_SECONDS)

    def answered(self) -> None:
        """A scrape has been answered."""
        self._scraped.set()

    def page(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body of what is asked for."""
        if path == "/-/healthy":
            stuck = clock() - self._ticked > STUCK_AFTER_SECONDS
            return (503, "text/plain", b"stuck\n") if stuck else (200, "text/plain", b"healthy\n")
        if path == "/metrics":
            return self._metrics(accept)
        if path == "/api/v1/runs":
            with self._lock:
                snapshot = self._engine.snapshot()
            runs = [api.run_summary(view) for view in snapshot.runs]
            return 200, "application/json", api.dumps({"runs": runs})
        return 404, "application/json", json.dumps({"error": f"nothing at {path}; /metrics is"}).encode()

    def _metrics(self, accept: str) -> tuple[int, str, bytes]:
        with self._lock:
            lost = {reason: count for reason, count in counts.items() if count}
            source = SourceView(name=SOURCE, up=True, last_read_seconds=self._ticked, records=self._records,
                                files=0, files_cut=0,
                                lag_bytes=0, rejected=lost)
            view = MonitorView(heartbeat_seconds=self._ticked, sources=[source])
            body, kind = self._renderer.page(self._engine.snapshot(), view, accept)
            self._scrapes.append(clock())
            return 200, kind, body


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], target: Listen) -> None:
        self.target = target
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without asking a name server who we are, as HTTPServer would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "verl-monitor", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for each request, up to a few: this is the trainer's process."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away is nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            status, kind, body = self.server.target.page(path, self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - an answer is better than a closed connection
            fault("answering a scrape", error)
            status, kind, body = 500, "text/plain", b"error\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if path == "/metrics":
            self.server.target.answered()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silent: stderr is the trainer's."""
