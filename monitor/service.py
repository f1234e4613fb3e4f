"""The service: sources into the engine, the engine onto HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2
import orjson
from fastapi import FastAPI, Request, Response
from markdown_it import MarkdownIt

from monitor import __version__, api
from monitor.engine import Engine, Snapshot
from monitor.exporter import MonitorView, Renderer, SourceView
from monitor.facts import Facts
from monitor.machine_report import machine_report
from monitor.probes.room import Room, RunPlace
from monitor.sources import Source
from monitor.sources.push import BadRequestError, BusyError, PushSource

log = logging.getLogger("monitor.service")

TICK_SECONDS = 1.0
STUCK_AFTER_SECONDS = 15.0
GZIP_FROM_BYTES = 1024
EVENTS_PER_TURN = 50
MAX_BODY_BYTES = 8 * 2**20


@dataclass(kw_only=True)
class Service:
    """Feeds the engine from its sources and answers what is asked about it. One event loop owns it."""

    engine: Engine
    sources: Sequence[Source]
    clock: Callable[[], float]
    push: PushSource | None = None
    room: Room | None = None
    token: str = ""
    heartbeat_seconds: float = 0.0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _facts: Facts | None = None
    _renderer: Renderer = field(default_factory=Renderer)
    _render_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Begin reading and ticking."""
        self.heartbeat_seconds = self.clock()
        self._tasks = [asyncio.create_task(self._tick(), name="tick")]
        self._tasks += [asyncio.create_task(self._read(source), name=source.stats.name) for source in self.all_sources]
        if self.room is not None:
            self.room.start()

    async def stop(self) -> None:
        """End reading and ticking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self.all_sources:
            await source.aclose()
        if self.room is not None:
            self.room.close()

    @property
    def all_sources(self) -> list[Source]:
        """Sources that are read, and the one that is sent to."""
        return [*self.sources, *([self.push] if self.push else [])]

    async def _tick(self) -> None:
        while True:
            try:
                if self.room is not None:
                    self._probe(self.room)
                self.engine.tick(self.clock())
                for source in self.all_sources:
                    source.alive()
                self.heartbeat_seconds = self.clock()
            except Exception:
                log.exception("the engine's tick failed; it goes on with the next one")
            await asyncio.sleep(TICK_SECONDS)

    def _probe(self, room: Room) -> None:
        """Hand the probes' last facts to the engine; the probes themselves are at work elsewhere."""
        active = self.engine.active_runs()
        room.see_runs({run.name: RunPlace(run.config, run.logs, run.name) for run in active},
                      wants_tasks=any(run.quiet for run in active))
        facts = room.facts()
        if facts is self._facts:
            return
        self._facts = facts
        if facts.nodes or facts.ray is not None or facts.checkpoints:
            self.engine.probe(facts, room.name)

    async def _read(self, source: Source) -> None:
        """Read a source for ever. What it raises costs a pause, never the service."""
        pause = 1.0
        while True:
            try:
                await self._consume(source)
                return
            except Exception:
                log.exception("source %s failed; trying again in %.0f s", source.stats.name, pause)
                source.stats.up = False
                await asyncio.sleep(pause)
                pause = min(60.0, 2 * pause)

    async def _consume(self, source: Source) -> None:
        taken = 0
        async for event in source:
            try:
                self.engine.handle(event, source.stats.name)
            except Exception:
                log.exception("an event of run %s could not be taken in", event.run)
            taken += 1
            if taken % EVENTS_PER_TURN == 0:  # a long backlog must not keep the loop from answering
                await asyncio.sleep(0)

    @property
    def stuck(self) -> bool:
        """Whether the engine's loop has stopped."""
        return self.clock() - self.heartbeat_seconds > STUCK_AFTER_SECONDS

    @property
    def ready(self) -> bool:
        """Whether every source has been polled at least once."""
        return not self.stuck and all(source.stats.last_read_seconds is not None for source in self.all_sources)

    def monitor_view(self) -> MonitorView:
        """What the monitor exports of itself."""
        return MonitorView(
            heartbeat_seconds=self.heartbeat_seconds,
            sources=[SourceView(name=s.stats.name, up=s.stats.up, last_read_seconds=s.stats.last_read_seconds,
                                records=s.stats.records, files=s.stats.files, files_cut=s.stats.files_cut,
                                lag_bytes=s.stats.lag_bytes,
                                rejected=dict(s.stats.rejected)) for s in self.all_sources])

    async def metrics(self, accept: str, *, compress: bool) -> tuple[bytes, str, bool]:
        """The exposition page, its content type, and whether it is compressed. Rendered in a thread, one at a time,
        so that a scrape of any size leaves the loop free."""
        async with self._render_lock:
            snapshot, monitor = self.engine.snapshot(), self.monitor_view()
            return await asyncio.to_thread(self._page, snapshot, monitor, accept, compress)

    def _page(self, snapshot: Snapshot, monitor: MonitorView, accept: str, compress: bool) -> tuple[bytes, str, bool]:
        body, content_type = self._renderer.page(snapshot, monitor, accept)
        if compress and len(body) >= GZIP_FROM_BYTES:
            return gzip.compress(body, compresslevel=1, mtime=0), content_type, True
        return body, content_type, False


def _runbook_folder() -> Path:
    """Runbooks lie in the wheel, or in the repository that this package was installed from."""
    packaged = Path(str(resources.files("monitor") / "runbooks"))
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "docs" / "runbooks"


def create_app(service: Service) -> FastAPI:
    """The HTTP side of a service. Starting the app starts the service."""
    templates = jinja2.Environment(loader=jinja2.PackageLoader("monitor", "web/templates"), autoescape=True,
                                   trim_blocks=True, lstrip_blocks=True)
    templates.globals["version"] = __version__
    runbooks = _runbook_folder()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="verl-monitor", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    def html(template: str, status: int = 200, **values: object) -> Response:
        body = templates.get_template(template).render(now=service.clock(), **values)
        return Response(body, status_code=status, media_type="text/html")

    def json(value: object, status: int = 200) -> Response:
        return Response(api.dumps(value), status_code=status, media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus and OpenMetrics exposition."""
        compress = "gzip" in request.headers.get("accept-encoding", "")
        body, content_type, compressed = await service.metrics(request.headers.get("accept", ""), compress=compress)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return Response(body, headers=headers)

    @app.get("/-/healthy")
    async def healthy() -> Response:
        """503 when the engine's loop has stopped, whatever HTTP still answers."""
        return Response("stuck\n", 503) if service.stuck else Response("healthy\n")

    @app.get("/-/ready")
    async def ready() -> Response:
        """503 until every source was polled once."""
        return Response("ready\n") if service.ready else Response("not ready\n", 503)

    @app.get("/api/v1/runs")
    async def runs() -> Response:
        """All runs, a summary each."""
        return json({"runs": [api.run_summary(view) for view in service.engine.snapshot().runs]})

    @app.get("/api/v1/runs/{run:path}")
    async def run(run: str) -> Response:
        """One run: state, verdict per detector with reason and evidence, incidents."""
        view = service.engine.snapshot().find(run)
        return json(api.run_detail(view)) if view else json({"error": f"no run named {run!r} is known"}, 404)

    async def push(request: Request, take: Callable[[PushSource, object], object]) -> Response:
        """What all of the push API has in common: who may, how much, and how an error is told."""
        if service.push is None:
            return json({"error": "this service takes no steps: it listens on more than loopback and has no token; set "
                                  "VERL_MONITOR_TOKEN for it and for its senders"}, 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if service.token and not secrets.compare_digest(given.encode(), service.token.encode()):
            return json({"error": "expected the header Authorization: Bearer TOKEN with this service's token"}, 401)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return json({"error": f"expected at most {MAX_BODY_BYTES} bytes in a request"}, 413)
        try:
            answer = take(service.push, orjson.loads(body))
        except orjson.JSONDecodeError as error:
            return json({"error": f"expected JSON: {error}"}, 400)
        except BadRequestError as error:
            return json({"error": str(error)}, 400)
        except BusyError:
            return json({"error": "too many steps are waiting; try again"}, 503)
        # Good items were kept even where others were bad, so the status says what is left to mend.
        return json(answer or {}, 422 if isinstance(answer, dict) and answer["errors"] else 200)

    def take_in(kind: str, take: Callable[[PushSource, str, object], object]) -> None:
        @app.post(f"/api/v1/runs/{{run:path}}/{kind}", name=f"push_{kind}")
        async def taken(run: str, request: Request) -> Response:
            return await push(request, lambda source, body: take(source, run, body))

    take_in("steps", PushSource.steps)
    take_in("phase", PushSource.phase)
    take_in("config", PushSource.config)
    take_in("finish", PushSource.finish)

    @app.get("/api/v1/machine")
    async def machine_json() -> Response:
        """GPUs, nodes, Ray and checkpoints as the probes see them, and what the detectors say of them."""
        view = service.engine.snapshot().machine
        return json(machine_report(view)) if view else json({"error": "nothing is probed here"}, 404)

    @app.get("/machine")
    async def machine_page() -> Response:
        """The machine room's page."""
        view = service.engine.snapshot().machine
        if view is None:
            return html("missing.html", 404, what="Nothing is probed here: no GPU was found and no Ray address given.")
        return html("machine.html", machine=machine_report(view))

    @app.get("/")
    async def index() -> Response:
        """Landing page."""
        snapshot, sources = service.engine.snapshot(), service.monitor_view().sources
        machine = machine_report(snapshot.machine) if snapshot.machine else None
        return html("index.html", runs=[api.run_summary(view) for view in snapshot.runs], sources=sources,
                    machine=machine)

    @app.get("/runs/{run:path}")
    async def run_page(run: str) -> Response:
        """One run's page."""
        view = service.engine.snapshot().find(run)
        if view is None:
            return html("missing.html", 404, what=f"No run named {run} is known.")
        return html("run.html", run=api.run_detail(view))

    @app.get("/runbooks/pictures/{name}")
    async def picture(name: str) -> Response:
        """A picture on a runbook page."""
        known = {path.name: path for path in (runbooks / "pictures").glob("*.png")}
        if name not in known:
            return html("missing.html", 404, what=f"No picture named {name}.", names=[])
        return Response(await asyncio.to_thread(known[name].read_bytes), media_type="image/png")

    @app.get("/runbooks/{name}")
    async def runbook(name: str) -> Response:
        """A runbook page."""
        known = {path.stem: path for path in runbooks.glob("*.md")}
        path = known.get(name.removesuffix(".md"))
        if path is None:
            return html("missing.html", 404, what=f"No runbook named {name}.", names=sorted(known))
        text = await asyncio.to_thread(path.read_text, "utf-8")
        return html("runbook.html", title=path.stem, body=MarkdownIt("commonmark").enable("table").render(text))

    return app
