"""How good the detectors are, measured on labelled runs: `verl-monitor evaluate CORPUS`.

A corpus is a directory with a ``labels.json`` and recorded logs below it, ``NAME.jsonl`` for each run that is named::

    {"runs": {NAME: {"verdict": "healthy" | "failing" | "ambiguous",
                     "faults": [{"detectors": [ID, ...], "onset": STEP, "by": STEP}],
                     "quiet": [ID, ...]}}}

A fault is detected when any of its detectors is raised, as a warning or critical, from its onset to its bound; one that
was raised before and lasts beyond the onset counts as at once. A false alarm is every finding on a healthy run; on a
failing one, a finding before the first onset that no fault lists; anywhere, a critical finding of a detector that is to
be quiet there. What else is found after a fault's onset is its consequence, and is not counted.
"""

from __future__ import annotations

import json
import logging
import socket
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from monitor.detectors import DETECTORS
from monitor.model import Incident, Severity
from monitor.replay import UnreadableError, replay

VERDICTS = ("healthy", "failing", "ambiguous")
CONNECT_SECONDS = 5.0
IDS = tuple(detector.spec.id for detector in DETECTORS)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that must be reported by any of ``detectors``, visible from step ``onset``, at step ``by`` at the
    latest."""

    detectors: tuple[str, ...]
    onset: int
    by: int


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of a run."""

    name: str
    path: str
    verdict: str
    faults: tuple[Fault, ...] = ()
    quiet: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detection:
    """What became of a fault. ``detector`` is empty for one that was missed; ``delay``: steps after its onset."""

    run: str
    fault: Fault
    detector: str = ""
    severity: str = ""
    delay: int = 0


@dataclass(frozen=True, slots=True)
class Alarm:
    """A finding that should not be."""

    run: str
    detector: str
    severity: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run's."""

    name: str
    verdict: str
    steps: int
    detections: tuple[Detection, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    error: str = ""


@dataclass(slots=True)
class Score:
    """Counts of one detector, or of all. ``missed`` is of faults that name the detector first."""

    detected: int = 0
    missed: int = 0
    delays: list[int] = field(default_factory=list)
    warnings: int = 0
    critical: int = 0
    healthy_warnings: int = 0
    healthy_critical: int = 0


def read_labels(corpus: Path) -> tuple[list[Label], list[str]]:
    """The labelled runs of a corpus, and what is wrong with its labels.

    Raises:
        UnreadableError: there are no labels.
    """
    path = corpus / "labels.json"
    try:
        runs = json.loads(path.read_text("utf-8"))["runs"]
        entries = list(runs.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f'{path}: expected {{"runs": {{NAME: {{"verdict": ...}}}}}} ({error!r})') from error
    files = {file.stem: file for file in sorted(corpus.rglob("*.jsonl"), reverse=True)}
    labels: list[Label] = []
    errors: list[str] = []
    for name, entry in entries:
        try:
            labels.append(_label(name, entry, files))
        except (KeyError, TypeError, ValueError) as error:
            errors.append(f"{path}: {name}: {error.args[0] if error.args else error!r}")
    return labels, errors


def _label(name: str, entry: Mapping[str, Any], files: Mapping[str, Path]) -> Label:
    if name not in files:
        raise ValueError(f"expected {name}.jsonl below the corpus, got none")
    if entry.get("verdict") not in VERDICTS:
        raise ValueError(f"expected a verdict of {', '.join(VERDICTS)}, got {entry.get('verdict')!r}")
    faults = tuple(Fault(tuple(fault["detectors"]), int(fault["onset"]), int(fault["by"]))
                   for fault in entry.get("faults") or ())
    return Label(name, str(files[name]), entry["verdict"], faults, tuple(entry.get("quiet") or ()))


def judge(label: Label) -> Outcome:
    """Replay a run and compare what is found with its label."""
    try:
        views = replay(Path(label.path))
    except UnreadableError as error:
        return Outcome(label.name, label.verdict, 0, error=str(error))
    incidents = [incident for view in views for incident in view.incidents]
    detections = tuple(_detection(label.name, fault, incidents) for fault in label.faults)
    alarms = tuple(Alarm(label.name, i.detector, i.severity.value, i.raised_step, i.reason)
                   for i in incidents if _is_false(label, i))
    return Outcome(label.name, label.verdict, sum(view.steps for view in views), detections, alarms)


def _detection(run: str, fault: Fault, incidents: Sequence[Incident]) -> Detection:
    found = [(max(i.raised_step, fault.onset), i) for i in incidents
             if i.detector in fault.detectors and i.raised_step <= fault.by and i.last_step >= fault.onset]
    if not found:
        return Detection(run, fault)
    step, incident = min(found, key=lambda pair: pair[0])
    return Detection(run, fault, incident.detector, incident.severity.value, step - fault.onset)


def _is_false(label: Label, incident: Incident) -> bool:
    if label.verdict == "healthy" or (incident.detector in label.quiet and incident.severity is Severity.CRITICAL):
        return True
    if label.verdict == "ambiguous":
        return False
    listed = {detector for fault in label.faults for detector in fault.detectors}
    onset = min((fault.onset for fault in label.faults), default=0)
    return incident.detector not in listed and incident.last_step < onset


def evaluate(labels: Iterable[Label], run: Callable[[Callable[[Label], Outcome], Sequence[Label]], list[Outcome]]
             ) -> dict[str, Any]:
    """The figures, as JSON. ``run`` maps ``judge`` over the labels, on whatever there is to do it."""
    outcomes = run(judge, list(labels))
    scores = {name: Score() for name in (*IDS, "all")}
    for outcome in outcomes:
        for detection in outcome.detections:
            for score in (scores.get(detection.detector or detection.fault.detectors[0]), scores["all"]):
                if score is not None:
                    _count(score, detection)
        for alarm in outcome.alarms:
            for score in (scores.get(alarm.detector), scores["all"]):
                if score is not None:
                    _count_alarm(score, critical=alarm.severity == "critical", healthy=outcome.verdict == "healthy")
    healthy = [outcome for outcome in outcomes if outcome.verdict == "healthy" and not outcome.error]
    steps = sum(outcome.steps for outcome in healthy)
    return {
        "runs": len(outcomes), "healthy_runs": len(healthy), "healthy_steps": steps,
        "detectors": {name: _figures(score, len(healthy), steps) for name, score in scores.items() if name != "all"},
        "total": _figures(scores["all"], len(healthy), steps),
        "faults": [{"run": d.run, "detectors": list(d.fault.detectors), "onset": d.fault.onset, "by": d.fault.by,
                    "detected_by": d.detector or None, "severity": d.severity or None,
                    "delay": d.delay if d.detector else None} for o in outcomes for d in o.detections],
        "false_alarms": [asdict(alarm) for outcome in outcomes for alarm in outcome.alarms],
        "errors": [outcome.error for outcome in outcomes if outcome.error],
    }


def _count(score: Score, detection: Detection) -> None:
    if detection.detector:
        score.detected += 1
        score.delays.append(detection.delay)
    else:
        score.missed += 1


def _count_alarm(score: Score, *, critical: bool, healthy: bool) -> None:
    score.critical += critical
    score.warnings += not critical
    score.healthy_critical += healthy and critical
    score.healthy_warnings += healthy and not critical


def _figures(score: Score, runs: int, steps: int) -> dict[str, Any]:
    return {
        "detected": score.detected, "missed": score.missed,
        "median_delay_steps": statistics.median(score.delays) if score.delays else None,
        "worst_delay_steps": max(score.delays, default=None),
        "false_warnings": score.warnings, "false_critical": score.critical,
        "false_warnings_per_healthy_run": score.healthy_warnings / runs if runs else None,
        "false_critical_per_healthy_run": score.healthy_critical / runs if runs else None,
        "false_warnings_per_1000_healthy_steps": 1000 * score.healthy_warnings / steps if steps else None,
        "false_critical_per_1000_healthy_steps": 1000 * score.healthy_critical / steps if steps else None,
    }


def over_budget(figures: Mapping[str, Any], budget: Mapping[str, Any]) -> list[str]:
    """What exceeds a budget: greatest allowed values of the figures of ``total``.

    Raises:
        ValueError: a name that is no figure, or a limit that is no number.
    """
    total = figures["total"]
    exceeded = []
    for name, limit in budget.items():
        if name not in total:
            raise ValueError(f"expected a figure of {', '.join(total)}, got {name!r}")
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise ValueError(f"{name}: expected a number, got {limit!r}")
        value = total[name]
        if value is not None and value > limit:
            exceeded.append(f"{name} is {value:g}, and at most {limit:g} is allowed")
    return exceeded


def in_processes(jobs: int, call: Callable[[Label], Outcome], labels: Sequence[Label]) -> list[Outcome]:
    """Map over processes of this machine; in this one where one is enough."""
    if jobs <= 1 or len(labels) <= 1:
        return [call(label) for label in labels]
    with ProcessPoolExecutor(min(jobs, len(labels))) as pool:
        return list(pool.map(call, labels))


def on_ray(address: str, call: Callable[[Label], Outcome], labels: Sequence[Label]) -> list[Outcome]:
    """Map over a Ray cluster, whose nodes must see the corpus under the same path and have this package.

    ``address``: ``local`` starts Ray here.

    Raises:
        UnreadableError: Ray is not installed, or there is no cluster at that address.
    """
    try:
        import ray
    except ImportError:
        raise UnreadableError("--ray: expected the package ray, got none; pip install 'verl-monitor[ray]'") from None
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        try:  # ray.init itself waits for minutes where nobody answers
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise UnreadableError(f"--ray {address}: expected a Ray cluster, got {error}") from error
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level=logging.ERROR,
                 include_dashboard=False if address == "local" else None)
    except Exception as error:  # Ray raises many kinds
        raise UnreadableError(f"--ray {address}: expected a Ray cluster, got {error}") from error
    try:
        remote = ray.remote(call)
        return list(ray.get([remote.remote(label) for label in labels]))
    finally:
        ray.shutdown()


def text_of(figures: Mapping[str, Any]) -> list[str]:
    """The figures as people read them."""
    lines = [f"{figures['runs']} runs, {figures['healthy_runs']} of them healthy with {figures['healthy_steps']} steps",
             "", f"{'detector':26} {'detected':>8} {'missed':>6} {'delay: median':>13} {'worst':>5}   "
                 f"{'false: warnings':>15} {'critical':>8}   {'per 1,000 healthy steps':>23}"]
    lines += [_line(name, figures["detectors"][name]) for name in figures["detectors"]]
    lines += [_line("all", figures["total"]), ""]
    for fault in figures["faults"]:
        if fault["detected_by"] is None:
            lines.append(f"MISSED {fault['run']}: {' or '.join(fault['detectors'])}, onset {fault['onset']}, "
                         f"by {fault['by']}")
    lines += [f"FALSE {alarm['severity']} {alarm['run']}: {alarm['detector']} at step {alarm['step']}: "
              f"{alarm['reason']}" for alarm in figures["false_alarms"]]
    return lines


def _line(name: str, row: Mapping[str, Any]) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    rate = (row["false_warnings_per_1000_healthy_steps"], row["false_critical_per_1000_healthy_steps"])
    per = " + ".join("-" if value is None else f"{value:.2f}" for value in rate)
    return (f"{name:26} {row['detected']:8} {row['missed']:6} {shown(row['median_delay_steps']):>13} "
            f"{shown(row['worst_delay_steps']):>5}   {row['false_warnings']:15} {row['false_critical']:8}   {per:>23}")


def runner(jobs: int, ray: str | None) -> Callable[[Callable[[Label], Outcome], Sequence[Label]], list[Outcome]]:
    """What maps over the runs."""
    return partial(on_ray, ray) if ray else partial(in_processes, jobs)
