"""What a Prometheus page says of runs: its samples, by run, as rows that the catalogue understands.

Three dialects are told apart by the names themselves: this project's own (``verl_kl_divergence{kind="reference"}``, of
which the guide's four are part), verl's keys flattened as RL-Insight exports them (``actor_pg_loss``), and anything
else, which is kept under its own name. What processes say of themselves (``process_*``, ``python_*``, ``go_*``) is not
of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from monitor.catalog import BY_NAME, METRICS, series_key

MAX_RUNS = 500
MAX_SAMPLES = 200_000
_LARGEST_STEP = 2**53

STEP_COUNTERS = ("verl_run_last_step", "verl_global_step", "training_global_step", "global_step",
                 "verl_rollout_steps_total")
"""Names of step counters, best first. The guide's counts steps, and so is not their number after a resume."""

_RUN_LABELS = ("run", "experiment", "experiment_name")
_OTHERS = re.compile(r"(?:process|python|go|promhttp|scrape|up|ray|vllm|sglang|node)(?:[_:].*)?")
# What this project says of a run beside its metrics.
_ABOUT = re.compile(r"verl_(?:health|detector|findings|run|monitor|nonfinite)_.*|verl_rollout_steps_total")
_ENDED = ("finished", "failed", "gone")
_VALIDATION = re.compile(r"val_(core|aux)_(.+)_([^_]+)_((?:mean|best|maj|worst|std)_\d+)(_.+)?")


@dataclass(slots=True)
class RunPage:
    """One run on one page. ``step``: what its counter says, None without one; ``values``: by the keys that the
    catalogue resolves; ``ended``: ``finished``, ``failed`` or ``gone`` where the page says so."""

    step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    project: str = ""
    ended: str = ""
    rank: int = len(STEP_COUNTERS)


def read_page(text: str, default_run: str, *, open_metrics: bool = False) -> tuple[dict[str, RunPage], int]:
    """The runs of a page, and how many samples and runs were cut because there were too many.

    ``default_run`` is the run of samples that have no label ``run``, ``experiment`` or ``experiment_name``.

    Raises:
        ValueError: this is no exposition.
    """
    runs: dict[str, RunPage] = {}
    cut = 0
    try:
        for number, sample in enumerate(_samples(text, open_metrics)):
            name = str(sample.name)
            if _OTHERS.fullmatch(name):
                continue
            run = next((sample.labels[label] for label in _RUN_LABELS if sample.labels.get(label)), default_run)
            page = runs.get(run)
            if number >= MAX_SAMPLES or (page is None and len(runs) >= MAX_RUNS):
                cut += 1
                continue
            if page is None:
                page = runs[run] = RunPage()
            _take(page, name, sample)
    except ValueError:
        raise
    except Exception as error:  # the parser raises whatever its input makes it run into
        raise ValueError(str(error) or type(error).__name__) from error
    return {run: page for run, page in runs.items() if page.values or page.step is not None}, cut


def _samples(text: str, open_metrics: bool) -> Iterable[Sample]:
    parse = openmetrics.text_string_to_metric_families if open_metrics else text_string_to_metric_families
    for family in parse(text):
        if family.type in ("gauge", "counter", "unknown", "untyped", "info", "stateset"):
            yield from family.samples


def _take(page: RunPage, name: str, sample: Sample) -> None:
    value = float(sample.value)
    if name in STEP_COUNTERS or name.endswith("_global_step"):
        rank = STEP_COUNTERS.index(name) if name in STEP_COUNTERS else len(STEP_COUNTERS) - 1
        if rank <= page.rank and value.is_integer() and abs(value) <= _LARGEST_STEP:
            page.step, page.rank = int(value), rank
    if name == "verl_run_state" and value == 1.0 and sample.labels.get("state") in _ENDED:
        page.ended = sample.labels["state"]
    elif name == "verl_run_info":
        page.project = sample.labels.get("project", "")
    elif name == "verl_unrecognized":
        page.values[sample.labels.get("key", name)] = value
    elif not _ABOUT.fullmatch(name) and not name.endswith("_created"):
        page.values[_key(name, sample.labels)] = value


def _key(name: str, labels: dict[str, str]) -> str:
    metric = BY_NAME.get(name.removeprefix("verl_")) if name.startswith("verl_") else None
    if metric is None:
        return unflatten(name)
    values = tuple(labels.get(label, "") for label in metric.labels)
    if not any(values) and metric.labels:  # the guide's verl_kl_divergence may come without its label
        values = next(iter(metric.keys.values()))
    return series_key(metric.series(values))


def _flat(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


_FLAT = {_flat(key): key for metric in METRICS for key in metric.keys if "{" not in key}
_FLAT_STARTS = sorted(((_flat(start), start) for metric in METRICS for key in metric.keys
                       for start, _, rest in [key.partition("{")]
                       if "{" in key and rest.count("{") == 0 and len(start) > 7), key=lambda pair: -len(pair[0]))


@lru_cache(4096)
def unflatten(name: str) -> str:
    """verl's key of a name in which everything but letters and digits became ``_``; the name itself where there is no
    telling."""
    if name in _FLAT:
        return _FLAT[name]
    if match := _VALIDATION.fullmatch(name):
        tier, source, variable, aggregate, more = match.groups()
        key = f"val-{tier}/{source}/{variable}/{aggregate.replace('_', '@')}"
        return f"{key}/{more[1:]}" if more else key
    for flat, start in _FLAT_STARTS:
        if name.startswith(flat) and len(name) > len(flat):
            return start + name[len(flat):]
    return name
