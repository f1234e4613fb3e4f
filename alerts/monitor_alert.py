"""What an alert about the monitor itself is, and how its rules come from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from alerts.findings import numbered, plain
from alerts.options import DEFAULTS, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorAlert:
    """An alert on what Python cannot see of itself. Its runbook page is made of the same words.

    ``rules``: severity and expression, one or several; ``wait``: Prometheus's ``for``; ``keep``: whether it bridges
    gaps (``keep_firing_for``). ``summary`` and ``description`` may hold ``{{ $labels.x }}`` and
    ``{{ with $labels.x }} {{ . }}{{ end }}`` only, so that tests can fill them in. ``diagnosis``: text and command;
    ``misses``: what it cannot see.
    """

    name: str
    title: str
    rules: tuple[tuple[str, str], ...]
    wait: str
    keep: bool = True
    summary: str
    description: str
    meaning: str
    impact: str
    diagnosis: tuple[tuple[str, str], ...]
    actions: tuple[str, ...]
    misses: str

    def __post_init__(self) -> None:
        empty = [f.name for f in fields(self) if getattr(self, f.name) in ("", ())]
        if empty:
            raise ValueError(f"alert {self.name}: empty field(s) {', '.join(empty)}")


def monitor_annotations(alert: MonitorAlert, options: Options) -> dict[str, str]:
    """What people are told. The runbook's address is the monitor's own, which may be the thing that is down: so the
    actions stand here too."""
    return {"summary": alert.summary, "description": f"{alert.description}\nImpact: {plain(alert.impact)}",
            "action": plain(numbered(alert.actions)), "runbook_url": options.runbook_url(alert.name)}


def monitor_rules(alert: MonitorAlert, options: Options = DEFAULTS) -> list[dict[str, Any]]:
    """The rules of an alert about the monitor, for the job's name in ``options``."""
    rules = []
    for severity, expression in alert.rules:
        rule: dict[str, Any] = {"alert": alert.name,
                                "expr": expression.strip().replace('job="verl-monitor"', f'job="{options.job}"'),
                                "for": alert.wait}
        if alert.keep:
            rule["keep_firing_for"] = options.keep_firing_for
        rule["labels"] = {"severity": severity}
        rule["annotations"] = monitor_annotations(alert, options)
        rules.append(rule)
    return rules
