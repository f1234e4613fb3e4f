"""A probe at work: it looks again and again in a thread of its own, and its last result can be had without waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger("monitor.probes")


class Loop(Generic[T]):
    """Calls ``look`` every so often. A look that raises costs itself; one that hangs costs this probe, and is told by
    ``age``. The thread is a daemon, so that nothing a probe does holds up the end of the service.

    Args:
        look: blocking.
        every_seconds: pause between two looks.
    """

    def __init__(self, look: Callable[[], T], name: str, every_seconds: float) -> None:
        self._look, self._name, self._every = look, name, every_seconds
        self._stop, self._soon = threading.Event(), threading.Event()
        self._result: tuple[float, T] | None = None
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after the present look, without waiting for it."""
        self._stop.set()
        self._soon.set()

    def hurry(self) -> None:
        """Look again at once."""
        self._soon.set()

    @property
    def latest(self) -> T | None:
        """The last result, None before the first."""
        return self._result[1] if self._result else None

    @property
    def age(self) -> float:
        """Seconds since the last result; infinite before the first."""
        return time.monotonic() - self._result[0] if self._result else float("inf")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._result = (time.monotonic(), self._look())
                self._failing = False
            except Exception:
                if not self._failing:  # told once, not at each look
                    log.exception("%s failed; it goes on with the next look", self._name)
                self._failing = True
            self._soon.wait(self._every)
            self._soon.clear()
