"""What a check is: declared once, with what it is for and where its rule comes from; and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from monitor.preflight.setup import Setup


class Outcome(str, Enum):
    """How a check ends. ``SKIPPED``: what it needs is not known."""

    PASS = "pass"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found, and what to set, with verl's keys; the latter only for a warning or an error."""

    outcome: Outcome
    found: str
    set: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check. ``guide``: section of the pitfall guide, or ``-``. ``why``: what happens otherwise. ``applies``: to
    which versions of verl its rule applies. ``source``: where it comes from."""

    id: str
    title: str
    guide: str
    why: str
    applies: str
    source: str
    run: Callable[[Setup], Result]


def good(found: str) -> Result:
    """All well."""
    return Result(Outcome.PASS, found)


def warning(found: str, advice: str) -> Result:
    """It may work, and should be looked at."""
    return Result(Outcome.WARNING, found, advice)


def error(found: str, advice: str) -> Result:
    """It will not work."""
    return Result(Outcome.ERROR, found, advice)


def skipped(missing: str) -> Result:
    """It could not be checked."""
    return Result(Outcome.SKIPPED, f"not known: {missing}")
