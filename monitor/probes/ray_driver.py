"""The one process of the monitor's that is a driver of a Ray cluster: it keeps a probe on every node and asks them.

Run by ``cluster.py`` as ``python -m monitor.probes.ray_driver ADDRESS SECONDS``, apart from the service, because Ray's
client may hang for minutes when a cluster's head has died, or end its process. It writes one JSON object a line on
standard output and ends when its standard input does.

A probe is an actor without CPUs or GPUs, tied to its node. It is not restarted by Ray, holds nothing, and may die at
any time. The package travels with it, so that nothing has to be installed on the nodes; where ``pynvml`` is missing
there the node's GPUs are not seen.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import monitor

DEADLINE_SECONDS = 4.0
_FORGET_SECONDS = 600.0  # how long a node that has left is told
_AGAIN_SECONDS = 10.0  # before a probe that died is made anew


class NodeActor:
    """The probe, as it runs on a node."""

    def __init__(self, name: str) -> None:
        from monitor.probes.node import NodeProbe

        self._probe = NodeProbe(name, time.monotonic)

    def read(self) -> dict[str, Any]:
        """The node's facts, for JSON."""
        from monitor.probes.exchange import pack

        return pack(self._probe.read(), time.monotonic())


@dataclass(slots=True)
class _Probe:
    """What is known of a node's probe. ``asked``: the outstanding question, at most one."""

    name: str
    actor: Any = None
    asked: Any = None
    facts: dict[str, Any] | None = None
    answered: float = 0.0
    again: float = 0.0
    gone: float | None = None
    detail: str = ""


class Driver:
    """Keeps a probe on each living node."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._probes: dict[str, _Probe] = {}

    def look(self) -> list[dict[str, Any]]:
        """One round: the nodes as they are now."""
        now = time.monotonic()
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for id_, node in alive.items():
            if id_ not in self._probes:
                self._drop_gone(_host(node))  # it has come back under a new id
                self._probes[id_] = _Probe(self._name(node, alive), answered=now)
        for id_, probe in list(self._probes.items()):
            if id_ in alive:
                self._ask(id_, probe, now)
                continue
            probe.gone = now if probe.gone is None else probe.gone
            probe.actor = probe.asked = None
            probe.detail = "Ray says that the node has left the cluster"
            if now - probe.gone > _FORGET_SECONDS:
                del self._probes[id_]
        self._take()
        return [self._told(probe, time.monotonic()) for probe in self._probes.values()]

    def _drop_gone(self, host: str) -> None:
        for id_, probe in list(self._probes.items()):
            if probe.name == host and probe.gone is not None:
                del self._probes[id_]

    def _name(self, node: dict[str, Any], alive: dict[str, dict[str, Any]]) -> str:
        host = _host(node)
        same = sum(other.get("NodeManagerHostname") == host for other in alive.values())
        taken = any(probe.name == host for probe in self._probes.values())
        return f"{host}-{node['NodeID'][:6]}" if same > 1 or taken else host

    def _ask(self, id_: str, probe: _Probe, now: float) -> None:
        if probe.actor is None and now >= probe.again:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            probe.actor = self._ray.remote(NodeActor).options(
                num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(id_, soft=False)).remote(probe.name)
        if probe.actor is not None and probe.asked is None:
            probe.asked = probe.actor.read.remote()

    def _take(self) -> None:
        asked = {probe.asked: probe for probe in self._probes.values() if probe.asked is not None}
        if not asked:
            return
        ready, late = self._ray.wait(list(asked), num_returns=len(asked), timeout=DEADLINE_SECONDS)
        for question in late:
            asked[question].detail = "its probe does not answer"
        for question in ready:
            probe = asked[question]
            probe.asked = None
            try:
                probe.facts, probe.answered = self._ray.get(question, timeout=1.0), time.monotonic()
                probe.detail = ""
            except Exception as error:  # noqa: BLE001 - a probe may fail in any of Ray's ways, which is its own affair
                probe.actor, probe.again = None, time.monotonic() + _AGAIN_SECONDS
                probe.detail = f"its probe died: {str(error).strip().splitlines()[0][:200]}"

    @staticmethod
    def _told(probe: _Probe, now: float) -> dict[str, Any]:
        return {"node": probe.name, "reachable": not probe.detail and probe.facts is not None,
                "age_seconds": now - probe.answered, "detail": probe.detail or ("" if probe.facts else "not asked yet"),
                "facts": probe.facts}


def _host(node: dict[str, Any]) -> str:
    return str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or node["NodeID"])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def connect(address: str, *, travels: bool = False) -> tuple[Any, dict[str, str]]:
    """The connected module ``ray``, None where that failed, and what is to be told: ``dashboard`` or ``error``.

    ``travels``: this package goes along to the nodes.
    """
    try:
        import ray
    except ImportError:
        return None, {"error": "expected the package ray, got none; pip install 'verl-monitor[ray]'"}
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        if port.isdigit():  # ray.init itself waits for minutes where nobody answers
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        context = ray.init(
            address=address, namespace="verl-monitor", log_to_driver=False, logging_level=logging.ERROR,
            runtime_env={"py_modules": [str(Path(monitor.__file__).parent)]} if travels else None)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        return None, {"error": (str(error).strip() or repr(error)).splitlines()[0][:300]}
    return ray, {"dashboard": str(context.dashboard_url or "")}


def main(address: str, every_seconds: float) -> int:
    """Ask all nodes every so often, until standard input ends; the exit status."""
    # What Ray prints must not come between the lines.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ray, told = connect(address, travels=True)
    print(json.dumps(told), file=out, flush=True)
    if ray is None:
        return 1
    driver = Driver(ray)
    while True:
        begun = time.monotonic()
        try:
            round_ = {"nodes": driver.look()}
        except Exception as error:  # noqa: BLE001 - the cluster may go at any time; the parent starts anew
            print(json.dumps({"error": f"Ray does not answer: {str(error)[:200]}"}), file=out, flush=True)
            return 1
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(round_), file=out, flush=True)
        time.sleep(max(0.1, every_seconds - (time.monotonic() - begun)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
