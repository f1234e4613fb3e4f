"""From verdicts to findings: a level must be confirmed before it rises and before it clears."""

from __future__ import annotations

from dataclasses import dataclass

from monitor.model import Severity, Status, Verdict


@dataclass(slots=True)
class Level:
    """Confirmed level of one detector on one run.

    ``rise_steps`` verdicts in a row at or above a level raise it, ``clear_steps`` in a row below it drop it; a hard
    verdict raises at once. Only verdicts count: a row about which the detector says nothing confirms nothing.
    """

    rise_steps: int
    clear_steps: int
    current: Severity | None = None
    _rising: int = 0
    _rising_to: Status = Status.OK
    _clearing: int = 0
    _clearing_to: Status = Status.OK

    def update(self, verdict: Verdict) -> bool:
        """Take in a verdict; true when the confirmed level changed."""
        status = max(verdict.status, Status.OK)
        level = self.current.status if self.current else Status.OK
        if status > level:
            self._clearing = 0
            # The lowest of the confirming verdicts is what has been confirmed.
            self._rising_to = status if self._rising == 0 else min(self._rising_to, status)
            self._rising += 1
            if verdict.hard or self._rising >= self.rise_steps:
                return self._set(status if verdict.hard else self._rising_to)
            return False
        self._rising = 0
        if status < level:
            self._clearing_to = status if self._clearing == 0 else max(self._clearing_to, status)
            self._clearing += 1
            if self._clearing >= self.clear_steps:
                return self._set(self._clearing_to)
            return False
        self._clearing = 0
        return False

    def clear(self) -> bool:
        """Drop any level at once: the run has ended, or the detector is out."""
        return self._set(Status.OK)

    def _set(self, status: Status) -> bool:
        new = {Status.WARNING: Severity.WARNING, Status.CRITICAL: Severity.CRITICAL}.get(status)
        changed = new is not self.current
        self.current, self._rising, self._clearing = new, 0, 0
        return changed
