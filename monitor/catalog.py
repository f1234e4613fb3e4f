"""Every metric, declared once: name, labels, unit, help, verl's keys of all versions, scale, panel hint.

A *series* is a metric with its labels filled in, written ``name``, ``name/value`` or ``name/value|value``:
``policy_loss``, ``kl_divergence/reference``, ``trajectory_off_policy/staleness|mean``. Observations, detectors
and the exporter all speak in series; verl's keys appear here and nowhere else.

The keys were collected from the verl releases 0.2 to 0.9.1. Where several keys mean the same thing, the first
one declared wins in a row that holds more than one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from monitor.machine_metrics import MACHINE
from monitor.metric import Metric, NonFinite
from monitor.model import NAN, Observation, RawStep
from monitor.units import Unit


def _stats(prefix: str, *stats: str) -> dict[str, tuple[str, ...]]:
    return {f"{prefix}/{stat}": (stat,) for stat in stats}


_MINMAX = ("mean", "max", "min")
_GIB = float(2**30)

METRICS: tuple[Metric, ...] = (
    # --- progress
    Metric(name="global_step", unit=Unit.NUMBER, help="Trainer's own step counter.", panel="progress",
           keys={"training/global_step": ()}),
    Metric(name="epoch", unit=Unit.NUMBER, help="Pass over the prompts.", panel="progress",
           keys={"training/epoch": ()}),
    # --- policy
    Metric(name="policy_loss", unit=Unit.NUMBER, panel="loss", nonfinite=NonFinite.FATAL,
           help="Policy-gradient loss. Sum or mean over micro-batches by version: compare a run with itself only.",
           keys={"actor/pg_loss": ()}),
    Metric(name="total_loss", unit=Unit.NUMBER, panel="loss", labels=("role",), nonfinite=NonFinite.FATAL,
           help="Loss that is back-propagated, with entropy and KL terms.",
           keys={"actor/loss": ("actor",), "critic/loss": ("critic",)}),
    Metric(name="supervised_loss_nats", unit=Unit.NATS, panel="loss", labels=("split",), nonfinite=NonFinite.FATAL,
           help="Cross entropy of supervised fine-tuning.",
           keys={"train/loss": ("train",), "val/loss": ("val",)}),
    Metric(name="kl_divergence", unit=Unit.NATS, panel="stability", labels=("kind",), zero_is_unset=True,
           nonfinite=NonFinite.FATAL, log=True,
           help="KL divergence in nats per token: of the policy to the reference model, of one update "
                "(old minus new log-probability, signed), of the trainer to the rollout engine.",
           keys={"actor/kl_loss": ("reference",), "actor/reward_kl_penalty": ("reference",),
                 "critic/kl": ("reference",), "actor/ppo_kl": ("update",), "rollout_corr/kl": ("rollout",)}),
    Metric(name="kl_coefficient", unit=Unit.NUMBER, panel="stability", labels=("place",),
           help="Weight of the reference KL, in the loss or in the reward.",
           keys={"actor/kl_coef": ("loss",), "actor/reward_kl_penalty_coeff": ("reward",),
                 "critic/kl_coeff": ("reward",)}),
    Metric(name="entropy_nats", unit=Unit.NATS, panel="stability", nonfinite=NonFinite.FATAL,
           help="Mean entropy of the policy's next-token distribution.",
           keys={"actor/entropy": (), "actor/entropy_loss": ()}),
    Metric(name="policy_clip_ratio", unit=Unit.RATIO, panel="stability", labels=("bound",),
           help="Share of tokens whose probability ratio was clipped.",
           keys={"actor/pg_clipfrac": ("upper",), "actor/pg_clipfrac_lower": ("lower",)}),
    Metric(name="gradient_norm", unit=Unit.NUMBER, panel="stability", labels=("role",), log=True,
           nonfinite=NonFinite.FATAL,
           help="Norm of the gradient before clipping. Not finite: verl skips the optimizer step in silence.",
           keys={"actor/grad_norm": ("actor",), "critic/grad_norm": ("critic",),
                 "train/grad_norm": ("supervised",)}),
    Metric(name="learning_rate", unit=Unit.NUMBER, panel="loss", labels=("role",), log=True,
           help="Learning rate of the step.",
           keys={"actor/lr": ("actor",), "critic/lr": ("critic",), "train/lr": ("supervised",),
                 "train/lr(1e-3)": ("supervised",)}, key_scale={"train/lr(1e-3)": 1e-3}),
    # --- critic
    Metric(name="critic_loss", unit=Unit.NUMBER, panel="value", log=True, nonfinite=NonFinite.FATAL,
           help="Value-function loss, in squared units of the return.", keys={"critic/vf_loss": ()}),
    Metric(name="value_clip_ratio", unit=Unit.RATIO, panel="value",
           help="Share of value predictions that were clipped.", keys={"critic/vf_clipfrac": ()}),
    Metric(name="value_prediction", unit=Unit.NUMBER, panel="value", nonfinite=NonFinite.FATAL,
           help="Mean value prediction during the critic update.", keys={"critic/vpred_mean": ()}),
    Metric(name="value", unit=Unit.NUMBER, panel="value", labels=("stat",), nonfinite=NonFinite.FATAL,
           help="Value of the rollout's tokens as the critic sees it.", keys=_stats("critic/values", *_MINMAX)),
    Metric(name="value_explained_variance", unit=Unit.NUMBER, panel="value",
           help="Share of the return's variance that the critic explains, from minus infinity to 1. "
                "Far below 0 is normal for a fresh critic.", keys={"critic/vf_explained_var": ()}),
    # --- signal. verl logs these under critic/ with or without a critic.
    Metric(name="advantage", unit=Unit.NUMBER, panel="signal", labels=("stat",), nonfinite=NonFinite.SUSPECT,
           help="Advantage over the batch's tokens. Bounded for group-normalised estimators.",
           keys=_stats("critic/advantages", *_MINMAX)),
    Metric(name="return", unit=Unit.NUMBER, panel="signal", labels=("stat",), nonfinite=NonFinite.SUSPECT,
           help="Return over the batch's tokens.", keys=_stats("critic/returns", *_MINMAX)),
    Metric(name="score", unit=Unit.NUMBER, panel="signal", labels=("stat",), nonfinite=NonFinite.SUSPECT,
           help="Score of the reward function, per response.", keys=_stats("critic/score", *_MINMAX)),
    Metric(name="reward", unit=Unit.NUMBER, panel="signal", labels=("stat",), nonfinite=NonFinite.SUSPECT,
           help="Reward per response, KL penalty included where it is part of the reward.",
           keys=_stats("critic/rewards", *_MINMAX)),
    Metric(name="reward_deviation", unit=Unit.NUMBER, panel="signal",
           help="Standard deviation of the reward inside a prompt's group.", keys={"reward_std": ()}),
    Metric(name="tied_groups_ratio", unit=Unit.RATIO, panel="signal",
           help="Share of prompts all of whose responses score the same.", keys={"frac_reward_zero_std": ()}),
    Metric(name="reward_component", unit=Unit.NUMBER, panel="signal", labels=("component",),
           help="A component of the reward, as the reward function names it.",
           keys={"reward/{component}": ("{component}",)}),
    # --- rollout
    Metric(name="response_length_tokens", unit=Unit.TOKENS, panel="rollout", labels=("stat",),
           help="Length of the responses.", keys=_stats("response_length", *_MINMAX)),
    Metric(name="response_clip_ratio", unit=Unit.RATIO, panel="rollout",
           help="Share of responses as long as the limit. The V1 trainer compares with the longest of the batch.",
           keys={"response_length/clip_ratio": ()}),
    Metric(name="response_length_non_aborted_tokens", unit=Unit.TOKENS, panel="rollout", labels=("stat",),
           help="Length of the responses that were not aborted.",
           keys=_stats("response_length_non_aborted", *_MINMAX)),
    Metric(name="response_non_aborted_clip_ratio", unit=Unit.RATIO, panel="rollout",
           help="Share of non-aborted responses as long as the limit.",
           keys={"response_length_non_aborted/clip_ratio": ()}),
    Metric(name="response_aborted_ratio", unit=Unit.RATIO, panel="rollout",
           help="Share of responses that were aborted.", keys={"response/aborted_ratio": ()}),
    Metric(name="prompt_length_tokens", unit=Unit.TOKENS, panel="rollout", labels=("stat",),
           help="Length of the prompts.", keys=_stats("prompt_length", *_MINMAX)),
    Metric(name="prompt_clip_ratio", unit=Unit.RATIO, panel="rollout",
           help="Share of prompts as long as the limit.", keys={"prompt_length/clip_ratio": ()}),
    Metric(name="sequence_length_tokens", unit=Unit.TOKENS, panel="rollout", labels=("stat",),
           help="Tokens per data-parallel rank, before and after balancing.",
           keys=_stats("global_seqlen", *_MINMAX, "minmax_diff", "balanced_min", "balanced_max")),
    Metric(name="turns", unit=Unit.NUMBER, panel="rollout", labels=("stat",),
           help="Turns of a conversation with tools.",
           keys=_stats("num_turns", *_MINMAX) | _stats("training/num_turns", *_MINMAX)),
    Metric(name="generation_batches", unit=Unit.NUMBER, panel="rollout",
           help="Batches generated to fill one training batch (dynamic sampling).",
           keys={"train/num_gen_batches": ()}),
    # --- trainer against rollout engine
    Metric(name="rollout_probability_difference", unit=Unit.NUMBER, panel="mismatch", labels=("stat",),
           help="Absolute difference of token probabilities, trainer against rollout engine.",
           keys={f"training/rollout_probs_diff_{stat}": (stat,) for stat in ("mean", "max", "std")}),
    Metric(name="rollout_probability_difference_valid", unit=Unit.NUMBER, panel="mismatch",
           help="Whether the difference could be computed.", keys={"training/rollout_probs_diff_valid": ()}),
    Metric(name="rollout_probability_correlation", unit=Unit.NUMBER, panel="mismatch",
           help="Pearson correlation of token probabilities, trainer against rollout engine.",
           keys={"training/rollout_actor_probs_pearson_corr": ()}),
    Metric(name="rollout_k3_kl_nats", unit=Unit.NATS, panel="mismatch", log=True,
           help="KL of trainer to rollout engine, low-variance estimator.", keys={"rollout_corr/k3_kl": ()}),
    Metric(name="rollout_perplexity_ratio", unit=Unit.RATIO, panel="mismatch",
           help="Perplexity of the trainer over that of the rollout engine.", keys={"rollout_corr/ppl_ratio": ()}),
    Metric(name="rollout_chi2", unit=Unit.NUMBER, panel="mismatch", labels=("level",),
           help="Chi-squared divergence of trainer and rollout engine.",
           keys={"rollout_corr/chi2_token": ("token",), "rollout_corr/chi2_seq": ("sequence",)}),
    Metric(name="perplexity", unit=Unit.NUMBER, panel="mismatch", labels=("engine",),
           help="Perplexity of the rollout's tokens.",
           keys={"rollout_corr/training_ppl": ("training",), "rollout_corr/rollout_ppl": ("rollout",)}),
    Metric(name="log_perplexity_nats", unit=Unit.NATS, panel="mismatch", labels=("engine",),
           help="Logarithm of the perplexity of the rollout's tokens.",
           keys={"rollout_corr/training_log_ppl": ("training",), "rollout_corr/rollout_log_ppl": ("rollout",)}),
    Metric(name="log_perplexity_difference_nats", unit=Unit.NATS, panel="mismatch", labels=("stat",),
           help="Difference of log-perplexities, trainer minus rollout engine.",
           keys={"rollout_corr/log_ppl_diff": ("mean",), "rollout_corr/log_ppl_abs_diff": ("abs",),
                 "rollout_corr/log_ppl_diff_max": ("max",), "rollout_corr/log_ppl_diff_min": ("min",)}),
    Metric(name="rollout_importance_weight", unit=Unit.NUMBER, panel="mismatch", labels=("stat",),
           help="Importance weights that correct for the rollout engine.",
           keys={"rollout_corr/rollout_is_{stat}": ("{stat}",)}),
    Metric(name="rollout_rejection", unit=Unit.NUMBER, panel="mismatch", labels=("stat",),
           help="Rejection sampling that corrects for the rollout engine.",
           keys={"rollout_corr/rollout_rs_{stat}": ("{stat}",)}),
    Metric(name="trajectory_off_policy", unit=Unit.NUMBER, panel="mismatch", labels=("measure", "stat"),
           help="How many weight versions old the trajectories are, and over how many they span.",
           keys={"training/off_policy/trajectory_{measure}/{stat}": ("{measure}", "{stat}")}),
    # --- what only the console says
    Metric(name="gradient_warnings", unit=Unit.NUMBER, panel="log",
           help="Lines since the last step that say that a gradient norm is not finite, over all ranks.",
           keys={"console/grad_norm_not_finite": ()}),
    Metric(name="rollout_errors", unit=Unit.NUMBER, panel="log",
           help="Rollouts since the last step that raised an error; verl trains on without them and no metric says so.",
           keys={"console/rollout_errors": ()}),
    Metric(name="resumed_from_step", unit=Unit.NUMBER, panel="log",
           help="Step of the checkpoint that the run was resumed from.", keys={"console/resumed_from_step": ()}),
    Metric(name="rounded_values", unit=Unit.NUMBER, panel="log",
           help="Values of the step that an old version rounded to 0.000: small, but not known to be zero.",
           keys={"console/rounded_zeros": ()}),
    # --- speed and memory
    Metric(name="stage_duration_seconds", unit=Unit.SECONDS, panel="speed", labels=("stage",),
           help="Duration of a stage of the step. The stage step excludes testing.",
           keys={"timing_s/{stage}": ("{stage}",), "perf/time_per_step": ("step",),
                 "timing/{stage}": ("{stage}",)}),
    Metric(name="stage_token_duration_seconds", unit=Unit.SECONDS, panel="speed", labels=("stage",),
           help="Duration of a stage per token.",
           keys={"timing_per_token_ms/{stage}": ("{stage}",), "timing_per_token/{stage}": ("{stage}",)},
           scale=1e-3, key_scale={"timing_per_token/{stage}": 1.0}),
    Metric(name="agent_loop", unit=Unit.NUMBER, panel="speed", labels=("measure", "stat"),
           help="Counts and lengths of the agent loop, which verl logs among its timings.",
           keys={"timing_s/agent_loop/num_preempted/{stat}": ("num_preempted", "{stat}"),
                 "timing_s/agent_loop/slowest/num_preempted": ("num_preempted", "slowest"),
                 "timing_s/agent_loop/slowest/prompt_length": ("prompt_length", "slowest"),
                 "timing_s/agent_loop/slowest/response_length": ("response_length", "slowest")}),
    Metric(name="throughput_tokens_per_second", unit=Unit.TOKENS_PER_SECOND, panel="speed",
           help="Tokens per second and GPU. The V1 trainer counts padding.", keys={"perf/throughput": ()}),
    Metric(name="step_tokens", unit=Unit.TOKENS, panel="speed", help="Tokens of the step.",
           keys={"perf/total_num_tokens": ()}),
    Metric(name="model_flops_utilization_ratio", unit=Unit.RATIO, panel="speed", labels=("stage",),
           help="Model FLOPs utilisation.", keys={"perf/mfu/{stage}": ("{stage}",), "mfu/{stage}": ("{stage}",)}),
    Metric(name="gpu_allocated_peak_bytes", unit=Unit.BYTES, panel="memory", labels=("role",), scale=_GIB,
           help="Peak memory that the allocator gave out, on one rank.",
           keys={"actor/perf/max_memory_allocated_gb": ("actor",), "critic/perf/max_memory_allocated_gb": ("critic",),
                 "perf/max_memory_allocated_gb": ("trainer",)}),
    Metric(name="gpu_reserved_peak_bytes", unit=Unit.BYTES, panel="memory", labels=("role",), scale=_GIB,
           help="Peak memory that the allocator held, on one rank.",
           keys={"actor/perf/max_memory_reserved_gb": ("actor",), "critic/perf/max_memory_reserved_gb": ("critic",),
                 "perf/max_memory_reserved_gb": ("trainer",)}),
    Metric(name="host_memory_used_bytes", unit=Unit.BYTES, panel="memory", labels=("role",), scale=_GIB,
           help="Host memory in use on the role's node.",
           keys={"actor/perf/cpu_memory_used_gb": ("actor",), "critic/perf/cpu_memory_used_gb": ("critic",),
                 "perf/cpu_memory_used_gb": ("trainer",)}),
    # --- validation
    Metric(name="validation_score", unit=Unit.NUMBER, panel="validation",
           labels=("source", "variable", "aggregate", "tier"),
           help="Score on the validation set.",
           keys={"val-core/{source}/{variable}/{aggregate}": ("{source}", "{variable}", "{aggregate}", "core"),
                 "val-aux/{source}/{variable}/{aggregate}": ("{source}", "{variable}", "{aggregate}", "aux"),
                 "val/test_score/{source}": ("{source}", "score", "mean", "core")}),
    Metric(name="validation_turns", unit=Unit.NUMBER, panel="validation", labels=("stat",),
           help="Turns of a conversation in validation.", keys=_stats("val-aux/num_turns", *_MINMAX)),
)

# A placeholder takes what its key can hold: a source has slashes, an aggregate is "mean@8" or "best@8/mean".
_PLACEHOLDER = {
    "source": r"(?P<source>.+)",
    "variable": r"(?P<variable>[^/]+)",
    "aggregate": r"(?P<aggregate>[^/]+@\d+(?:/[^/]+)?)",
    "measure": r"(?P<measure>[^/]+)",
    "stat": r"(?P<stat>.+)",
    "stage": r"(?P<stage>.+)",
    "component": r"(?P<component>.+)",
}

_SERIES = "verl_"  # before a series in place of a key; no key of verl's begins so

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
_ALL: dict[str, Metric] = {metric.name: metric for metric in (*METRICS, *MACHINE)}

HAS_CRITIC_SERIES = frozenset({"critic_loss", "value/mean", "value/max", "value/min"})
"""Series that prove a critic. The prefix ``critic/`` does not: verl logs scores and advantages under it too."""

TRAINING_SERIES = frozenset({"policy_loss", "kl_divergence/update", "gradient_norm/actor", "critic_loss",
                             "gradient_norm/critic", "score/mean", "advantage/mean", "supervised_loss_nats/train",
                             "stage_duration_seconds/step", "stage_duration_seconds/gen"})
"""Series that only a training step logs; a row without any of them is validation alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a verl key goes: the series, its metric, the factor to the base unit, the key's precedence."""

    series: str
    metric: Metric
    label_values: tuple[str, ...]
    scale: float
    rank: int


def _compile() -> tuple[dict[str, Target], list[tuple[re.Pattern[str], Metric, tuple[str, ...], float, int]]]:
    exact: dict[str, Target] = {}
    patterns: list[tuple[re.Pattern[str], Metric, tuple[str, ...], float, int]] = []
    for metric in METRICS:
        for rank, (key, label_values) in enumerate(metric.keys.items()):
            if len(label_values) != len(metric.labels):
                raise ValueError(f"catalogue: {metric.name}: {key!r} gives {label_values} for {metric.labels}")
            scale = (metric.key_scale or {}).get(key, metric.scale)
            if "{" in key:
                parts = re.split(r"\{(\w+)\}", key)
                regex = "".join(_PLACEHOLDER[p] if i % 2 else re.escape(p) for i, p in enumerate(parts))
                patterns.append((re.compile(regex), metric, label_values, scale, rank))
            elif key in exact:
                raise ValueError(f"catalogue: {key!r} is declared twice")
            else:
                exact[key] = Target(metric.series(label_values), metric, label_values, scale, rank)
    # Longest literal text first, so that a special case wins over the general pattern.
    patterns.sort(key=lambda entry: -len(entry[0].pattern))
    return exact, patterns


_EXACT, _PATTERNS = _compile()


@lru_cache(maxsize=4096)
def resolve(key: str) -> Target | None:
    """Series that a verl key feeds, or None when the catalogue does not know the key.

    A series that has its unit already is known too, under ``series_key``.
    """
    if key in _EXACT:
        return _EXACT[key]
    if key.startswith(_SERIES):
        name, slash, values = key.removeprefix(_SERIES).partition("/")
        metric, label_values = BY_NAME.get(name), tuple(values.split("|")) if slash else ()
        if metric is None or len(label_values) != len(metric.labels):
            return None
        return Target(metric.series(label_values), metric, label_values, 1.0, 0)
    for regex, metric, label_values, scale, rank in _PATTERNS:
        match = regex.fullmatch(key)
        if match:
            filled = tuple(value.format(**match.groupdict()) for value in label_values)
            return Target(metric.series(filled), metric, filled, scale, rank)
    return None


def series_key(series: str) -> str:
    """The key of a row's value that is a series in its base unit, as an exporter has it."""
    return _SERIES + series


def metric_of(series: str) -> Metric:
    """The metric that a series belongs to.

    Raises:
        KeyError: the series' name is not in the catalogue.
    """
    return _ALL[series.split("/", 1)[0]]


def verl_keys(series: str) -> tuple[str, ...]:
    """The verl keys that feed a series, current name first; of a metric of the machine, its own name."""
    metric = metric_of(series)
    if metric.machine:
        return (f"verl_{metric.name}",)
    values = tuple(value for _, value in label_map(series))
    exact = tuple(key for key, labels in metric.keys.items() if labels == values)
    if exact:
        return exact
    general = next(key for key, labels in metric.keys.items() if "{" in key)
    for name, value in zip(metric.labels, values, strict=False):
        general = general.replace("{" + name + "}", value)
    return (general,)


def to_number(value: object) -> float | None:
    """A value as verl's writers may leave it, as a float; NaN for anything not finite; None for no number.

    Accepts Python and numpy scalars, 0-dimensional tensors, booleans, ``None`` (verl's file logger writes every
    non-finite number as null), strings of numbers, and integers too large for a float (which are not finite).
    """
    if value is None:
        return NAN
    if type(value) is not float:
        if isinstance(value, (list, tuple, dict, set, bytes, bytearray)):
            return None
        try:
            value = float(value)  # type: ignore[arg-type]  # anything with __float__, and strings
        except OverflowError:
            return NAN
        except Exception:  # noqa: BLE001 - a foreign object's __float__ may raise anything
            return None
    return value if -_LARGEST <= value <= _LARGEST else NAN


_LARGEST = 1.7976931348623157e308


def parse(raw: RawStep) -> Observation:
    """Fold one row onto catalogue series and base units.

    A bad value costs itself only: it is named in ``rejected`` and the rest of the row is kept.
    """
    values: dict[str, float] = {}
    ranks: dict[str, int] = {}
    unknown: dict[str, float] = {}
    rejected: list[tuple[str, str]] = []
    for key, raw_value in raw.values.items():
        number = to_number(raw_value)
        if number is None:
            shown = repr(raw_value) if isinstance(raw_value, str) else type(raw_value).__name__
            rejected.append((str(key)[:120], f"expected a number, got {shown[:60]}"))
            continue
        target = resolve(key) if isinstance(key, str) else None
        if target is None:
            unknown[str(key)] = number
            continue
        number *= target.scale
        series = target.series
        if series in values and not _wins(number, target, values[series], ranks[series]):
            continue
        values[series] = number
        ranks[series] = target.rank
    return Observation(run=raw.run, step=raw.step, time_seconds=raw.time_seconds, values=values, live=raw.live,
                       unknown=unknown, rejected=tuple(rejected))


def _wins(new: float, target: Target, old: float, old_rank: int) -> bool:
    """Whether a second value for a series replaces the first: a fault is never hidden by a healthy twin."""
    if new != new or old != old:
        return new != new
    if target.metric.zero_is_unset and (new == 0.0) != (old == 0.0):
        return old == 0.0
    return target.rank < old_rank


def nonfinite_kind(series: str) -> NonFinite:
    """What a NaN in the series means. The rollout's KL is a diagnostic of a batch, not a state of the model."""
    if series == "kl_divergence/rollout":
        return NonFinite.SUSPECT
    return metric_of(series).nonfinite


def label_map(series: str) -> tuple[tuple[str, str], ...]:
    """``(label, value)`` pairs of a series, in the metric's order."""
    name, _, values = series.partition("/")
    labels = _ALL[name].labels
    if not values and _ALL[name].machine:  # all GPUs, nodes or states
        return ()
    return tuple(zip(labels, values.split("|"), strict=True)) if labels else ()
