"""GPUs as NVIDIA's driver tells them, through ``pynvml`` (distribution nvidia-ml-py).

Each field is asked for alone: one that a GPU does not answer (MIG, unified memory, gVisor, vGPU) costs itself, is named
in ``unsupported``, and is asked again now and then only. Only reads are made; no setting of a GPU is touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from monitor.facts import Gpu, GpuState
from monitor.probes.gpu_fields import FIELDS, asks, memory_asks, processes_of
from monitor.probes.xid import Xids, text

_AGAIN_AFTER_READS = 60
_LONGEST_PAUSE = 60.0
_MAX_GPUS = 64
_LOST_ADVICE = ("the driver answered before; in a container a reload of systemd on the host takes the GPUs away: then "
                "recreate the container")
_NAMELESS = "index-"
_NOT_LISTED = "the driver does not list it any more"

Answer = tuple[GpuState, tuple[Gpu, ...], str]


class Nvml:
    """The driver. One thread at a time may ask it.

    Args:
        clock: any steady one; decides when a lost driver is tried again.
        load: gives the module ``pynvml``; ImportError where it is not installed.
    """

    def __init__(self, clock: Callable[[], float],
                 load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._clock, self._load = clock, load
        self._nvml: Any = None
        self._xids: Xids | None = None
        self._ready = self._worked = self._closed = False
        self._pause, self._again = 1.0, 0.0
        self._detail = ""
        self._reads = 0
        self._refused: dict[tuple[str, str], tuple[int, Exception]] = {}  # GPU, field -> read, why
        self._known: dict[str, int] = {}  # uuid -> index, of GPUs that answered
        self._silent: list[str] = []  # why GPUs of this read answer nothing at all, although they are not lost

    def read(self) -> Answer:
        """How the driver answers, its GPUs, and why there are none. Blocking, perhaps for ever; raises nothing of the
        driver's. A GPU that answered and is not listed any more counts as lost for as long as the monitor runs."""
        self._reads += 1
        if self._closed:
            return GpuState.NONE, (), "the GPUs are not looked at any more"
        if not self._ready and not self._begin():
            return GpuState.LOST if self._worked else GpuState.NONE, (), self._detail
        nvml = self._nvml
        self._silent = []
        try:
            count = nvml.nvmlDeviceGetCount()
            gpus = self._gpus(count)
        except nvml.NVMLError as error:
            return self._lose(str(error))
        if not gpus or len(self._silent) == len(gpus):
            # It may count its GPUs and yet answer for none of them, which is the driver's fault and not theirs.
            return self._lose(self._silent[0] if gpus else
                              f"{count} listed, none may be asked from here" if count else "none listed")
        self._worked, self._pause = True, 1.0
        return GpuState.OK, (*gpus, *self._missing(gpus)), ""

    def close(self) -> None:
        """Let go of the driver for good. Blocking, perhaps for ever."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if not self._ready:
            return
        self._ready = False
        if self._xids is not None:
            self._xids.end()
        with suppress(self._nvml.NVMLError):  # it may be gone already
            self._nvml.nvmlShutdown()

    def _begin(self) -> bool:
        if self._again > self._clock():
            return False
        try:
            self._nvml = self._nvml or self._load()
        except ImportError:
            self._again = float("inf")
            self._detail = "no GPU is looked at: pynvml is not installed (pip install nvidia-ml-py)"
            return False
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._wait()
            self._detail = f"{_LOST_ADVICE} ({error})" if self._worked else f"no NVIDIA driver here ({error})"
            return False
        self._ready = True
        self._refused.clear()
        self._xids = self._xids or Xids(nvml)
        with suppress(nvml.NVMLError):  # the read that follows tells why
            self._xids.begin(min(nvml.nvmlDeviceGetCount(), _MAX_GPUS))
        return True

    def _wait(self) -> None:
        self._again = self._clock() + self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    def _lose(self, why: str) -> Answer:
        self._release()
        self._wait()
        self._detail = f"{_LOST_ADVICE} ({why})" if self._worked else f"the NVIDIA driver has no GPU here ({why})"
        return GpuState.LOST if self._worked else GpuState.NONE, (), self._detail

    def _gpus(self, count: int) -> list[Gpu]:
        nvml = self._nvml
        if self._xids is not None:
            self._xids.take()
        gpus: list[Gpu] = []
        for index in range(min(count, _MAX_GPUS)):
            known = next((uuid for uuid, place in self._known.items() if place == index), f"{_NAMELESS}{index}")
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                if not isinstance(error, nvml.NVMLError_NoPermission):  # another one's GPU
                    gpus.append(self._failed(index, known, error))
                continue
            try:
                uuid = text(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError as error:
                if isinstance(error, nvml.NVMLError_NoPermission):  # but its slices may be ours
                    gpus += self._slices(handle, index, known)
                else:
                    gpus.append(self._failed(index, known, error))
                continue
            gpus += self._slices(handle, index, uuid) or [self._gpu(handle, index, uuid)]
        return gpus

    def _missing(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """GPUs that answered once and are not among these."""
        present = {gpu.parent or gpu.uuid: gpu for gpu in gpus}
        self._known.update({uuid: gpu.index for uuid, gpu in present.items()
                            if not gpu.lost and not uuid.startswith(_NAMELESS)})
        return [Gpu(index=index, uuid=uuid, lost=_NOT_LISTED) for uuid, index in self._known.items()
                if uuid not in present]

    def _failed(self, index: int, uuid: str, error: Exception, parent: str = "") -> Gpu:
        """A GPU that answers nothing."""
        if not self._fell(error):
            self._silent.append(str(error))
        for key in [key for key in self._refused if key[0] == uuid]:
            del self._refused[key]  # once it comes back, it may answer all
        return Gpu(index=index, uuid=uuid, parent=parent, lost=str(error), xid=self._xid(uuid, parent))

    def _fell(self, error: Exception) -> bool:
        """Whether an error tells that the GPU itself is out of service."""
        nvml = self._nvml
        return isinstance(error, (nvml.NVMLError_GpuIsLost, nvml.NVMLError_GpuNotFound, nvml.NVMLError_ResetRequired))

    def _slices(self, handle: Any, index: int, parent: str) -> list[Gpu]:
        """The MIG slices of a GPU, empty where it is not cut up."""
        nvml = self._nvml
        slices = []
        try:
            # A GPU that may not be asked whether it is cut up may still name its slices.
            if self._field(parent, "mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0]) == 0:
                return []
            places = self._field(parent, "mig_slices", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        except nvml.NVMLError:
            return []  # the same befalls its fields, and is told there
        for place in range(places):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                uuid = text(nvml.nvmlDeviceGetUUID(part))
            except nvml.NVMLError:
                continue  # that place is empty
            slices.append(self._gpu(part, index, uuid, parent))
        return slices

    def _gpu(self, handle: Any, index: int, uuid: str, parent: str = "") -> Gpu:
        nvml = self._nvml
        try:
            memory = self._memory(handle, uuid)
            told = {name: self._field(uuid, name, ask) for name, ask in asks(nvml, handle).items()}
            name = self._field(uuid, "name", lambda: text(nvml.nvmlDeviceGetName(handle)))
        except nvml.NVMLError as error:
            return self._failed(index, uuid, error, parent)
        refused = {field: why for (owner, field), (_, why) in self._refused.items() if owner == uuid}
        if memory is None and all(value is None for value in told.values()):
            unknown = next((why for why in refused.values() if isinstance(why, nvml.NVMLError_Unknown)), None)
            if unknown is not None:  # one field that fails so is that field's fault: some GPUs' power does
                return self._failed(index, uuid, unknown, parent)
        processes = processes_of(told.pop("processes"), told.pop("graphics"))
        return Gpu(
            index=index, uuid=uuid, name=name or "", parent=parent, memory_total=getattr(memory, "total", None),
            memory_used=getattr(memory, "used", None), memory_reserved=getattr(memory, "reserved", None),
            memory_free=getattr(memory, "free", None), processes=processes, xid=self._xid(uuid, parent),
            unsupported=tuple(sorted(refused.keys() & set(FIELDS))), **told)

    def _memory(self, handle: Any, uuid: str) -> Any:
        """The driver's answer on memory, None without one."""
        for name, ask in memory_asks(self._nvml, handle):
            memory = self._field(uuid, name, ask)
            if memory is not None and memory.total:  # 0 of 0 is no answer
                if name == "memory_reserved":
                    self._refused.pop((uuid, "memory_used"), None)
                return memory
        return None

    def _xid(self, uuid: str, parent: str) -> int | None:
        return self._xids.of(parent or uuid) if self._xids is not None else None

    def _field(self, uuid: str, name: str, ask: Callable[[], Any]) -> Any:
        """A field's value; None where the GPU does not answer it.

        Raises:
            NVMLError: the GPU or the driver is gone.
        """
        nvml = self._nvml
        refused = self._refused.get((uuid, name))
        if refused is not None and self._reads - refused[0] < _AGAIN_AFTER_READS:
            return None
        try:
            value = ask()
        except (nvml.NVMLError, AttributeError) as error:  # the second: bindings that lack the call
            if self._fell(error) or isinstance(error, nvml.NVMLError_Uninitialized):
                raise
            self._refused[uuid, name] = (self._reads, error)
            return None
        self._refused.pop((uuid, name), None)
        return value
