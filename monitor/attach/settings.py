"""What the environment says, the clock, and the few words on stderr."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass

from monitor.attach import importhook
from monitor.attach.rows import counts

QUEUE_ROWS = 10_000
SPOOL_MEGABYTES = 256
LINGER_SECONDS = 20.0
MAX_LINGER_SECONDS = 3600.0
SAY_AGAIN_SECONDS = 600.0

_OFFSET = time.time() - time.monotonic()


def clock() -> float:
    """Unix seconds that never go back."""
    return _OFFSET + time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where rows go. Empty means: not there. ``linger_seconds``: longest wait at the end for a scrape that sees it."""

    url: str = ""
    listen: str = ""
    token: str = ""
    spool: str = ""
    spool_bytes: int = SPOOL_MEGABYTES * 1_000_000
    queue_rows: int = QUEUE_ROWS
    linger_seconds: float = LINGER_SECONDS


def read(url: str = "", listen: str = "") -> Settings:
    """The environment's settings; a number that is none is told and its default used."""
    env = os.environ
    if importhook.disabled():
        return Settings()
    return Settings(
        url=(url or env.get("VERL_MONITOR_URL", "")).strip().rstrip("/"),
        listen=(listen or env.get("VERL_MONITOR_LISTEN", "")).strip(),
        token=env.get("VERL_MONITOR_TOKEN", "").strip(), spool=env.get("VERL_MONITOR_SPOOL", "").strip(),
        spool_bytes=_positive("VERL_MONITOR_SPOOL_MB", SPOOL_MEGABYTES) * 1_000_000,
        queue_rows=_positive("VERL_MONITOR_QUEUE_ROWS", QUEUE_ROWS),
        linger_seconds=_seconds("VERL_MONITOR_LINGER", LINGER_SECONDS, MAX_LINGER_SECONDS))


def _positive(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text:
        say(f"{name}={text} is no positive number; {default} is used")
    return default


def _seconds(name: str, default: float, most: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if 0 <= number <= most:
        return number
    say(f"{name}={text} is no number of seconds from 0 to {most:g}; {default:g} are used")
    return default


def say(text: str) -> None:
    """A line for whoever reads the trainer's output."""
    try:
        sys.stderr.write(f"verl-monitor: {text}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - stderr may be closed or gone
        counts["stderr"] += 1


def fault(where: str, error: BaseException) -> None:
    """An error of ours: told the first time, counted ever after."""
    counts["error"] += 1
    if counts["error"] == 1:
        say(f"{where} failed, training goes on: {error!r:.300}")


class Seldom:
    """Tells of a state that changes, at most every ten minutes, so that a flapping service fills no log."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._bad = False

    def bad(self, text: str) -> None:
        """It fails."""
        if not self._bad and clock() - self._last >= SAY_AGAIN_SECONDS:
            self._bad, self._last = True, clock()
            say(text)

    def good(self, text: str) -> None:
        """It works again; told only when the failure was."""
        if self._bad:
            self._bad, self._last = False, clock()
            say(text)
