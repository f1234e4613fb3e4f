"""One node: its GPUs, what runs on it and since when, its host memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from monitor.facts import Gpu, GpuState, NodeFacts, Process, Role
from monitor.probes.nvml import Answer, Nvml
from monitor.probes.processes import ProcessInfo, of_a_job, role_of, scan
from monitor.probes.worker import HungError, Worker

log = logging.getLogger("monitor.probes")

DEADLINE_SECONDS = 5.0
_MOST_LISTED = 500
_CLOSE_SECONDS = 0.4


class NodeProbe:
    """What can be seen of this machine without a privilege.

    Args:
        node: its name.
        clock: the engine's.
        nvml: the GPU driver.
        deadline_seconds: for all of the driver's answers; one that hangs is abandoned, and no other is asked for until
            it comes back.
        root: of the process file system.
    """

    def __init__(self, node: str, clock: Callable[[], float], *, nvml: Nvml | None = None,
                 deadline_seconds: float = DEADLINE_SECONDS, root: str = "/proc") -> None:
        self._node, self._clock, self._deadline, self._root = node, clock, deadline_seconds, root
        self._nvml = nvml or Nvml(clock)
        self._worker = Worker(self._nvml.read, "the GPU driver")
        self._titles: dict[int, tuple[str, float]] = {}
        self._said = (GpuState.OK, "")
        self._answered = False

    def read(self) -> NodeFacts:
        """The node now. Blocking, for the deadline at most."""
        state, gpus, detail = self._ask()
        now = self._clock()
        visible = scan(self._root)
        self._note_titles(visible, now)
        total, available = host_memory(self._root)
        # A hang's detail tells its length, which is another at each look; a log line for each helps nobody.
        said = (state, "" if state is GpuState.HUNG else detail)
        if said != self._said:
            self._said = said
            log.log(logging.INFO if state in (GpuState.NONE, GpuState.OK) else logging.WARNING, "%s: %s", self._node,
                    detail or "its GPUs answer")
        return NodeFacts(
            node=self._node, time_seconds=now, gpu_state=state, detail=detail,
            gpus=tuple(replace(gpu, processes=self._named(gpu, visible)) for gpu in gpus),
            processes=tuple(self._process(info.pid, visible, None) for info in of_a_job(visible)[:_MOST_LISTED]),
            host_memory_total=total, host_memory_available=available)

    def close(self) -> None:
        """Let go of the driver. Blocking for less than a second: a call that hangs is left alone."""
        if self._worker.settle(_CLOSE_SECONDS):
            closing = threading.Thread(target=self._nvml.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)

    def _ask(self) -> Answer:
        try:
            answer = self._worker.ask(self._deadline)
        except HungError as error:
            # What it told before is old, so it is not told again.
            return GpuState.HUNG, (), f"{error}; it is not asked again until it comes back"
        except Exception as error:  # noqa: BLE001 - odd bindings cost the GPUs, not what else the node tells
            state = GpuState.LOST if self._answered else GpuState.NONE
            return state, (), f"the GPUs could not be read ({error!r:.200})"
        self._answered = self._answered or answer[0] is GpuState.OK
        return answer

    def _note_titles(self, visible: dict[int, ProcessInfo], now: float) -> None:
        known = self._titles
        self._titles = {pid: known[pid] if pid in known and known[pid][0] == info.title else (info.title, now)
                        for pid, info in visible.items()}

    def _named(self, gpu: Gpu, visible: dict[int, ProcessInfo]) -> tuple[Process, ...] | None:
        if gpu.processes is None:
            return None
        return tuple(self._process(process.pid, visible, process.gpu_bytes) for process in gpu.processes)

    def _process(self, pid: int, visible: dict[int, ProcessInfo], used: int | None) -> Process:
        title, since = self._titles.get(pid, ("", 0.0))
        role = role_of(pid, visible) if title else Role.UNATTRIBUTED
        return Process(pid=pid, title=title, role=role, title_since_seconds=since, gpu_bytes=used)


def host_memory(root: str = "/proc") -> tuple[int | None, int | None]:
    """Bytes of host memory, in all and available; None where they are not told."""
    values = {}
    try:
        with open(f"{root}/meminfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None, None
    return values.get("MemTotal"), values.get("MemAvailable")
