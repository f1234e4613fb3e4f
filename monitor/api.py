"""Snapshots as plain JSON values: what the API, the page and `verl-monitor check` show. NaN becomes null."""

from __future__ import annotations

from typing import Any

import orjson

from monitor.catalog import metric_of, verl_keys
from monitor.model import Incident, Severity, Status, Verdict
from monitor.run import RunView
from monitor.units import quantity
from monitor.watches import DetectorView


def dumps(value: object, *, indent: bool = False) -> bytes:
    """JSON; what is not a finite number is null."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None)


def verdict_word(severity: Severity | None) -> str:
    """``healthy``, ``warning`` or ``critical``."""
    return severity.value if severity else "healthy"


def run_summary(view: RunView) -> dict[str, Any]:
    """A run in a line of a list."""
    return {
        "run": view.run, "project": view.project, "source": view.source, "algorithm": view.algorithm,
        "state": view.state.value, "state_reason": view.state_reason,
        "phase": view.phase or None, "verdict": verdict_word(view.severity),
        "steps": view.steps, "last_step": view.last_step, "last_step_timestamp_seconds": view.last_step_seconds,
        "restarts": view.restarts, "findings": [d.spec.id for d in view.detectors if d.severity],
        "blind": [d.spec.id for d in view.detectors if d.missing],
    }


def run_detail(view: RunView) -> dict[str, Any]:
    """All of a run: state, verdict per detector with reason and evidence, incidents."""
    return run_summary(view) | {
        "expected_step_seconds": view.expected_step_seconds,
        "allowed_silence_seconds": view.allowed_silence_seconds,
        "detectors": [detector_detail(item) for item in view.detectors],
        "incidents": [incident_detail(incident) for incident in reversed(view.incidents)],
        "values": dict(view.values), "unknown": dict(view.unknown), "nonfinite": dict(view.nonfinite),
    }


def detector_detail(item: DetectorView) -> dict[str, Any]:
    """One detector's word on a run."""
    verdict = item.verdict
    return {
        "detector": item.spec.id, "title": item.spec.title,
        "severity": item.severity.value if item.severity else None,
        "status": verdict.status.name.lower(), "score": verdict.score, "reason": verdict.reason or _calm(verdict),
        "since_step": verdict.since_step if verdict.status >= Status.WARNING else None,
        "signal": verdict.signal or None, "value": verdict.value, "threshold": verdict.threshold,
        "evidence": dict(verdict.evidence), "suppressed_by": item.suppressed_by or None,
        "blind": bool(item.missing), "missing": list(item.missing), "broken": item.broken,
        "runbook": f"/runbooks/{item.spec.alert}",
        "actions": list(item.spec.actions) if item.severity else [],
    }


def _calm(verdict: Verdict) -> str:
    """What a verdict without a reason says: the level of its signal, and the limit of that."""
    if not verdict.signal:
        return "Nothing found."
    unit = metric_of(verdict.signal).unit
    limit = f", limit {quantity(verdict.threshold, unit)}" if verdict.threshold == verdict.threshold else ""
    return f"{verl_keys(verdict.signal)[0]} is {quantity(verdict.value, unit)}{limit}."


def incident_detail(incident: Incident) -> dict[str, Any]:
    """One incident."""
    return {
        "detector": incident.detector, "severity": incident.severity.value, "first_step": incident.first_step,
        "last_step": incident.last_step, "raised_step": incident.raised_step, "critical_step": incident.critical_step,
        "raised_timestamp_seconds": incident.raised_seconds, "reason": incident.reason,
        "evidence": dict(incident.evidence), "ended": incident.ended or None,
    }


def check_report(view: RunView) -> dict[str, Any]:
    """A recorded run's verdict: the worst of everything that was found in it, cleared or not."""
    worst = None
    for incident in view.incidents:
        if worst is not Severity.CRITICAL:
            worst = incident.severity
    return {
        "run": view.run, "steps": view.steps, "algorithm": view.algorithm, "verdict": verdict_word(worst),
        "findings": [
            {"detector": i.detector, "severity": i.severity.value, "first_step": i.first_step,
             "raised_step": i.raised_step, "critical_step": i.critical_step, "last_step": i.last_step,
             "reason": i.reason, "evidence": dict(i.evidence)}
            for i in view.incidents],
        "blind": [{"detector": d.spec.id, "missing": list(d.missing)} for d in view.detectors if d.missing],
    }
