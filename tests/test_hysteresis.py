"""A level must be confirmed before it rises and before it clears."""

from __future__ import annotations

import pytest

from monitor.hysteresis import Level
from monitor.model import Severity, Status, Verdict

OK, WARNING, CRITICAL = Status.OK, Status.WARNING, Status.CRITICAL


def _levels(statuses: list[Status], rise: int = 2, clear: int = 3, hard: bool = False) -> list[str]:
    level = Level(rise, clear)
    out = []
    for status in statuses:
        level.update(Verdict(status, hard=hard))
        out.append(level.current.value[0] if level.current else "-")
    return out


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([WARNING, OK, WARNING, OK, WARNING], "-----"),
        ([WARNING, WARNING, OK, OK, OK], "-www-"),
        ([WARNING, CRITICAL, CRITICAL], "-ww"),
        ([CRITICAL, CRITICAL, WARNING, CRITICAL, OK, OK, OK], "-ccccc-"),
        ([CRITICAL, CRITICAL, WARNING, WARNING, WARNING, OK, OK, OK], "-cccwww-"),
        ([CRITICAL, CRITICAL, OK, WARNING, OK, OK], "-cccww"),
        ([WARNING, WARNING, CRITICAL, CRITICAL], "-wwc"),
        ([Status.WARMING, Status.NO_DATA, WARNING, WARNING], "---w"),
    ],
)
def test_rising_and_clearing(statuses: list[Status], expected: str) -> None:
    assert "".join(_levels(statuses)) == expected


def test_a_hard_verdict_rises_at_once() -> None:
    assert _levels([CRITICAL], rise=5, hard=True) == ["c"]


def test_a_value_that_toggles_about_its_limit_raises_once() -> None:
    toggling = [WARNING if step % 2 else OK for step in range(200)]
    assert "w" not in _levels(toggling)
    raised = "".join(_levels([WARNING, WARNING, *toggling]))
    assert raised[1:] == "w" * (len(raised) - 1), "and once raised it stays, instead of paging again and again"


def test_clear_drops_any_level() -> None:
    level = Level(1, 9)
    level.update(Verdict(CRITICAL))
    assert level.current is Severity.CRITICAL
    assert level.clear()
    assert level.current is None
    assert not level.clear()
