"""The probes that a service's settings ask for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Protocol

from monitor.probes.checkpoint_watch import CheckpointWatch
from monitor.probes.cluster import Cluster
from monitor.probes.node import NodeProbe
from monitor.probes.ray_state import RayState, ray_token
from monitor.probes.room import Room


class ProbeSettings(Protocol):
    """What the configuration says of probes."""

    @property
    def gpu(self) -> bool: ...
    @property
    def checkpoints(self) -> bool: ...
    @property
    def checkpoint_dir(self) -> str | None: ...
    @property
    def ray_address(self) -> str | None: ...
    @property
    def ray_dashboard(self) -> str | None: ...
    @property
    def every_seconds(self) -> float: ...
    @property
    def name(self) -> str | None: ...


def make_room(settings: ProbeSettings, clock: Callable[[], float]) -> Room:
    """The probes of a service."""
    host, address = socket.gethostname(), settings.ray_address or ""
    by_driver = bool(address) and not address.startswith("http")
    dashboard = settings.ray_dashboard or ("" if by_driver else address)
    name = settings.name or (f"ray:{address.rpartition('://')[2]}" if address else f"node:{host}")
    watch = CheckpointWatch(clock, settings.checkpoint_dir) if settings.checkpoints else None
    return Room(
        name, clock, every_seconds=settings.every_seconds, node=NodeProbe(host, clock) if settings.gpu else None,
        cluster=Cluster(address, clock, settings.every_seconds) if by_driver else None, dashboard=dashboard,
        make_ray=lambda url: RayState(url, clock, lambda: ray_token(os.environ)), runs=watch.look if watch else None)
