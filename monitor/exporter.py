"""Snapshot -> metric families -> bytes.

Runs and the monitor itself are two separate parts. Runs are many and change once per step: their text is kept until
the engine's version changes. The monitor's own handful of series (heartbeat, sources) is made for each scrape. Both
are rendered by prometheus_client; nothing here writes exposition text by hand.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from monitor import __version__
from monitor.catalog import label_map, metric_of
from monitor.engine import Snapshot
from monitor.families import Families, add
from monitor.machine import MachineView
from monitor.machine_exporter import machine_families
from monitor.model import RunState
from monitor.run import RunView
from monitor.watches import DetectorView

_EOF = b"# EOF\n"
_KEPT_FORMATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """What the monitor exports of one source."""

    name: str
    up: bool
    last_read_seconds: float | None
    records: int
    files: int
    files_cut: int
    lag_bytes: int
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorView:
    """What the monitor exports of itself. Times are Unix seconds."""

    heartbeat_seconds: float
    sources: Sequence[SourceView] = ()


class _Given(Collector):
    """A collector of families that are there already."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def run_families(runs: Sequence[RunView], machine: MachineView | None = None) -> list[Family]:
    """Every family of the runs, and the health of the machine room. The guide's metrics stand first."""
    out = Families()
    for view in runs:
        add(out.counter("verl_rollout_steps", "Training steps seen, replayed ones included.", ["run"]), [view.run],
             view.steps)
    for name in ("policy_loss", "kl_divergence"):
        metric = metric_of(name)
        out.gauge(f"verl_{name}", metric.help, ["run", *metric.labels])
    for view in runs:
        _run_values(out, view)
        _run_life(out, view)
        _health(out, view.run, view.detectors)
    if machine is not None:
        _health(out, machine.name, machine.detectors)
    return out.all()


def _run_values(out: Families, view: RunView) -> None:
    for series, value in view.values.items():
        metric = metric_of(series)
        family = out.gauge(f"verl_{metric.name}", metric.help, ["run", *metric.labels])
        add(family, [view.run, *(label for _, label in label_map(series))], value)
    for key, value in view.unknown.items():
        add(out.gauge("verl_unrecognized", "Value under a key that the catalogue does not know.", ["run", "key"]),
             [view.run, key], value)
    for series, count in view.nonfinite.items():
        add(out.counter("verl_nonfinite", "Values that were not a finite number.", ["run", "metric"]),
             [view.run, series], count)


def _run_life(out: Families, view: RunView) -> None:
    run = [view.run]
    add(out.gauge("verl_run_info", "Facts about a run; always 1.", ["run", "project", "algorithm", "source"]),
         [view.run, view.project, view.algorithm, view.source], 1)
    states = out.gauge("verl_run_state", "1 for the state the run is in.", ["run", "state"])
    for state in RunState:
        add(states, [view.run, state.value], float(view.state is state))
    if view.last_step is not None:
        add(out.gauge("verl_run_last_step", "Number of the last step.", ["run"]), run, view.last_step)
    add(out.gauge("verl_run_last_step_timestamp_seconds", "When the last step (or the log) was seen.", ["run"]), run,
         view.last_step_seconds)
    for name, text, value in (
        ("verl_run_expected_step_seconds", "Median duration of this run's steps.", view.expected_step_seconds),
        ("verl_run_allowed_silence_seconds", "Silence from which on the run counts as stalled.",
         view.allowed_silence_seconds),
    ):
        family = out.gauge(name, text, ["run"])
        if value == value:
            add(family, run, value)
    phase = out.gauge("verl_run_phase", "1 for the stage that the run is in, where its trainer tells it.",
                      ["run", "phase"])
    if view.phase:
        add(phase, [view.run, view.phase], 1)
    add(out.counter("verl_run_restarts", "Times the run was begun again.", ["run"]), run, view.restarts)


def _health(out: Families, run: str, detectors: Sequence[DetectorView]) -> None:
    pair = ["run", "detector"]
    for item in detectors:
        labels = [run, item.spec.id]
        verdict = item.verdict
        state = item.severity.status.health if item.severity and not item.suppressed_by else 0
        add(out.gauge("verl_health_state", "0 well or not judged, 1 warning, 2 critical; confirmed.", pair), labels,
             state)
        add(out.gauge("verl_health_score", "Latest score of the detector; 1 is its warning threshold.", pair), labels,
             verdict.score)
        for name, text, value in (
            ("verl_health_value", "Level of the series that decided, in its unit; NaN when that is the finding.",
             verdict.value),
            ("verl_health_threshold", "Limit of the series that decided, in its unit.", verdict.threshold),
        ):
            family = out.gauge(name, text, [*pair, "signal"])
            if verdict.signal and (value == value or (state and name == "verl_health_value")):
                add(family, [*labels, verdict.signal], value)
        since = out.gauge("verl_health_since_step", "First step at which the present finding was visible.", pair)
        if state and verdict.since_step is not None:
            add(since, labels, verdict.since_step)
        suppressed = out.gauge("verl_health_suppressed", "1 while a finding is held back under its cause.",
                               [*pair, "cause"])
        if item.suppressed_by:
            add(suppressed, [*labels, item.suppressed_by], 1)
        add(out.gauge("verl_detector_blind", "1 when the metrics that the detector needs are not logged.", pair),
             labels, float(bool(item.missing)))
        findings = out.counter("verl_findings", "Incidents raised.", [*pair, "severity"])
        for severity, count in item.findings.items():
            add(findings, [*labels, severity.value], count)


def monitor_families(snapshot: Snapshot, monitor: MonitorView) -> list[Family]:
    """Families about the monitor itself; their number does not depend on the runs."""
    out = Families()
    add(out.gauge("verl_monitor_build_info", "Version of the monitor; always 1.", ["version", "python"]),
         [__version__, platform.python_version()], 1)
    add(out.gauge("verl_monitor_heartbeat_timestamp_seconds", "When the engine's loop last ran.", []), [],
         monitor.heartbeat_seconds)
    runs = out.gauge("verl_monitor_runs", "Runs known, by state.", ["state"])
    for state in RunState:
        add(runs, [state.value], sum(view.state is state for view in snapshot.runs))
    for name, text, value in (
        ("verl_monitor_runs_dropped", "Rows of runs beyond the cap.", snapshot.dropped_runs),
        ("verl_monitor_series_dropped", "Values beyond the cap of series per run.", snapshot.dropped_series),
        ("verl_monitor_repeated_rows", "Rows that another source had brought already.", snapshot.repeated_rows),
        ("verl_monitor_rejected_values", "Values that were no number.", snapshot.rejected_values),
    ):
        add(out.counter(name, text, []), [], value)
    for source in monitor.sources:
        _source(out, source)
    errors = out.counter("verl_monitor_detector_errors", "Exceptions of a detector.", ["detector"])
    seconds = out.counter("verl_monitor_detector_seconds", "Time spent in a detector.", ["detector"])
    for detector, (count, spent) in snapshot.costs.items():
        add(errors, [detector], count)
        add(seconds, [detector], spent)
    return out.all()


def _source(out: Families, source: SourceView) -> None:
    name = [source.name]
    add(out.gauge("verl_monitor_source_up", "1 when the last poll of the source succeeded.", ["source"]), name,
         float(source.up))
    last_read = out.gauge("verl_monitor_source_last_read_timestamp_seconds", "Last successful poll.", ["source"])
    if source.last_read_seconds is not None:
        add(last_read, name, source.last_read_seconds)
    add(out.counter("verl_monitor_source_records", "Rows read.", ["source"]), name, source.records)
    add(out.gauge("verl_monitor_source_files", "Files followed.", ["source"]), name, source.files)
    add(out.gauge("verl_monitor_source_files_cut", "Files found but not followed, because there are too many.",
                   ["source"]), name, source.files_cut)
    add(out.gauge("verl_monitor_source_lag_bytes", "Bytes not read yet.", ["source"]), name, source.lag_bytes)
    rejected = out.counter("verl_monitor_source_rejected", "Rows that could not be used.", ["source", "reason"])
    for reason, count in source.rejected.items():
        add(rejected, [source.name, reason], count)


Encoder = Callable[[CollectorRegistry], bytes]


def render(families: Iterable[Family], encoder: Encoder) -> bytes:
    """Families as exposition text of the encoder's format, without OpenMetrics' end marker."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return encoder(registry).removesuffix(_EOF)


class Renderer:
    """Keeps the runs' text until the snapshot's version changes. Its method may run in a worker thread, one call at
    a time."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, bytes]] = {}

    def page(self, snapshot: Snapshot, monitor: MonitorView, accept: str) -> tuple[bytes, str]:
        """The whole page and its content type, as the ``Accept`` header asks."""
        encoder, content_type = cast("tuple[Encoder, str]", exposition.choose_encoder(accept))
        kept = self._kept.get(content_type)
        if kept is None or kept[0] != snapshot.version:
            kept = (snapshot.version, render(run_families(snapshot.runs, snapshot.machine), encoder))
            if len(self._kept) >= _KEPT_FORMATS:  # the client chooses the format, so bound what it can make us keep
                self._kept.clear()
            self._kept[content_type] = kept
        own = render([*machine_families(snapshot.machine), *monitor_families(snapshot, monitor)], encoder)
        return kept[1] + own + (_EOF if "openmetrics" in content_type else b""), content_type
