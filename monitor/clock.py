"""The service's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Unix seconds now, and never back: wall time at the start plus monotonic time since.

    Ages and silences are differences of its readings, so a host clock that jumps by hours moves none of them.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
