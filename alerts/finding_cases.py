"""promtool tests of the rules about runs, the same for every detector.

The words that must come out are put together here without the template language, so each test also holds that
Prometheus fills the templates in as meant.
"""

from __future__ import annotations

from typing import Any

from alerts.findings import LEVELS, words
from alerts.options import DEFAULTS, Options, seconds
from alerts.wording import NO_NUMBERS, NOT_FINITE, example
from monitor.catalog import BY_NAME, label_map
from monitor.model import DetectorSpec, Severity

_CRITICAL, _WARNING = Severity.CRITICAL, Severity.WARNING
# With what a URL and a query must escape: a slash, a space, a quote.
_ODD_RUN, _ODD_PATH = 'grpo/7b "x"', "grpo/7b%20%22x%22"
_WELL_AGAIN = 13 * 15  # seconds, in the first test
_GAPS = (1, 4, 8)  # `stale` and so many samples more: 2, 5 and 9 in all


def finding_cases(spec: DetectorSpec, options: Options = DEFAULTS) -> dict[str, Any]:
    """The test file of a detector's alert."""
    return {
        "rule_files": ["../verl-monitor.rules.yml"],
        "evaluation_interval": "15s",
        "tests": [_critical(spec, options), _warning(spec, options), _well(spec), _not_a_state(spec), _gaps(spec)],
    }


def _series(name: str, values: str, run: str = "a", **labels: str) -> dict[str, str]:
    pairs = {"run": run, **labels}
    quoted = ",".join('{}="{}"'.format(key, value.replace('"', '\\"')) for key, value in pairs.items())
    return {"series": f"{name}{{{quoted}}}", "values": values}


def _state(spec: DetectorSpec, values: str, run: str = "a", instance: str = "one") -> dict[str, str]:
    return _series("verl_health_state", values, run, detector=spec.id, instance=instance)


def _raw(signal: str, run: str, values: str) -> list[dict[str, str]]:
    """The signal itself, where it is a metric of the catalogue."""
    name = signal.split("/", 1)[0]
    return [_series(f"verl_{name}", values, run, **dict(label_map(signal)))] if name in BY_NAME else []


def _asked(spec: DetectorSpec, when: str, *alerts: dict[str, Any]) -> dict[str, Any]:
    return {"eval_time": when, "alertname": spec.alert, "exp_alerts": list(alerts)}


def _alert(spec: DetectorSpec, severity: Severity, options: Options, *, run: str, path: str,
           numbers: str) -> dict[str, Any]:
    return {"exp_labels": {"run": run, "detector": spec.id, "severity": severity.value},
            "exp_annotations": words(spec, severity, options, run=run, path=path, numbers=numbers)}


def _firing(spec: DetectorSpec, when: str, *found: tuple[str, Severity]) -> dict[str, Any]:
    """Which runs' alerts are firing, without their words."""
    return {"expr": f'ALERTS{{alertname="{spec.alert}",alertstate="firing"}}', "eval_time": when, "exp_samples": [
        {"labels": f'ALERTS{{alertname="{spec.alert}",alertstate="firing",detector="{spec.id}",run="{run}",'
                   f'severity="{severity.value}"}}', "value": 1} for run, severity in found]}


def _critical(spec: DetectorSpec, options: Options) -> dict[str, Any]:
    signal, value, numbers = example(spec)
    of_it = {"detector": spec.id, "instance": "one"}
    return {
        "name": f"{spec.alert}: critical fires once for two replicas and tells its numbers, though the metric is NaN; "
                "another run stays quiet; it resolves",
        "interval": "15s",
        "input_series": [
            _state(spec, "0x3 2x8 0x20", _ODD_RUN), _state(spec, "0x3 2x8 0x20", _ODD_RUN, "two"),
            _state(spec, "0x40", "well"),
            _series("verl_health_value", f"{value:g}x40", _ODD_RUN, **of_it, signal=signal),
            _series("verl_health_threshold", f"{value:g}x40", _ODD_RUN, **of_it, signal=signal),
            _series("verl_health_since_step", "31x40", _ODD_RUN, **of_it),
            _series("verl_run_last_step", "37x40", _ODD_RUN),
            *_raw(signal, _ODD_RUN, "0.3 0.3" + " NaN" * 20),
        ],
        "alert_rule_test": [
            _asked(spec, "45s"),
            _asked(spec, "1m"),  # seen by one evaluation only
            _asked(spec, "75s", _alert(spec, _CRITICAL, options, run=_ODD_RUN, path=_ODD_PATH, numbers=numbers)),
            _asked(spec, f"{_WELL_AGAIN + seconds(options.keep_firing_for) + 30}s"),
        ],
    }


def _warning(spec: DetectorSpec, options: Options) -> dict[str, Any]:
    signal, _, _ = example(spec)
    wait = next(wait for severity, _, wait in LEVELS if severity is _WARNING)
    return {
        "name": f"{spec.alert}: warning fires after {wait}; its value is NaN in one run, there is none in the other",
        "interval": "15s",
        "input_series": [
            _state(spec, "0x3 1x20", "nan"), _state(spec, "0x3 1x20", "none"),
            _series("verl_health_value", " ".join(["NaN"] * 24), "nan", detector=spec.id, signal=signal),
        ],
        "alert_rule_test": [
            _asked(spec, "105s"),
            _asked(spec, "2m", *(
                _alert(spec, _WARNING, options, run=run, path=run, numbers=numbers) for run, numbers in (
                    ("nan", NOT_FINITE.format(signal=signal) + "."), ("none", NO_NUMBERS)))),
        ],
    }


def _well(spec: DetectorSpec) -> dict[str, Any]:
    return {
        "name": f"{spec.alert}: quiet while the run is well, whatever another detector says",
        "interval": "15s",
        "input_series": [_state(spec, "0x40"), _series("verl_health_state", "2x40", detector="another")],
        "alert_rule_test": [_asked(spec, "5m")],
    }


def _not_a_state(spec: DetectorSpec) -> dict[str, Any]:
    """Case 39: what a comparison makes of NaN, infinity and nothing."""
    signal = spec.panel[0]
    return {
        "name": f"{spec.alert}: quiet when its state is NaN, infinite or absent, and when only the metric is",
        "interval": "15s",
        "input_series": [
            _state(spec, " ".join(["NaN"] * 24), "nan"), _state(spec, " ".join(["+Inf"] * 24), "inf"),
            _state(spec, "0x24", "metric"), *_raw(signal, "metric", "0.3 0.3" + " NaN" * 11 + " +Inf" * 11),
            *_raw(signal, "absent", "0.3x24"),
        ],
        "alert_rule_test": [_asked(spec, "5m")],
    }


def _gaps(spec: DetectorSpec) -> dict[str, Any]:
    """Case 56: an alert that is there, goes and comes again would page again. Its start is in ALERTS_FOR_STATE."""
    def broken(state: int) -> str:
        return " ".join(f"{state}x57 stale _x{gap}" for gap in _GAPS) + f" {state}x57"

    def alternating(state: int) -> str:
        return " ".join([f"{state}x8 0x6"] * 15) + f" {state}x8"

    shapes = {"alternating": alternating, "gaps": broken}
    every = [(run, severity) for run in shapes for severity in (_CRITICAL, _WARNING)]
    series = [_state(spec, shapes[run](severity.status.health), f"{run}-{severity.value}") for run, severity in every]
    found = [(f"{run}-{severity.value}", severity) for run, severity in every]
    return {
        "name": f"{spec.alert}: one alert, begun once, over scrape gaps of 2 to 9 samples in 60 and a state that comes "
                "and goes",
        "interval": "10s",
        "input_series": series,
        "promql_expr_test": [
            # In the middle of the longest gap; and at the end.
            _firing(spec, "31m", *found), _firing(spec, "40m", *found),
            {"expr": f'changes(ALERTS_FOR_STATE{{alertname="{spec.alert}"}}[38m])', "eval_time": "40m", "exp_samples": [
                {"labels": f'{{alertname="{spec.alert}",detector="{spec.id}",run="{run}",severity="{severity.value}"}}',
                 "value": 0} for run, severity in found]},
        ],
    }
