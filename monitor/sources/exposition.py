"""What a Prometheus page says of runs: its samples, by run, as rows that the catalogue understands.

Three dialects are told apart by the names themselves:

- this project's own (``verl_kl_divergence{kind="reference"}``, of which the guide's four are part): already in base
  units, so handed on under ``catalog.series_key``, which the catalogue takes with the scale 1;
- verl's keys flattened (``actor_pg_loss``), after whatever stands before ``training_global_step`` on the same page:
  RL-Insight exports ``rl_insight_monitor_training_global_step``. Handed on under verl's key and in verl's unit;
- anything else, which is kept under its own name.

Left out: what other processes say of themselves (``process_*``, ``python_*``, ``go_*`` and the like, of Ray, the node
and the inference engines too), histograms and summaries, and the times that a sample may carry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from monitor.catalog import BY_NAME, METRICS, series_key

MAX_RUNS = 500
MAX_SAMPLES = 200_000
_LARGEST_STEP = 2**53
_OWN = "verl_"

STEP_COUNTERS = ("verl_run_last_step", "verl_global_step", "training_global_step", "global_step",
                 "verl_rollout_steps_total")
"""Names of step counters, best first; the middle ones with anything before them. The guide's counts steps, and so is
not their number after a resume."""

# Not job: that is how Prometheus calls a group of endpoints.
_RUN_LABELS = ("run", "experiment", "experiment_name")
_OTHERS = re.compile(r"(?:process|python|go|promhttp|scrape|ray|vllm|sglang|node)[_:].*|up")
# What this project says of a run beside its metrics.
_ABOUT = re.compile(r"verl_(?:health|detector|findings|run|monitor|nonfinite)_.*|verl_rollout_steps_total")
_ENDED = ("finished", "failed", "gone")


@dataclass(slots=True)
class RunPage:
    """One run on one page. ``step``: what its counter says, None without one; ``rank``: which of STEP_COUNTERS that
    is; ``values``: by the keys that the catalogue resolves; ``state``: what a monitor says of the run, empty where the
    page is no monitor's; ``repeated``: samples of which another one told the value already."""

    step: int | None = None
    rank: int = len(STEP_COUNTERS)
    values: dict[str, float] = field(default_factory=dict)
    project: str = ""
    state: str = ""
    repeated: int = 0

    @property
    def ended(self) -> bool:
        """Whether a monitor says that it is over."""
        return self.state in _ENDED

    def put(self, key: str, value: float) -> None:
        """Keep a value. Of several, as one for each rank, the first, or one that is not a number: a fault is not hidden
        by its healthy twin."""
        if key in self.values:
            self.repeated += 1
            if value == value:
                return
        self.values[key] = value


@dataclass(slots=True)
class _Reading:
    """A page while it is read: names are flattened keys of verl's only once their prefix is known."""

    page: RunPage = field(default_factory=RunPage)
    prefix: str = ""
    counted: float | None = None
    rest: list[tuple[str, Mapping[str, str], float]] = field(default_factory=list)

    def take(self, name: str, sample: Sample) -> None:
        value = float(sample.value)
        self._count(name, value)
        page, labels = self.page, sample.labels
        page.project = page.project or labels.get("project", "")
        if name == "verl_run_state":
            if value == 1.0:
                page.state = labels.get("state", "")
        elif name == "verl_unrecognized":
            page.put(labels.get("key", name), value)
        elif not _ABOUT.fullmatch(name) and not name.endswith("_created"):
            self.rest.append((name, labels, value))

    def _count(self, name: str, value: float) -> None:
        if name == "verl_rollout_steps_total":
            self.counted = value
        rank = _rank(name)
        if rank < self.page.rank and value.is_integer() and abs(value) <= _LARGEST_STEP:
            self.page.step, self.page.rank = int(value), rank
            self.prefix = name.removesuffix("training_global_step") if name.endswith("training_global_step") else ""

    def done(self) -> RunPage:
        for name, labels, value in self.rest:
            flat = unflatten(name.removeprefix(self.prefix))
            # verl_critic_loss is this project's, or after verl_training_global_step, which is not, verl's critic/loss.
            key = flat if flat and self.prefix == _OWN else _own(name, labels) or flat
            self.page.put(key or name, value)
        if self.page.state and self.page.rank and not (self.counted == 0 and self.page.values):
            # A monitor has no last step before the first one of a new start, and its other counters are of the old
            # start; but what a run shows that has not counted a step yet is the validation before the first.
            self.page.step = None
        return self.page


def _own(name: str, labels: Mapping[str, str]) -> str | None:
    """The key of a metric of this project, None for any other."""
    metric = BY_NAME.get(name.removeprefix(_OWN)) if name.startswith(_OWN) else None
    if metric is None:
        return None
    values = tuple(labels.get(label, "") for label in metric.labels)
    if not any(values) and metric.labels:  # the guide's verl_kl_divergence may come without its label
        values = next(iter(metric.keys.values()))
    return series_key(metric.series(values))


def _rank(name: str) -> int:
    if name in STEP_COUNTERS:
        return STEP_COUNTERS.index(name)
    counter = next((counter for counter in STEP_COUNTERS[2:4] if name.endswith(f"_{counter}")), None)
    return len(STEP_COUNTERS) if counter is None else STEP_COUNTERS.index(counter)


def read_page(text: str, default_run: str, *, open_metrics: bool = False) -> tuple[dict[str, RunPage], int]:
    """The runs of a page, and how many samples were cut because there were too many of them or of their runs.

    ``default_run`` is the run of samples that have no label ``run``, ``experiment`` or ``experiment_name``; on a page
    whose steps are those of named runs such samples are of the machine and not of a run.

    Raises:
        ValueError: this is no exposition.
    """
    runs: dict[str, _Reading] = {}
    cut = 0
    try:
        for number, sample in enumerate(_samples(text, open_metrics)):
            if number >= MAX_SAMPLES:  # the parser is slow, so nothing is read any more
                cut += sum(bool(line) and line[0] != "#" for line in text.splitlines()) - number
                break
            name = str(sample.name)
            if _OTHERS.fullmatch(name):
                continue
            run = next((sample.labels[label] for label in _RUN_LABELS if sample.labels.get(label)), default_run)
            if run not in runs:
                if len(runs) >= MAX_RUNS:
                    cut += 1
                    continue
                runs[run] = _Reading()
            runs[run].take(name, sample)
    except ValueError:
        raise
    except Exception as error:  # the parser raises whatever its input makes it run into
        raise ValueError(str(error) or type(error).__name__) from error
    pages = {run: reading.done() for run, reading in runs.items()}
    stepping = any(page.step is not None or page.state for page in pages.values())
    return {run: page for run, page in pages.items()
            if page.step is not None or page.state or (page.values and not (stepping and run == default_run))}, cut


def _samples(text: str, open_metrics: bool) -> Iterable[Sample]:
    parse = openmetrics.text_string_to_metric_families if open_metrics else text_string_to_metric_families
    for family in parse(text):
        if family.type in ("gauge", "counter", "unknown", "untyped", "info", "stateset"):
            yield from family.samples


def _flat(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


# What a placeholder can be read from where its slashes are gone: one that others follow takes all it can.
_PLACEHOLDER = {"variable": "[^_]+", "aggregate": r"[a-z]+_\d+(?:_[a-z]+)?"}


def _shape(key: str) -> tuple[re.Pattern[str], str]:
    """A key with placeholders: the pattern of its flattened names, and the template of the key."""
    parts = re.split(r"\{(\w+)\}", key)
    names = parts[1::2]
    last = {names[-1]: "[^_]+"} if len(names) > 1 else {}
    return re.compile("".join(f"(?P<{part}>{_PLACEHOLDER.get(part) or last.get(part, '.+')})" if place % 2
                              else _flat(part) for place, part in enumerate(parts))), key


_FLAT = {_flat(key): key for metric in METRICS for key in metric.keys if "{" not in key}
# The longest first, so that a special case wins. One word before the name is not enough to tell: reward_x may be x of
# verl's reward/, or another's own.
_SHAPES = [_shape(key) for key in sorted((key for metric in METRICS for key in metric.keys if "{" in key),
                                         key=lambda key: -len(key.partition("{")[0]))
           if "_" in _flat(key.partition("{")[0]).strip("_")]


@lru_cache(4096)
def unflatten(name: str) -> str | None:
    """verl's key of a name in which everything but letters and digits became ``_``; None where there is no telling.

    Where a name can be read in several ways (``timing_s_a_b``: is that ``a_b`` or ``a/b``?), with the fewest slashes.
    """
    flat = _flat(name)
    if flat in _FLAT:
        return _FLAT[flat]
    for regex, key in _SHAPES:
        if match := regex.fullmatch(flat):
            found = match.groupdict()
            if "aggregate" in found:
                found["aggregate"] = re.sub(r"_(\d+)_?", r"@\1/", found["aggregate"]).rstrip("/")
            return key.format(**found)
    return None
