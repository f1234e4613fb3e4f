"""Which figures of two runs are compared, and over which steps: the tuning table of the guide, for one's own runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from monitor.catalog import label_map, metric_of
from monitor.compare.interval import LEAST_STEPS, Change, Statistic, compare
from monitor.compare.rows import Columns, Record
from monitor.model import Incident
from monitor.units import Unit

STAGES = ("step", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
          "update_weights", "save_checkpoint", "testing")
"""Stages whose durations are compared, in the order in which they happen; ``testing`` lies outside ``step``."""

MEDIAN, MEAN, SPREAD, HIGHEST, LAST = (
    Statistic.MEDIAN, Statistic.MEAN, Statistic.SPREAD, Statistic.HIGHEST, Statistic.LAST)

STEP_TIME, THROUGHPUT, REWARD = "stage_duration_seconds/step", "throughput_tokens_per_second", "reward/mean"


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that are told of in one place. ``speed``: a first step says nothing of them, since it compiles."""

    title: str
    metrics: Mapping[str, str]  # name in the catalogue -> in words
    statistics: tuple[Statistic, ...]
    speed: bool = False
    keep: Callable[[Mapping[str, str]], bool] = lambda labels: True


GROUPS = (
    Group("Time", {"stage_duration_seconds": "time of {stage}"}, (MEDIAN,), speed=True,
          keep=lambda labels: labels["stage"] in STAGES),
    Group("Speed", {"throughput_tokens_per_second": "throughput per GPU",
                    "model_flops_utilization_ratio": "MFU {stage}"}, (MEDIAN,), speed=True),
    Group("GPU memory", {"gpu_allocated_peak_bytes": "allocated, {role}",
                         "gpu_reserved_peak_bytes": "reserved, {role}"}, (MEDIAN, HIGHEST)),
    Group("Host memory", {"host_memory_used_bytes": "host memory, {role}"}, (MEDIAN,)),
    Group("KL", {"kl_divergence": "KL {kind}"}, (MEAN, SPREAD)),
    Group("Reward", {"reward": "reward"}, (MEAN,), keep=lambda labels: labels["stat"] == "mean"),
    Group("Validation", {"validation_score": "{source} {variable} {aggregate}"}, (MEAN, LAST),
          keep=lambda labels: labels["tier"] == "core"),
    Group("Responses", {"response_length_tokens": "response length"}, (MEAN,),
          keep=lambda labels: labels["stat"] == "mean"),
    Group("Responses", {"response_clip_ratio": "truncated responses", "response_aborted_ratio": "aborted responses"},
          (MEAN,)),
)

_GROUP_OF = {name: group for group in GROUPS for name in group.metrics}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. ``steps``: those that both runs have it of, or with ``paired`` false, of which there are
    none, those of the run that has fewer."""

    group: str
    label: str
    series: str
    statistic: Statistic
    unit: Unit
    change: Change
    steps: int
    paired: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A detector's worst incident in either run; None where it found nothing."""

    detector: str
    title: str
    a: Incident | None
    b: Incident | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs beside each other. ``first``, ``last``, ``common``: the steps that both have; None and 0 without any.
    ``only_a``, ``only_b``, ``zero``: figures that one run lacks, and that are 0 throughout in both."""

    a: Record
    b: Record
    first: int | None
    last: int | None
    common: int
    figures: tuple[Figure, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    zero: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def wanted(series: str) -> bool:
    """Whether a series is compared."""
    group = _GROUP_OF.get(series.partition("/")[0])
    return group is not None and group.keep(dict(label_map(series)))


def label_of(series: str) -> str:
    """A series in words, below the title of its group."""
    name = series.partition("/")[0]
    return _GROUP_OF[name].metrics[name].format(**dict(label_map(series)))


def _alone(series: str) -> str:
    """A series in words, in a list of any."""
    prefix = {"validation_score": "validation ", "gpu_allocated_peak_bytes": "GPU memory ",
              "gpu_reserved_peak_bytes": "GPU memory "}.get(series.partition("/")[0], "")
    return prefix + label_of(series)


def compare_runs(a: Record, b: Record, first: int | None = None, last: int | None = None) -> Comparison:
    """Compare two runs over the steps that both have, from ``first`` to ``last``.

    A figure that both have, but not of one same step, is told of each run's own steps, without an interval. The first
    step of each start has no part in times and speed.
    """
    def within(step: int) -> bool:
        return (first is None or step >= first) and (last is None or step <= last)

    figures: list[Figure] = []
    lacking: tuple[list[str], list[str]] = ([], [])
    zero: list[str] = []
    for series in _in_order({*a.columns.series, *b.columns.series}):
        of_a, of_b = (_values(record.columns, series, within) for record in (a, b))
        if not of_a or not of_b:
            if of_a or of_b:
                lacking[0 if of_a else 1].append(_alone(series))
            continue
        if not any(of_a.values()) and not any(of_b.values()):
            zero.append(_alone(series))
            continue
        common = [step for step in of_a if step in of_b]
        x = [of_a[step] for step in common] or list(of_a.values())
        y = [of_b[step] for step in common] or list(of_b.values())
        group = _GROUP_OF[series.partition("/")[0]]
        figures += [
            Figure(group.title, label_of(series), series, statistic, metric_of(series).unit,
                   compare(x, y, statistic, paired=bool(common)), min(len(x), len(y)), bool(common))
            for statistic in group.statistics]
    both = [step for step in a.steps if step in b.columns.trained and within(step)]
    return Comparison(
        a, b, both[0] if both else None, both[-1] if both else None, len(both), tuple(figures), tuple(lacking[0]),
        tuple(lacking[1]), tuple(zero), _findings(a, b, within), tuple(_notes(a, b, len(both))))


def _in_order(series: Iterable[str]) -> list[str]:
    names = [name for group in GROUPS for name in group.metrics]

    def rank(one: str) -> tuple[int, int, str]:
        name, _, value = one.partition("/")
        return names.index(name), STAGES.index(value) if name == "stage_duration_seconds" else 0, value
    return sorted(series, key=rank)


def _values(columns: Columns, series: str, within: Callable[[int], bool]) -> dict[int, float]:
    speed = _GROUP_OF[series.partition("/")[0]].speed
    values = {step: value for step, value in columns.values(series).items()
              if within(step) and not (speed and step in columns.warm)}
    if series.startswith("validation_score/") and len(values) > 1:
        values.pop(0, None)  # of the model as it was before training
    return values


def _notes(a: Record, b: Record, common: int) -> Iterable[str]:
    for letter, record in (("A", a), ("B", b)):
        for note in record.notes:
            yield f"{letter}: {note}"
        for series, count in record.columns.not_finite.items():
            yield f"{letter}: {_alone(series)}: {count} values that are not finite take no part"
    if not common:
        yield "the runs have no step in common: figures are of each run's own steps, without an interval"
    elif common < LEAST_STEPS:
        yield f"fewer than {LEAST_STEPS} common steps: figures without an interval"


def _findings(a: Record, b: Record, within: Callable[[int], bool]) -> tuple[Finding, ...]:
    worst: tuple[dict[str, Incident], dict[str, Incident]] = ({}, {})
    for record, found in zip((a, b), worst, strict=True):
        for incident in record.incidents:
            if any(map(within, range(incident.first_step, incident.last_step + 1))):
                before = found.get(incident.detector)
                if before is None or incident.severity.status > before.severity.status:
                    found[incident.detector] = incident
    titles = a.titles | b.titles
    findings = [Finding(id_, titles[id_], worst[0].get(id_), worst[1].get(id_)) for id_ in {**worst[0], **worst[1]}]
    return tuple(sorted(findings, key=lambda f: max(i.severity.status for i in (f.a, f.b) if i), reverse=True))
