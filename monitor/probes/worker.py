"""A worker for calls that may never come back: a driver in uninterruptible sleep, a dead network file system."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class HungError(Exception):
    """The call has not come back in time, and is still out."""


class Worker(Generic[T]):
    """Runs one call at a time in a thread that can be abandoned.

    At most one call is outstanding: while one hangs, ``ask`` says so at once and begins no other. Threads are daemons:
    they hold up no end of the process.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._name = call, name
        self._thread: threading.Thread | None = None
        self._outcome: list[T | BaseException] = []
        self._begun = 0.0

    def ask(self, seconds: float) -> T:
        """The call's result, waited for so long. Blocking.

        Raises:
            HungError: it is not there in time; one that comes later is thrown away.
            Exception: whatever the call raised.
        """
        if self._thread is not None:
            self._thread.join(seconds if self._begun + seconds > time.monotonic() else 0.0)
            if self._thread.is_alive():
                raise HungError(f"{self._name}: no answer for {time.monotonic() - self._begun:.0f} s")
        outcome: list[T | BaseException] = []

        def run() -> None:
            try:
                outcome.append(self._call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                outcome.append(error)

        self._outcome, self._begun = outcome, time.monotonic()
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise HungError(f"{self._name}: no answer within {seconds:g} s")
        self._thread = None
        result = outcome[0]
        if isinstance(result, BaseException):
            raise result
        return result

    def settle(self, seconds: float) -> bool:
        """Wait so long at most for a call that is out; whether none is out then. Blocking."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return not self.outstanding

    @property
    def outstanding(self) -> bool:
        """Whether a call is out that has not come back."""
        thread = self._thread  # whoever asks may be another thread than the one that set it
        return thread is not None and thread.is_alive()
