"""Every check of a configuration. Adding one means adding it to its file."""

from __future__ import annotations

from monitor.preflight import layout, learning, memory, saving, watching
from monitor.preflight.check import Check

CHECKS: tuple[Check, ...] = (*layout.CHECKS, *memory.CHECKS, *learning.CHECKS, *saving.CHECKS, *watching.CHECKS)
