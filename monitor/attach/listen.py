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
SCRAPED_WITHIN_SECONDS = 60.0
"""Who has not scraped for so long is not waited for at the end."""
JUDGED_WITHIN_SECONDS = 0.5
"""What the engine gets for the last rows, even where another target has used up the time for delivery."""
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
        self._linger_seconds = settings.linger_seconds
        self._scraped = float("-inf")
        self._over = False
        self._end_seen = threading.Event()
        self._server: _Server | None = None

    def put(self, event: Event) -> None:
        """Queue an event; when the queue is full the oldest is lost and counted."""
        if self._dropped:
            return
        if len(self._queue) == self._queue.maxlen:
            counts["queue"] += 1
        self._queue.append(event)
        if event.kind == "config":  # another run, whose end is to be seen as well
            self._over = False
            self._end_seen.clear()
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="verl-monitor-listen", daemon=True)
                    self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until the engine has judged everything; when all runs are over and somebody scrapes, until a scrape has
        brought that, too: a target that is gone while its runs were active is a monitor that died."""
        if self._dropped or self._thread is None:
            return True
        self._drained.clear()
        self._wake.set()
        judged = self._drained.wait(max(seconds, JUDGED_WITHIN_SECONDS))
        if judged and all(recorder.over for recorder in self._recorders()):
            self._linger()
        return judged

    def _linger(self) -> None:
        again, self._over = self._over, True
        if again or not self._linger_seconds or clock() - self._scraped > SCRAPED_WITHIN_SECONDS:
            return
        say(f"the run is over; a scrape may see it for {self._linger_seconds:g} s at most (VERL_MONITOR_LINGER)")
        self._end_seen.wait(self._linger_seconds)

    def drop(self) -> None:
        """After a fork, in the child. The server's socket is inherited, but nobody accepts on it."""
        self._dropped = True
        self._queue.clear()

    def close(self) -> None:
        """Serve no more."""
        self._dropped = True
        self._end_seen.set()
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

    def over(self) -> bool:
        """Whether a page that is rendered from now on shows the end of all runs."""
        with self._lock:  # an event that has left the queue is being judged under it
            return self._over and not self._queue

    def end_was_seen(self) -> None:
        """A scrape has been answered with such a page."""
        self._end_seen.set()

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
            self._scraped = clock()
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
        except RuntimeError:  # from Python 3.12 on no thread begins once the process ends: answered in this one
            self.process_request_thread(request, client_address)
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
        path, over = self.path.partition("?")[0], False
        try:
            over = self.server.target.over()
            status, kind, body = self.server.target.page(path, self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - an answer is better than a closed connection
            fault("answering a scrape", error)
            status, kind, body = 500, "text/plain", b"error\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if over and path == "/metrics" and status == 200:
            self.server.target.end_was_seen()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silent: stderr is the trainer's."""
