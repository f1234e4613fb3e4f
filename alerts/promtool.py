"""promtool unit tests of the detector alerts: for each and each severity, cases that fire and cases that stay quiet.

Firing is asked of `ALERTS`, which promtool fills as Prometheus does; the words of an annotation are held by one case
of their own, written by hand in `alerts/tests/`.
"""

from __future__ import annotations

from typing import Any

from monitor.detectors import DETECTORS
from monitor.model import DetectorSpec, Severity


def tests(rules: str) -> dict[str, Any]:
    """The test file; ``rules`` is the path of the rules file from it."""
    cases = [case for kind in DETECTORS for severity in Severity for case in _cases(kind.spec, severity)]
    return {"rule_files": [rules], "evaluation_interval": "10s", "tests": cases}


def _cases(spec: DetectorSpec, severity: Severity) -> list[dict[str, Any]]:
    mine, other = severity.status.health, 3 - severity.status.health
    # (name, states every 10 s, firing at 10 min)
    table = [
        ("fires", f"0x5 {mine}x80", True),
        ("fires through scrapes that are missed (case 56)", f"{mine}x20 " + f"_x8 {mine}x6 " * 6, True),
        ("quiet when well", "0x80", False),
        ("quiet when it is the other severity", f"{other}x80", False),
        ("quiet on NaN, which matches nothing (case 39)", " ".join(["NaN"] * 80), False),
        ("quiet when it has cleared", f"{mine}x20 0x60", False),
        ("quiet when the series has ended with its run", f"{mine}x20 stale", False),
    ]
    return [_case(spec, severity, *entry) for entry in table] + [_replicas(spec, severity)]


def _case(spec: DetectorSpec, severity: Severity, name: str, states: str, fires: bool) -> dict[str, Any]:
    return {
        "name": f"{spec.alert} {severity.value} {name}",
        "interval": "10s",
        "input_series": [{"series": f'verl_health_state{{run="a",detector="{spec.id}",job="verl-monitor"}}',
                          "values": states}],
        "promql_expr_test": [_firing(spec, severity, 1 if fires else 0)],
    }


def _firing(spec: DetectorSpec, severity: Severity, count: int) -> dict[str, Any]:
    alerts = f'ALERTS{{alertname="{spec.alert}",severity="{severity.value}",alertstate="firing"}}'
    return {"expr": alerts, "eval_time": "10m", "exp_samples": [
        {"labels": f'ALERTS{{alertname="{spec.alert}",alertstate="firing",detector="{spec.id}",run="a",'
                   f'severity="{severity.value}"}}', "value": 1}] * count}


def _replicas(spec: DetectorSpec, severity: Severity) -> dict[str, Any]:
    """Two monitors that see one run are one alert (case 59)."""
    case = _case(spec, severity, "fires once for two replicas", f"{severity.status.health}x80", True)
    twin = {"series": f'verl_health_state{{run="a",detector="{spec.id}",job="verl-monitor",instance="b"}}',
            "values": f"{severity.status.health}x80"}
    return case | {"input_series": [*case["input_series"], twin]}
