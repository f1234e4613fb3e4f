"""Probes on the nodes of a Ray cluster, through a driver in a process of its own (``ray_driver``)."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from monitor.facts import NodeFacts
from monitor.probes.exchange import unpack_node

log = logging.getLogger("monitor.probes")

_FIRST_SECONDS = 90.0  # ray.init against a dead head does not give up by itself
_SILENT_SECONDS = 30.0
_LONGEST_PAUSE = 60.0


class Cluster:
    """The nodes of a cluster, as their probes tell them.

    Args:
        address: ``HOST:PORT`` of the cluster's head, or ``auto``.
        clock: the engine's.
        every_seconds: how often the nodes are asked.
    """

    def __init__(self, address: str, clock: Callable[[], float], every_seconds: float = 5.0) -> None:
        self._address, self._clock, self._every = address, clock, every_seconds
        self._nodes: dict[str, NodeFacts] = {}
        self._dashboard, self._detail = "", "not connected yet"
        self._heard = time.monotonic()  # of the driver, its start included
        self._told = -math.inf  # of the nodes
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    @property
    def dashboard(self) -> str:
        """Address of Ray's dashboard, empty while it is not known."""
        return self._dashboard

    @property
    def detail(self) -> str:
        """Why there are no nodes, or why they are old; empty while all is well."""
        return self._detail

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The nodes. While nothing comes from the driver none of them counts as reachable."""
        with self._lock:
            nodes = tuple(self._nodes.values())
        if time.monotonic() - self._told <= max(_SILENT_SECONDS / 2, 3 * self._every):
            return nodes
        return tuple(replace(node, reachable=False, detail=self._detail or "Ray does not answer") for node in nodes)

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="Ray driver", daemon=True).start()
        threading.Thread(target=self._watch, name="Ray driver's watch", daemon=True).start()

    def close(self) -> None:
        """End the driver, and with it its probes."""
        self._stop.set()
        process = self._process
        if process is not None:
            process.kill()  # it holds nothing; its job's end takes the probes with it

    def _run(self) -> None:
        pause = 1.0
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                self._follow()
            except Exception:  # a probe never costs the service
                log.exception("the driver of Ray's node probes failed")
            pause = 1.0 if time.monotonic() - begun > 120 else min(_LONGEST_PAUSE, 2 * pause)
            self._stop.wait(pause)

    def _follow(self) -> None:
        command = [sys.executable, "-m", "monitor.probes.ray_driver", self._address, str(self._every)]
        self._heard = time.monotonic()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True) as process:
            self._process = process
            if self._stop.is_set():
                process.kill()
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    log.warning("a line of the Ray driver could not be read: %r", error)
                self._heard = time.monotonic()
            process.kill()
        self._process = None

    def _watch(self) -> None:
        """End a driver that has nothing more to say: Ray's client hangs when a head has died."""
        while not self._stop.wait(1.0):
            process = self._process
            allowed = _SILENT_SECONDS + self._every if self._dashboard else _FIRST_SECONDS
            if process is not None and time.monotonic() - self._heard > allowed:
                self._tell("Ray has not answered for too long; trying again")
                process.kill()
                self._heard = time.monotonic()

    def _tell(self, why: str) -> None:
        if why != self._detail:
            log.warning("node probes on Ray at %s: %s", self._address, why)
        self._detail = why

    def _take(self, told: dict[str, Any]) -> None:
        if "error" in told:
            self._tell(str(told["error"]))
            return
        if "dashboard" in told:
            url = str(told["dashboard"])
            self._dashboard = url if not url or url.startswith("http") else f"http://{url}"
            log.info("connected to Ray at %s; its dashboard is %s", self._address, self._dashboard or "off")
            return
        now = self._clock()
        nodes: dict[str, NodeFacts] = {}
        for entry in told["nodes"]:
            read = now - float(entry["age_seconds"])
            name = str(entry["node"])
            facts = unpack_node(entry["facts"], read) if entry["facts"] else NodeFacts(node=name, time_seconds=read)
            nodes[name] = replace(facts, node=name, reachable=bool(entry["reachable"]), detail=(
                str(entry["detail"]) or facts.detail))
        with self._lock:
            self._nodes, self._told = nodes, time.monotonic()
        self._detail = ""
