"""GPUs as NVIDIA's driver tells them, through ``pynvml`` (distribution nvidia-ml-py).

Each field is asked for alone: one that a GPU does not answer (MIG, unified memory, gVisor, vGPU) costs itself, is named
in ``unsupported``, and is asked again now and then only. Only reads are made; no setting of a GPU is touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from monitor.facts import Gpu, GpuState, Process

_AGAIN_AFTER_READS = 60
_LONGEST_PAUSE = 60.0
_MAX_GPUS = 64
_MAX_PROCESSES = 200
_LOST_ADVICE = ("the driver answered before; in a container a reload of systemd on the host takes the GPUs away: then "
                "recreate the container")


class Nvml:
    """The driver.

    Args:
        clock: any steady one; decides when a lost driver is tried again.
        load: gives the module ``pynvml``; ImportError where it is not installed.
    """

    def __init__(self, clock: Callable[[], float],
                 load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._clock, self._load = clock, load
        self._nvml: Any = None
        self._ready = self._worked = False
        self._pause, self._again = 1.0, 0.0
        self._detail = ""
        self._reads = 0
        self._refused: dict[tuple[str, str], int] = {}  # GPU, field -> read at which it was refused
        self._events: Any = None
        self._xids: dict[str, int] = {}

    def read(self) -> tuple[GpuState, tuple[Gpu, ...], str]:
        """How the driver answers, its GPUs, and why there are none. Blocking, perhaps for ever; raises nothing of the
        driver's."""
        self._reads += 1
        if not self._ready and not self._begin():
            return GpuState.LOST if self._worked else GpuState.NONE, (), self._detail
        nvml = self._nvml
        try:
            gpus = self._gpus(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            return self._lose(error)
        if gpus and all(gpu.lost for gpu in gpus) and not any("lost" in gpu.lost.lower() for gpu in gpus):
            return self._lose(gpus[0].lost)  # it counts its GPUs but answers for none of them
        if not gpus:
            return GpuState.NONE, (), "the NVIDIA driver has no GPU here"
        self._worked, self._pause = True, 1.0
        return GpuState.OK, tuple(gpus), ""

    def close(self) -> None:
        """Let go of the driver."""
        if self._ready:
            self._ready = False
            self._quietly(self._nvml.nvmlShutdown)

    def _begin(self) -> bool:
        if self._again > self._clock():
            return False
        try:
            self._nvml = self._nvml or self._load()
        except ImportError:
            self._again = float("inf")
            self._detail = "no GPU is looked at: pynvml is not installed (pip install nvidia-ml-py)"
            return False
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self._again = self._clock() + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
            self._detail = f"{_LOST_ADVICE} ({error})" if self._worked else f"no NVIDIA driver here ({error})"
            return False
        self._ready, self._events = True, None
        return True

    def _lose(self, error: object) -> tuple[GpuState, tuple[Gpu, ...], str]:
        self.close()
        self._again = self._clock() + self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        self._detail = f"{_LOST_ADVICE} ({error})" if self._worked else f"the NVIDIA driver does not answer ({error})"
        return GpuState.LOST if self._worked else GpuState.NONE, (), self._detail

    def _gpus(self, count: int) -> list[Gpu]:
        gpus: list[Gpu] = []
        for index in range(min(count, _MAX_GPUS)):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
            except self._nvml.NVMLError as error:
                if isinstance(error, self._nvml.NVMLError_NoPermission):
                    continue  # another one's GPU
                gpus.append(Gpu(index=index, uuid=f"index-{index}", lost=str(error)))
                continue
            slices = self._slices(handle, index, uuid)
            gpus += slices or [self._gpu(handle, index, uuid)]
        self._take_events()
        return [gpu if gpu.uuid not in self._xids else _with_xid(gpu, self._xids[gpu.uuid]) for gpu in gpus]

    def _slices(self, handle: Any, index: int, parent: str) -> list[Gpu]:
        """The MIG slices of a GPU, empty where it is not cut up."""
        nvml = self._nvml
        mode = self._field(parent, "mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        if not mode:
            return []
        slices = []
        for place in range(self._field(parent, "mig_slices", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                uuid = _text(nvml.nvmlDeviceGetUUID(part))
            except nvml.NVMLError:
                continue  # that place is empty
            slices.append(self._gpu(part, index, uuid, parent))
        return slices

    def _gpu(self, handle: Any, index: int, uuid: str, parent: str = "") -> Gpu:
        nvml = self._nvml

        def field(name: str, ask: Callable[[], Any]) -> Any:
            return self._field(uuid, name, ask)

        try:
            total, used, reserved, free = self._memory(handle, uuid)
            busy = field("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            power = field("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
            limit = field("power_limit_watts", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            clock = field("sm_clock_hertz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            warm = field("temperature_celsius",
                         lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            errors = field("ecc_uncorrected", lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC))
            processes = field("processes", lambda: self._processes(handle))
            name = field("name", lambda: _text(nvml.nvmlDeviceGetName(handle))) or ""
        except nvml.NVMLError as error:  # the GPU itself, not one of its fields
            return Gpu(index=index, uuid=uuid, parent=parent, lost=str(error))
        return Gpu(
            index=index, uuid=uuid, name=name, parent=parent, memory_total=total, memory_used=used,
            memory_reserved=reserved, memory_free=free, utilization=None if busy is None else busy / 100,
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            temperature_celsius=None if warm is None else float(warm),
            sm_clock_hertz=None if clock is None else clock * 1e6, ecc_uncorrected=errors, processes=processes,
            unsupported=tuple(sorted(name for owner, name in self._refused if owner == uuid and name in _FIELDS)))

    def _memory(self, handle: Any, uuid: str) -> tuple[int | None, int | None, int | None, int | None]:
        """Total, used, reserved and free bytes. The first form of the call counts what the driver reserves as used; the
        second tells it apart."""
        nvml = self._nvml
        both = self._field(uuid, "memory_reserved", lambda: nvml.nvmlDeviceGetMemoryInfo(
            handle, version=nvml.nvmlMemory_v2))
        if both is not None:
            self._refused.pop((uuid, "memory_used"), None)
            return both.total, both.used, both.reserved, both.free
        one = self._field(uuid, "memory_used", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return (one.total, one.used, None, one.free) if one is not None else (None, None, None, None)

    def _processes(self, handle: Any) -> tuple[Process, ...]:
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)[:_MAX_PROCESSES]
        return tuple(Process(pid=process.pid, gpu_bytes=process.usedGpuMemory) for process in found)

    def _field(self, uuid: str, name: str, ask: Callable[[], Any]) -> Any:
        """A field's value; None where the GPU does not answer it.

        Raises:
            NVMLError: the GPU or the driver is gone.
        """
        refused = self._refused.get((uuid, name))
        if refused is not None and self._reads - refused < _AGAIN_AFTER_READS:
            return None
        try:
            value = ask()
        except self._nvml.NVMLError as error:
            if isinstance(error, (self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_Uninitialized,
                                  self._nvml.NVMLError_Unknown, self._nvml.NVMLError_GpuNotFound)):
                raise
            self._refused[uuid, name] = self._reads
            return None
        self._refused.pop((uuid, name), None)
        return value

    def _take_events(self) -> None:
        """Remember the last Xid of each GPU, as far as the driver tells them without waiting."""
        nvml = self._nvml
        if self._events is None:
            self._events = False
            events = self._quietly(nvml.nvmlEventSetCreate)
            if events is None:
                return
            for index in range(_MAX_GPUS):
                handle = self._quietly(lambda: nvml.nvmlDeviceGetHandleByIndex(index))  # noqa: B023 - called at once
                if handle is None:
                    break
                self._quietly(lambda: nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError, events))  # noqa: B023
            self._events = events
        for _ in range(20 if self._events else 0):
            event = self._quietly(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                return
            uuid = self._quietly(lambda: nvml.nvmlDeviceGetUUID(event.device))  # noqa: B023
            if uuid is not None and event.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._xids[_text(uuid)] = int(event.eventData)

    def _quietly(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nvml.NVMLError:
            return None


_FIELDS = {"memory_reserved", "memory_used", "utilization", "power_watts", "power_limit_watts", "sm_clock_hertz",
           "temperature_celsius", "ecc_uncorrected", "processes", "name"}


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _with_xid(gpu: Gpu, xid: int) -> Gpu:
    return replace(gpu, xid=xid)
