"""Runbooks: one page per alert, made of the same words as the alert, and an index.

The monitor serves them at ``/runbooks/<Alert>``, so links among them are relative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from alerts.findings import LEVELS, capital, numbered
from alerts.monitor_alert import MonitorAlert
from alerts.monitor_alerts import MONITOR_ALERTS
from alerts.options import DEFAULTS
from alerts.pictures import RECORDINGS
from alerts.yaml_text import MARK
from monitor.catalog import label_map, metric_of, verl_keys
from monitor.detectors import ALL_DETECTORS, Detector
from monitor.model import DetectorSpec

_GENERATED = f"<!-- {MARK} Do not edit. -->"
_BY_ID = {detector.spec.id: detector.spec for detector in ALL_DETECTORS}


def render_runbooks() -> dict[str, str]:
    """File name -> page."""
    pages = {f"{detector.spec.alert}.md": finding_page(detector) for detector in ALL_DETECTORS}
    pages |= {f"{alert.name}.md": monitor_page(alert) for alert in MONITOR_ALERTS}
    return pages | {"README.md": _index()}


def promql(series: str, run: str = "RUN") -> str:
    """A catalogue series as a PromQL selector."""
    metric = metric_of(series)
    labels = [f'{label}="{value}"' for label, value in label_map(series)]
    if not metric.machine or "run" in metric.labels:
        labels.insert(0, f'run="{run}"')
    return f"verl_{metric.name}{{{','.join(labels)}}}"


def _page(title: str, parts: Iterable[tuple[str, str]]) -> str:
    sections = "".join(f"\n## {heading}\n\n{text.strip()}\n" for heading, text in parts)
    return f"{_GENERATED}\n# {title}\n{sections}"


def _escaped(text: str) -> str:
    """A text in a table's cell."""
    return text.replace("|", "\\|")


def finding_page(detector: type[Detector]) -> str:
    """The page of a detector's alert."""
    spec = detector.spec
    return _page(spec.alert, (
        ("Meaning", f"{spec.title}: {spec.meaning}{_picture(spec)}"),
        ("Impact", spec.impact),
        ("Diagnosis", f"{numbered(spec.diagnosis)}\n\n{_queries(spec)}"),
        ("Mitigation", numbered(spec.actions)),
        ("What it misses", spec.misses),
        ("When it fires", _when(spec)),
        ("Thresholds", _thresholds(detector)),
        ("Source of the thresholds", spec.source),
        ("How to tune it", _tuning(detector)),
        ("What it needs", _needs(spec)),
    )) + f"\nDetector `{spec.id}`, `{detector.__module__.replace('.', '/')}.py`; guide section {spec.guide}.\n"


def _picture(spec: DetectorSpec) -> str:
    if spec.id not in RECORDINGS:
        return ""
    return f"\n\n![As it finds something in {RECORDINGS[spec.id].stem}](pictures/{spec.id}.png)"


def _tuning(detector: type[Detector]) -> str:
    spec = detector.spec
    names = [field.name for field in fields(detector.settings_type)]
    example = f"\n      {names[0]}: {getattr(detector.settings_type(), names[0]):g}" if names else ""
    return (f"In the monitor's configuration (`verl-monitor config --example`), for every run or, under `runs:`, for "
            f"those whose names match:\n\n```yaml\ndetectors:\n    {spec.id}:\n      enabled: true{example}\n```\n\n"
            "`verl-monitor check --config FILE LOG` shows what it would have said of a recorded run.")


def _queries(spec: DetectorSpec) -> str:
    labels = f'run="RUN",detector="{spec.id}"'
    queries = [
        ("the level that decided, beside its limit", f'{{__name__=~"verl_health_(value|threshold)",{labels}}}'),
        ("how bad it is; 1 is the warning threshold", f"verl_health_score{{{labels}}}"),
        *(() if spec.machine else (("first step at which it was visible", f"verl_health_since_step{{{labels}}}"),)),
        *((f"verl's {verl_keys(series)[0]}" if not metric_of(series).machine else "what is watched", promql(series))
          for series in spec.panel),
    ]
    block = "\n".join(f"# {what}\n{query}" for what, query in queries)
    what = "the machine room's name (`node:HOST` or `ray:HOST:PORT`)" if spec.machine else "the run's name"
    return f"In PromQL, with {what} for RUN:\n\n```promql\n{block}\n```"


def _when(spec: DetectorSpec) -> str:
    waits = {severity.value: wait for severity, _, wait in LEVELS}
    lines = [
        f"{_confirmed(spec.rise_steps)} It is dropped after {spec.clear_steps} judged step(s) in a row that do not "
        f"show it. Prometheus then waits {waits['critical']} (critical) or {waits['warning']} (warning), and keeps the "
        f"alert for {DEFAULTS.keep_firing_for} over scrapes that fail and restarts of the monitor.",
    ]
    if spec.under:
        lines.append("Held back while one of these is found in the same run, of which it would be a mere consequence: "
                     + _links(spec.under) + ".")
    hides = [other.id for other in _BY_ID.values() if spec.id in other.under]
    if hides:
        lines.append("Holds back: " + _links(hides) + ".")
    return "\n\n".join(lines)


def _confirmed(steps: int) -> str:
    if steps == 1:
        return "The finding is raised at once."
    return f"The finding is raised after {steps} judged steps in a row that show it, at once where it is certain."


def _links(ids: Iterable[str]) -> str:
    return ", ".join(f"[{_BY_ID[identity].alert}]({_BY_ID[identity].alert}.md)" for identity in ids)


def _thresholds(detector: type[Detector]) -> str:
    rows = [f"| `{f.name}` | {f.default:g} | {f.metadata['unit']} | {_escaped(f.metadata['help'])} |"
            for f in fields(detector.settings_type)]
    if not rows:
        return "It has none."
    return "\n".join(["| setting | default | unit | meaning |", "|---|---|---|---|", *rows])


def _needs(spec: DetectorSpec) -> str:
    if not spec.required:
        return (f"{spec.wake} Without it, `verl_detector_blind` is 1 for this detector while the monitor has probes at "
                "all.")
    groups = ["one of " + ", ".join(f"`{verl_keys(series)[0]}`" for series in group) if len(group) > 1
              else f"`{verl_keys(group[0])[0]}`" for group in spec.required]
    return (f"{capital('; and '.join(groups))}. {spec.wake} Where they are missing, `verl_detector_blind` is 1 for "
            "this detector, and the run's page says so.")


def monitor_page(alert: MonitorAlert) -> str:
    """The page of an alert about the monitor."""
    diagnosis = "\n".join(f"{number}. {text}\n\n   ```sh\n   {command}\n   ```"
                          for number, (text, command) in enumerate(alert.diagnosis, 1))
    expressions = "\n\n".join(f"# {severity}, for {alert.wait}\n{expression.strip()}"
                              for severity, expression in alert.rules)
    return _page(alert.name, (
        ("Meaning", f"{alert.title}. {alert.meaning}"),
        ("Impact", alert.impact),
        ("Diagnosis", diagnosis),
        ("Mitigation", numbered(alert.actions)),
        ("What it misses", alert.misses),
        ("When it fires", f"```promql\n{expressions}\n```"),
    ))


def _index() -> str:
    def first_sentence(text: str) -> str:
        return _escaped(text.split(". ", 1)[0].rstrip(".") + ".")

    def table(rows: Iterable[tuple[str, str, str]]) -> str:
        lines = [f"| [{name}]({name}.md) | {severity} | {text} |" for name, severity, text in rows]
        return "\n".join(["| alert | severity | meaning |", "|---|---|---|", *lines])

    levels = ", ".join(severity.value for severity, _, _ in LEVELS)
    findings = ((s.alert, levels, first_sentence(s.meaning)) for s in _BY_ID.values() if not s.machine)
    machines = ((s.alert, levels, first_sentence(s.meaning)) for s in _BY_ID.values() if s.machine)
    own = ((alert.name, ", ".join(severity for severity, _ in alert.rules), first_sentence(alert.meaning))
           for alert in MONITOR_ALERTS)
    return _page("Runbooks", (("About a run", table(findings)), ("About GPUs and Ray", table(machines)),
                              ("About the monitor itself", table(own)))) + (
        "\nCritical goes to the receiver page, warning to notice. One page per run and cause: Alertmanager groups by "
        "run and inhibits what follows from another finding.\n")
