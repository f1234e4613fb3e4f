"""Throughput regression: steps take longer than they did, and not because there is more to do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import Baseline, median
from monitor.units import Unit, quantity

STEP, TOKENS, LENGTH = "stage_duration_seconds/step", "step_tokens", "response_length_tokens/mean"
BATCHES = "generation_batches"
STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
_SERIES = tuple((stage, f"stage_duration_seconds/{stage}") for stage in STAGES)
TESTING, SAVING = "stage_duration_seconds/testing", "stage_duration_seconds/save_checkpoint"
_RECENT, _FEWEST = 15, 10
_EVERY = 3  # steps between two judgements
_LOW_SHARE, _LOW_SHARE_SIGMA = 0.35, 0.454  # 35 % of normal noise is smaller than this share of its deviation
_ALWAYS = 5  # steps in a row with a validation or a checkpoint that make it part of each step


@dataclass(frozen=True, kw_only=True)
class ThroughputRegressionSettings(Settings):
    """Limits of ``throughput_regression``."""

    ratio: float = setting(
        1.5, "ratio", "Median time of the last 15 steps, over the least that it ever was, that is a regression.")
    token_ratio: float = setting(
        1.35, "ratio", "The same for the time per token, where tokens are logged; more by the root of their growth, "
                       "since attention to longer answers takes longer per token.")
    noise_factor: float = setting(
        2.5, "ratio", "Noise of the step time, from step to step as a share of it, times this is the logarithm of the "
                      "ratio that noise alone can reach.")
    own_ratio: float = setting(
        1.1, "ratio", "The median over what three in four of the run's steps took at most while it was fast, from "
                      "which it counts: a run of fast and slow steps is no regression.")


SPEC = DetectorSpec(
    id="throughput_regression",
    title="Throughput regression",
    severity=Severity.WARNING,
    required=((STEP,),),
    optional=(TOKENS, LENGTH, BATCHES, TESTING, SAVING, *(series for _, series in _SERIES)),
    wake="timing_s/step is logged by every trainer since verl 0.2.",
    meaning="A training step takes much longer than this run's own steps did, per token too, and stays so. Steps with "
            "a validation or a checkpoint are not counted.",
    impact="The same training costs that much more GPU time. Often it is the first sign of a leak, a throttled GPU or "
           "a reward service that is about to give up.",
    diagnosis=(
        "The reason names the stage that grew most; compare its timing_s/ series with response_length/mean.",
        "gen: preempted requests (timing_s/agent_loop/num_preempted), a rollout server that was lost, a full KV cache.",
        "reward: a reward model whose batch is too small, or a reward service that other jobs share.",
        "All stages alike: GPU clocks (power or heat), another job on the node, a slow network.",
    ),
    actions=(
        "reward: raise the batch of the reward model (reward.reward_model.*; reward_model.micro_batch_size_per_gpu up "
        "to verl 0.6) and reward.num_workers, and give the reward function a time-out",
        "gen: raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower data.max_response_length",
        "update: use actor_rollout_ref.actor.use_dynamic_bsz=True and a fitting ppo_max_token_len_per_gpu",
        "all alike: look at the nodes (nvidia-smi -q -d PERFORMANCE, other jobs), and restart on others if need be",
    ),
    misses="A run that is slow from its first ten steps on, slowness of single steps, and one that longer answers or "
           "more generation batches (dynamic sampling) would explain.",
    source="The run's own fastest stretch of 15 steps. Healthy runs stay within 1.2 times of it per token; validation "
           "steps are up to 2.3 times slower, at most every fifth. A best of many noisy stretches is low by chance, "
           "so a run whose steps vary by a quarter must slow down further; measured on made noise.",
    guide="2.3",
    panel=(STEP,),
    rise_steps=2,
    clear_steps=5,
    under=("non_finite", "rollout_stall"),
)


class ThroughputRegression(Detector):
    """The median time of the last 15 steps against the least that this median ever was, judged at every third step.

    Medians leave out the validation of versions that do not time it, and a slow-down of any pace is measured from the
    run's best. Where tokens are logged the time per token must have grown as well: longer answers take longer, and so
    do the extra batches of dynamic sampling. A false alarm sends somebody to look for a fault in machines that are
    well, so one slow step never counts.

    >>> from monitor.model import Observation
    >>> detector = ThroughputRegression()
    >>> for step in range(81):
    ...     values = {"stage_duration_seconds/step": 20.0 if step < 50 else 40.0}
    ...     verdict = detector.update(Observation("run", step, 0.0, values))
    >>> verdict.status.name
    'WARNING'
    """

    spec = SPEC
    settings_type = ThroughputRegressionSettings

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._s = cast(ThroughputRegressionSettings, self._settings)
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._token_times: deque[float] = deque(maxlen=_RECENT)
        self._steps: deque[int] = deque(maxlen=_RECENT)
        self._best = self._token_best = NAN
        self._usual = Baseline(80)  # durations of single steps while the run was fast
        self._changes = Baseline(60)  # of the logarithm of the duration, from step to step
        self._since: int | None = None
        # Durations of the stages, now and then: as they were while the steps were fastest, and as they are.
        self._stages: deque[dict[str, float]] = deque(maxlen=5)
        self._fast: list[dict[str, float]] = []
        self._count = 0
        self._other_work = 0  # rows in a row that hold a validation or a checkpoint

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the duration of the step."""
        values = observation.values
        duration = values.get(STEP, NAN)
        if not 0.0 < duration < math.inf:
            return None
        if TESTING in values or SAVING in values:
            self._other_work += 1
            if self._other_work < _ALWAYS:
                return None
            saving = values.get(SAVING, 0.0)
            duration -= saving if 0.0 < saving < duration else 0.0
        elif self._other_work:
            self._other_work = 0
        self._steps.append(observation.step)
        self._times.append(duration)
        work = values.get(TOKENS, NAN)
        if work != work:
            work = values.get(LENGTH, NAN)
        if BATCHES in values:
            work = values[BATCHES] * (work if work == work else 1.0)
        if 0.0 < work < math.inf:
            self._token_times.append(duration / work)
        self._count += 1
        if self._count % _EVERY:
            return None
        if self._count < _FEWEST:
            return Verdict(Status.WARMING, signal=STEP, value=duration)
        return self._judge(values)

    def _judge(self, values: Mapping[str, float]) -> Verdict:
        level = median(self._times)
        self._best = best = min(level, self._best) if self._best == self._best else level
        token_ratio = NAN
        if len(self._token_times) >= _FEWEST:
            token_level = median(self._token_times)
            self._token_best = min(token_level, self._token_best) if self._token_best == self._token_best \
                else token_level
            token_ratio = token_level / self._token_best if self._token_best > 0.0 else NAN
        stages = {stage: values[series] for stage, series in _SERIES if series in values}
        self._stages.append(stages)
        ratio = level / best
        self._changes.offer(abs(math.log(self._times[-1] / self._times[-2])))
        noise = self._changes.quantile(_LOW_SHARE) / _LOW_SHARE_SIGMA / math.sqrt(2)
        needed = max(self._s.ratio, math.exp(min(9.0, self._s.noise_factor * noise)))
        if ratio <= 1.2:
            # The oldest: what came since may be the beginning of a slow-down that the median does not show yet.
            self._usual.offer(self._times[0])
            self._usual.offer(self._times[1])
            if ratio <= 1.1:
                self._fast = list(self._stages)
        limit = max(best * needed, self._s.own_ratio * self._usual.quantile(0.75))
        score = level / limit
        if token_ratio == token_ratio:
            # Where the time has grown by more than the time per token, there are more tokens.
            more = max(1.0, ratio / token_ratio)
            score = min(score, token_ratio / (self._s.token_ratio * math.sqrt(more)))
        if score < 1.0:
            self._since = None
            return Verdict(Status.OK, score=min(0.99, score), signal=STEP, value=level, threshold=limit)
        if self._since is None:
            self._since = self._steps[len(self._steps) // 2]
        per_token = f", {token_ratio:.2g} times per token" if token_ratio == token_ratio else ""
        stage, before, now = self._grown()
        cause = (f"; the stage {stage} grew most, from {quantity(before, Unit.SECONDS)} to "
                 f"{quantity(now, Unit.SECONDS)}" if stage else "")
        return Verdict(
            Status.WARNING, score=score, since_step=self._since, signal=STEP, value=level, threshold=limit,
            reason=f"A step takes {quantity(level, Unit.SECONDS)} since about step {self._since}, {ratio:.2g} times "
                   f"this run's best of {quantity(best, Unit.SECONDS)}{per_token}{cause}.",
            evidence={"step_seconds": level, "best_step_seconds": best, "ratio": ratio, "ratio_per_token": token_ratio})

    def _grown(self) -> tuple[str, float, float]:
        """The stage whose duration grew most, before and now; an empty name where stages are not logged."""
        found = ("", 0.0, 0.0)
        for stage in STAGES:
            before = median([row[stage] for row in self._fast if stage in row])
            now = median([row[stage] for row in self._stages if stage in row])
            if now - before > found[2] - found[1]:
                found = (stage, before, now)
        return found
