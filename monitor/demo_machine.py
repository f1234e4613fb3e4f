"""The demo's machine room where this machine has no GPU: recorded facts of a real run, played beside the recordings.

The readings of the GPU go with the run that hangs: they reach its hang when its last row is written, and then go on.
All of it is marked as recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

from monitor.facts import GpuState, NodeFacts, RayFacts
from monitor.probes.exchange import shifted, unpack_node, unpack_ray
from monitor.probes.node import NodeProbe
from monitor.probes.room import Room


class Recording:
    """A recorded node and cluster.

    Args:
        clock: the engine's.
        seconds_to_hang: time from now on until the recorded run hangs.
    """

    def __init__(self, clock: Callable[[], float], seconds_to_hang: float) -> None:
        data: dict[str, Any] = json.loads((resources.files("monitor") / "demo_runs" / "machine.json").read_bytes())
        self._series = [unpack_node(node, 0.0) for node in data["series"]]
        self._ray = unpack_ray(data["ray"], 0.0)
        self._hang = float(data["hang_seconds"])
        self._clock, self._begun, self._wait = clock, clock(), max(1.0, seconds_to_hang)

    def read(self) -> NodeFacts:
        """The node as it was at this point of the recording; what hangs goes on hanging."""
        played = self._clock() - self._begun
        hung = [node for node in self._series if node.time_seconds > self._hang]
        if played < self._wait:
            place = played / self._wait * self._hang
            node = [node for node in self._series if node.time_seconds <= place][-1]
            return shifted(node, self._clock() - node.time_seconds)
        node = hung[int(played - self._wait) // 6 % len(hung)]
        # Titles stay what they are since the hang began, which here is later or earlier than in the recording.
        now, since = self._clock(), self._begun + self._wait
        gpus = tuple(replace(gpu, processes=tuple(
            replace(process, title_since_seconds=since) for process in gpu.processes or ())) for gpu in node.gpus)
        return replace(node, time_seconds=now, gpus=gpus)

    def ray(self) -> RecordedRay:
        """The cluster of the recording."""
        return RecordedRay(self._ray, self._clock, self._begun + self._wait)

    def close(self) -> None:
        """Nothing is held."""


class RecordedRay:
    """The recorded cluster. Its tasks are those of the hang."""

    def __init__(self, ray: RayFacts, clock: Callable[[], float], hangs_at: float) -> None:
        self._ray, self._clock, self._hangs_at = ray, clock, hangs_at

    def read(self, *, tasks: bool) -> RayFacts:
        """The cluster, with its tasks as old as the hang is."""
        now = self._clock()
        age = now - self._hangs_at
        running = tuple(replace(task, age_seconds=age) for task in self._ray.tasks or ()) if tasks and age > 0 else None
        return replace(self._ray, time_seconds=now, tasks=running)


def recorded_room(clock: Callable[[], float], seconds_to_hang: float) -> Room | None:
    """A room of recorded facts; None where this machine has GPUs of its own."""
    own = NodeProbe("here", time.monotonic)
    state = own.read().gpu_state
    own.close()
    if state is GpuState.OK:
        return None
    recording = Recording(clock, seconds_to_hang)
    return Room("node:recorded", clock, every_seconds=1.0, node=recording, dashboard="recorded",
                make_ray=lambda _: recording.ray())
