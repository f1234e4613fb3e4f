"""Two alert rules per detector: its confirmed verdicts, critical and warning.

The rules look at ``verl_health_state`` alone. It is always a finite number, while a metric may be NaN, for which every
comparison is false; and it is confirmed and cleared step by step in Python, so it does not alternate from one scrape to
the next. ``== 1`` and not ``>= 1``: a finding is one alert at a time.
"""

from __future__ import annotations

import re
from typing import Any

from alerts.options import DEFAULTS, SPECS, Options
from alerts.wording import sentence
from monitor.model import DetectorSpec, Severity

LEVELS = (
    # Confirmed already; at the usual 15 s this asks for two evaluations in a row, so that a state which is passed
    # through while the monitor reads a log anew pages nobody.
    (Severity.CRITICAL, 2, "5s"),
    # Not urgent, and a finding on its way to critical is told once.
    (Severity.WARNING, 1, "1m"),
)
"""Severity, value of ``verl_health_state``, ``for``."""

RUN = "{{ $labels.run }}"
# Run names may hold slashes, which stay, and anything else, which is escaped as a path wants it.
_RUN_IN_PATH = '{{ $labels.run | urlquery | reReplaceAll "\\\\+" "%20" | reReplaceAll "%2F" "/" }}'


def plain(text: str) -> str:
    """A text that Prometheus's template language leaves as it is."""
    return text.replace("{{", '{{ "{{" }}')


def capital(text: str) -> str:
    """A text that begins a sentence; one that begins with a key of verl's keeps it as it is written."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,:]", text) else text


def numbered(items: tuple[str, ...]) -> str:
    """Items as numbered lines."""
    return "\n".join(f"{number}. {capital(item)}" for number, item in enumerate(items, 1))


def words(spec: DetectorSpec, severity: Severity, options: Options, *, run: str, path: str,
          numbers: str) -> dict[str, str]:
    """Annotations: what people are told. ``run``, ``path`` and ``numbers`` are templates, or in tests what comes out of
    them."""
    return {
        "summary": f"{'Machines' if spec.machine else 'Run'} {run}: {plain(spec.title)} ({severity.value})",
        "description": f"{numbers}\n{plain(spec.meaning)}\nImpact: {plain(spec.impact)}",
        "action": plain(numbered(spec.actions)),
        "runbook_url": options.runbook_url(spec.alert),
        "page_url": options.machine_url if spec.machine else options.page_url(path),
    }


def finding_rules(spec: DetectorSpec, options: Options = DEFAULTS) -> list[dict[str, Any]]:
    """The rules of a detector. ``max by`` leaves run and detector, so that replicas of the monitor, and instances that
    change with a restart, are one alert."""
    return [{
        "alert": spec.alert,
        "expr": f'max by (run, detector) (verl_health_state{{detector="{spec.id}"}}) == {state}',
        "for": wait,
        "keep_firing_for": options.keep_firing_for,
        "labels": {"severity": severity.value},
        "annotations": words(spec, severity, options, run=RUN, path=_RUN_IN_PATH, numbers=sentence(spec)),
    } for severity, state, wait in LEVELS]


def all_finding_rules(options: Options = DEFAULTS) -> list[dict[str, Any]]:
    """The rules of all detectors."""
    return [rule for spec in SPECS for rule in finding_rules(spec, options)]
