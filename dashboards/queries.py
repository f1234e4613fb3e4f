"""PromQL, from series of the catalogue. A metric's name is written once: in the catalogue, or in ``Name`` below.

NaN is a value in Prometheus. A line of a graph may show it as a gap, but one NaN turns a sum or an average into NaN
and no comparison ever finds it, so ``aggregate`` is the only way to aggregate here, and it leaves NaN out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from monitor.catalog import label_map, metric_of
from monitor.metric import Metric
from monitor.model import RunState
from monitor.units import Unit

RUN_VARIABLE = "run"
OF_RUN = f"${RUN_VARIABLE}"

_ACRONYMS = {"kl": "KL", "gpu": "GPU"}


class Name(str, Enum):
    """Metrics of the monitor's own making, as the table in DESIGN.md declares them."""

    STEPS = "verl_rollout_steps_total"
    STATE = "verl_run_state"
    LAST_STEP = "verl_run_last_step"
    LAST_STEP_TIME = "verl_run_last_step_timestamp_seconds"
    ALLOWED_SILENCE = "verl_run_allowed_silence_seconds"
    HEALTH = "verl_health_state"
    SCORE = "verl_health_score"
    VALUE = "verl_health_value"
    THRESHOLD = "verl_health_threshold"
    SINCE_STEP = "verl_health_since_step"
    SUPPRESSED = "verl_health_suppressed"
    BLIND = "verl_detector_blind"
    FINDINGS = "verl_findings_total"
    NONFINITE = "verl_nonfinite_total"

    @property
    def unit(self) -> Unit:
        """Unit by the name's ending, as Prometheus names are made."""
        named = (u for u in Unit if u.suffix and self.value.endswith("_" + u.suffix))
        return max(named, key=lambda unit: len(unit.suffix), default=Unit.NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel. ``instant``: only the value at the end of the time range is asked for."""

    expr: str
    legend: str = ""
    instant: bool = False


def one_of(values: Iterable[str]) -> str:
    """A matcher's value that stands for several; only for words without regular-expression characters."""
    return "~" + "|".join(values)


def select(name: Name | Metric, **labels: str) -> str:
    """Selector of a metric of the chosen run. A label's value that begins with ``~`` is a regular expression."""
    metric = f"verl_{name.name}" if isinstance(name, Metric) else name.value
    # A GPU belongs to no run.
    of_run = not (isinstance(name, Metric) and name.machine and RUN_VARIABLE not in name.labels)
    matchers = [f'{RUN_VARIABLE}="{OF_RUN}"'] if of_run else []
    matchers += [f'{k}=~"{v[1:]}"' if v.startswith("~") else f'{k}="{v}"' for k, v in labels.items()]
    return metric + "{" + ",".join(matchers) + "}"


def series_selector(series: str) -> str:
    """Selector of a catalogue series; a labelled metric's bare name stands for all of its series.

    >>> series_selector("kl_divergence/reference")
    'verl_kl_divergence{run="$run",kind="reference"}'
    >>> series_selector("kl_divergence")
    'verl_kl_divergence{run="$run"}'
    """
    metric = metric_of(series)
    return select(metric, **(dict(label_map(series)) if "/" in series else {}))


def series_query(series: str, *, name: bool = False) -> Query:
    """Query of a catalogue series, with its label values as legend. ``name``: the metric's name before them, for a
    panel that shows several metrics."""
    metric = metric_of(series)
    if "/" in series:
        words = [value for _, value in label_map(series)]
    else:
        words = ["{{" + label + "}}" for label in metric.labels]
    if name or not words:
        words.insert(0, words_of(metric))
    return Query(expr=series_selector(series), legend=" ".join(words))


def words_of(metric: Metric) -> str:
    """A metric's name in words, without its unit.

    >>> words_of(metric_of("kl_divergence")), words_of(metric_of("response_length_tokens"))
    ('KL divergence', 'response length')
    """
    bare = metric.name.removesuffix("_" + metric.unit.suffix) if metric.unit.suffix else metric.name
    return " ".join(_ACRONYMS.get(word, word) for word in bare.split("_"))


def latest(selector: str) -> str:
    """Last value inside the dashboard's time range, so that a run that has ended still shows how it ended."""
    return f"last_over_time({selector}[$__range])"


def aggregate(operator: str, expr: str, by: tuple[str, ...] = ()) -> str:
    """An aggregation without NaN and infinities, which no comparison lets through."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"{operator}{grouping} (({expr}) > -Inf < Inf)"


def by_run(metric: Name) -> str:
    """A metric of all runs over the time range, for a variable."""
    return aggregate("max", f"max_over_time({metric.value}[$__range])", (RUN_VARIABLE,))


def run_state_code() -> str:
    """Number of the run's state in the order of ``RunState``: the metric is 1 for one state and 0 for the others."""
    terms = (f"{number} * {latest(select(Name.STATE, state=state.value))}" for number, state in enumerate(RunState))
    return aggregate("max", " or ".join(terms), (RUN_VARIABLE,))


def while_active(expr: str) -> str:
    """The expression as long as steps are still expected of the run: a finished run is not silent, it is over."""
    active = select(Name.STATE, state=one_of(state.value for state in RunState if state.active))
    return f"({expr}) and on ({RUN_VARIABLE}) ({active} == 1)"


def health_code() -> str:
    """Health by detector, and below zero what must not look healthy: -1 blind, -2 held back under its cause."""
    pair = f"on ({RUN_VARIABLE}, detector)"
    blind = f"({select(Name.BLIND)} == 1)"
    suppressed = f"({select(Name.SUPPRESSED)} == 1)"
    judged = f"({select(Name.HEALTH)} unless {pair} {blind} unless {pair} {suppressed})"
    return aggregate("max", f"{judged} or -1 * {blind} or -2 * {suppressed}", ("detector",))


def metric_named(name: str) -> Metric:
    """A catalogue metric by its name.

    Raises:
        KeyError: there is none of that name.
    """
    return metric_of(name)
