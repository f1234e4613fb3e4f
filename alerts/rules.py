"""Prometheus rules from the detector specs. Valid in 2.42 and in 3.x."""

from __future__ import annotations

import re
from typing import Any

from alerts.monitor_alerts import MONITOR_ALERTS
from monitor.catalog import metric_of
from monitor.detectors import DETECTORS
from monitor.model import DetectorSpec, Severity

DEFAULT_BASE = "http://127.0.0.1:9560"
"""Where the monitor's own service shows runs and runbooks; a page's links go there."""

WAIT = {Severity.CRITICAL: "5s", Severity.WARNING: "1m"}
"""``for``: the verdict was confirmed in Python, so this is but two evaluations in a row."""

KEEP = "2m"
"""``keep_firing_for``: bridges scrapes that were missed, so that one cause does not page twice."""


def rule_groups(base: str = DEFAULT_BASE) -> dict[str, Any]:
    """The rules file. ``base``: address of the monitor's service in the links."""
    runs = [detector_rule(kind.spec, severity, base) for kind in DETECTORS for severity in reversed(Severity)]
    return {"groups": [
        {"name": "verl-runs", "rules": runs},
        {"name": "verl-monitor", "rules": [
            {"alert": alert.name, "expr": alert.expr, "for": alert.wait}
            | ({"keep_firing_for": alert.keep} if alert.keep else {})
            | {"labels": {"severity": alert.severity},
               "annotations": {"summary": alert.summary, "description": alert.description,
                               "runbook_url": f"{base}/runbooks/{alert.name}"}}
            for alert in MONITOR_ALERTS]},
    ]}


def detector_rule(spec: DetectorSpec, severity: Severity, base: str = DEFAULT_BASE) -> dict[str, Any]:
    """Rule of a detector at a severity. It fires on the exported verdict and on nothing raw, so NaN cannot hide it."""
    health = severity.status.health
    return {
        "alert": spec.alert,
        # Replicas of the monitor are one alert; a run and a detector are all that makes two.
        "expr": f'max by (run, detector) (verl_health_state{{detector="{spec.id}"}}) == {health}',
        "for": WAIT[severity],
        "keep_firing_for": KEEP,
        "labels": {"severity": severity.value},
        "annotations": {
            "summary": f"{spec.title} in run {{{{ $labels.run }}}}",
            "description": description(spec),
            "impact": spec.impact,
            "action": "\n".join(f"{number}. {action}" for number, action in enumerate(spec.actions, 1)),
            "runbook_url": f"{base}/runbooks/{spec.alert}",
            "page_url": f"{base}/runs/{{{{ $labels.run | urlquery }}}}",
        },
    }


def description(spec: DetectorSpec) -> str:
    """Reason of the alert: what it means, and the numbers of this run as the monitor exports them.

    Verdicts are sentences and sentences are no labels, so the numbers are queried; a query that finds nothing leaves
    out its part of the sentence.
    """
    def asked(name: str, show: str) -> str:
        selector = f'{name}{{run=%q,detector=\\"{spec.id}\\"}}'
        return (f'{{{{ with printf "{selector}" $labels.run | query }}}}{{{{ with . | first }}}}{show}'
                "{{ end }}{{ end }}")

    step = ('{{ with printf "verl_run_last_step{run=%q}" $labels.run | query }}{{ with . | first }}, last step '
            '{{ .Value | printf "%.0f" }}{{ end }}{{ end }}')
    return (
        spec.meaning
        + asked("verl_health_value", ' Seen: {{ .Labels.signal }} is {{ .Value | printf "%.3g" }}' + _unit(spec))
        + asked("verl_health_threshold", ', limit {{ .Value | printf "%.3g" }}' + _unit(spec))
        + asked("verl_health_since_step", ', since step {{ .Value | printf "%.0f" }}') + step + ".")


def _unit(spec: DetectorSpec) -> str:
    """Template that writes the unit of the signal behind its number, for the series that the spec names."""
    by_word: dict[str, list[str]] = {}
    for series in sorted({s for group in (*spec.required, spec.optional) for s in group}):
        word = metric_of(series).unit.word
        if word:
            by_word.setdefault(word, []).append(re.escape(series).replace("\\", "\\\\"))
    return "".join(f'{{{{ if match "^({"|".join(series)})$" .Labels.signal }}}} {word}{{{{ end }}}}'
                   for word, series in by_word.items())
