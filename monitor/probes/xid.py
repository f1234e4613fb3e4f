"""Xid errors: what NVIDIA's driver reports of a GPU beside the answers to questions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_MOST_AT_ONCE = 20


class Xids:
    """The last Xid of each GPU, as far as the driver tells them without waiting. Raises nothing of the driver's: some
    do not tell of events at all.

    Args:
        nvml: the bindings.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._last: dict[str, int] = {}

    def begin(self, count: int) -> None:
        """Listen to so many GPUs. Blocking, as each of these calls."""
        self._events = self._quietly(lambda: self._nvml.nvmlEventSetCreate())
        for index in range(count if self._events is not None else 0):
            self._quietly(partial(self._listen, index))

    def take(self) -> None:
        """Remember what came since the last time."""
        nvml = self._nvml
        for _ in range(_MOST_AT_ONCE if self._events is not None else 0):
            event = self._quietly(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                return
            uuid = self._quietly(partial(nvml.nvmlDeviceGetUUID, event.device))
            if uuid is not None and event.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._last[text(uuid)] = int(event.eventData)

    def of(self, uuid: str) -> int | None:
        """The last Xid of a GPU, None where none came."""
        return self._last.get(uuid)

    def end(self) -> None:
        """Listen no more; what came is kept."""
        events, self._events = self._events, None
        if events is not None:
            self._quietly(lambda: self._nvml.nvmlEventSetFree(events))

    def _listen(self, index: int) -> None:
        nvml = self._nvml
        nvml.nvmlDeviceRegisterEvents(
            nvml.nvmlDeviceGetHandleByIndex(index), nvml.nvmlEventTypeXidCriticalError, self._events)

    def _quietly(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError):  # the second: bindings that lack the call
            return None


def text(value: str | bytes) -> str:
    """Text of the bindings, which was bytes in old ones."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
