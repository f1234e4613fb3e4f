"""One row of panels for each detector, made from its spec alone: adding a detector adds its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dashboards.layout import Placed, side_by_side
from dashboards.panels import RED, Links, graph_panel, link
from dashboards.queries import Name, Query, select, series_query, while_active, words_of
from dashboards.sdk import model
from monitor.catalog import metric_of
from monitor.detectors.non_finite import NonFiniteDetector
from monitor.detectors.rollout_stall import RolloutStall
from monitor.metric import Metric
from monitor.model import DetectorSpec
from monitor.units import Unit

HEIGHT = 8
_LIMIT_LINE = ("/^limit/", {
    "color": {"mode": "fixed", "fixedColor": RED},
    "custom.lineStyle": {"fill": "dash", "dash": [8, 8]},
    "custom.fillOpacity": 0,
})


def detector_row(spec: DetectorSpec, monitor_url: str) -> list[Placed]:
    """What the detector watches, its level against its limit, and its score."""
    links = [link(f"Runbook: {spec.title}", f"{monitor_url}/runbooks/{spec.alert}")]
    panels = [_watched(spec, group, links) for group in _groups(spec.panel)]
    panels += [_LEVELS.get(spec.id, _level)(spec, links), _score(spec, links)]
    return side_by_side(panels, HEIGHT)


def _groups(series: Sequence[str]) -> list[list[str]]:
    """Series that may share an axis: same unit, same kind of scale."""
    groups: dict[tuple[Unit, bool], list[str]] = {}
    for name in series:
        metric = metric_of(name)
        groups.setdefault((metric.unit, metric.log), []).append(name)
    return list(groups.values())


def _watched(spec: DetectorSpec, group: Sequence[str], links: Links) -> model.Panel:
    metrics: dict[str, Metric] = {metric_of(name).name: metric_of(name) for name in group}
    title = ", ".join(words_of(metric) for metric in metrics.values())
    helps = "\n".join(f"- {words_of(metric)}: {metric.help}" for metric in metrics.values())
    first = metric_of(group[0])
    return graph_panel(
        title[0].upper() + title[1:], f"{_describe(spec)}\n\n{helps}",
        [series_query(name, name=len(metrics) > 1) for name in group],
        unit=first.unit, log=first.log, no_value="not logged by this run", links=links)


def _level(spec: DetectorSpec, links: Links) -> model.Panel:
    main = metric_of(spec.panel[0])
    return graph_panel(
        f"{spec.title}: level and limit",
        f"{_describe(spec)}\n\nThe level on which the detector last decided, and the limit it had then. Good: below "
        "the dashed line. No line: the run is too young to be compared with itself.",
        [
            Query(expr=select(Name.VALUE, detector=spec.id), legend="{{signal}}"),
            Query(expr=select(Name.THRESHOLD, detector=spec.id), legend="limit of {{signal}}"),
        ],
        unit=main.unit, log=main.log, overrides=[_LIMIT_LINE], links=links)


def _values_so_far(spec: DetectorSpec, links: Links) -> model.Panel:
    return graph_panel(
        f"{spec.title}: values so far",
        f"{_describe(spec)}\n\nHow many values of each metric were not finite since the monitor has known the run. "
        "Good: nothing here.",
        # The count itself, not its increase: a counter that appears with its first event has no increase.
        [Query(expr=select(Name.NONFINITE), legend="{{metric}}")],
        unit=Name.NONFINITE.unit, no_value="none so far", links=links)


def _silence(spec: DetectorSpec, links: Links) -> model.Panel:
    return graph_panel(
        f"{spec.title}: silence and limit",
        f"{_describe(spec)}\n\nTime since the last step, and the silence that this run's own steps allow. Good: a "
        "sawtooth far below the dashed line.",
        [
            Query(expr=while_active(f"time() - {select(Name.LAST_STEP_TIME)}"), legend="silent for"),
            Query(expr=while_active(select(Name.ALLOWED_SILENCE)), legend="limit"),
        ],
        unit=Name.ALLOWED_SILENCE.unit, no_value="the run is over", overrides=[_LIMIT_LINE], links=links)


def _score(spec: DetectorSpec, links: Links) -> model.Panel:
    return graph_panel(
        f"{spec.title}: score",
        f"{_describe(spec)}\n\nThe detector's score; 1 is its warning threshold. Good: below 1. A finding is raised "
        f"after {spec.rise_steps} such step(s) in a row and dropped after {spec.clear_steps} below.",
        [Query(expr=select(Name.SCORE, detector=spec.id), legend="score")],
        unit=Name.SCORE.unit, limit=1.0, links=links)


_LEVELS: Mapping[str, Callable[[DetectorSpec, Links], model.Panel]] = {
    # Its level is a count that exists during a finding only, and a graph draws no NaN. The counters remember.
    NonFiniteDetector.spec.id: _values_so_far,
    # Between steps /metrics repeats the level that the last step left; Prometheus itself knows the time.
    RolloutStall.spec.id: _silence,
}


def _describe(spec: DetectorSpec) -> str:
    return f"{spec.meaning}\n\n**It does not see:** {spec.misses}"
