"""`verl-monitor serve`: a service from its configuration, on a port, until it is told to stop."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from monitor import __version__
from monitor.clock import steady_clock
from monitor.config import Config, FileConfig, RunRules, SourceConfig, StdinConfig
from monitor.config.reading import RESERVED_NAMES
from monitor.engine import Engine
from monitor.probes.build import make_room
from monitor.service import Service, create_app
from monitor.sources import Source
from monitor.sources.file import FileSource
from monitor.sources.prometheus import PrometheusSource
from monitor.sources.push import PushSource
from monitor.sources.stdin import StdinSource

SHUTDOWN_SECONDS = 4.0


def serve_config(config: Config) -> int:
    """Serve what the configuration says; the exit status."""
    clock = steady_clock()
    rules = RunRules(config)
    engine = Engine(config.engine, rules.detectors, rules.rename, rules.machine_detectors)
    # Whoever reaches the port could write runs of their own, so without a token only this host may.
    allowed = config.token or config.listen.host in ("127.0.0.1", "::1", "localhost")
    push = PushSource(clock) if config.push.enabled and allowed else None
    service = Service(engine=engine, sources=make_sources(config, clock), clock=clock, push=push, token=config.token,
                      room=make_room(config.probes, clock))
    return listen(service, config.listen)


def make_sources(config: Config, clock: Callable[[], float]) -> list[Source]:
    """The sources of a configuration."""
    sources: list[Source] = []
    for source in _named(config.sources):
        if isinstance(source, FileConfig):
            sources.append(FileSource(
                source.file, clock=clock, run=source.run, project=source.project, poll_seconds=config.poll_seconds,
                patterns=source.patterns, ended_after_seconds=source.ended_after_seconds, max_files=source.max_files,
                name=source.name or ""))
        elif isinstance(source, StdinConfig):
            sources.append(StdinSource(sys.stdin.buffer, clock, source.run or "stdin", source.project or ""))
        else:
            sources.append(PrometheusSource(
                source.prometheus, clock=clock, run=source.run, project=source.project,
                every_seconds=source.every_seconds, name=source.name, token=source.token))
    return sources


def _named(sources: Sequence[SourceConfig]) -> list[SourceConfig]:
    """Sources, each with a name of its own on /metrics: the last part of its path, or its host, and a number where that
    is not enough."""
    taken = {*RESERVED_NAMES, *(source.name for source in sources if not isinstance(source, StdinConfig))}
    named: list[SourceConfig] = []
    for source in sources:
        if not isinstance(source, StdinConfig) and source.name is None:
            own = f"file:{Path(source.file).absolute().name}" if isinstance(source, FileConfig) else \
                f"prometheus:{urlsplit(source.prometheus).netloc}"
            name, number = own, 1
            while name in taken:
                number += 1
                name = f"{own}-{number}"
            taken.add(name)
            source = replace(source, name=name)
        named.append(source)
    return named


def listen(service: Service, address: tuple[str, int], *, intro: Sequence[str] = ()) -> int:
    """Serve until SIGTERM or SIGINT; the exit status: 3 where it could not begin."""
    host, port = address
    try:
        # Bound here and not by uvicorn, so that a port in use is told in one line and port 0 can be told at all.
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        print(f"verl-monitor: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return 3
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(f"verl-monitor {__version__} on http://{shown}:{port}/  (metrics: http://{shown}:{port}/metrics)")
    for line in intro:
        print(line)
    sys.stdout.flush()
    config = uvicorn.Config(create_app(service), log_level="warning", access_log=False,
                            timeout_graceful_shutdown=2, lifespan="on")
    server = _Server(config)
    server.run(sockets=[listener])
    return 0 if server.started else 3


class _Server(uvicorn.Server):
    """A server whose end cannot be held up: a thread that hangs in a dead network file system would be waited for
    without end by the interpreter."""

    def handle_exit(self, sig: int, frame: object) -> None:
        # Not passed on: uvicorn would raise the signal again at its end and turn a clean end into a death by signal.
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        deadline = threading.Timer(SHUTDOWN_SECONDS, os._exit, (0,))
        deadline.daemon = True
        deadline.start()
