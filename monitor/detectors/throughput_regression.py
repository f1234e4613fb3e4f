"""Throughput regression: steps take longer than they did, and not because there is more to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from monitor.detectors.base import Detector, Settings, setting
from monitor.model import NAN, DetectorSpec, Observation, Severity, Status, Verdict
from monitor.stats import Track, median
from monitor.units import Unit, quantity

STEP, TOKENS, LENGTH = "stage_duration_seconds/step", "step_tokens", "response_length_tokens/mean"
STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
_SERIES = tuple((stage, f"stage_duration_seconds/{stage}") for stage in STAGES)
_OTHER_WORK = ("stage_duration_seconds/testing", "stage_duration_seconds/save_checkpoint")
_RECENT = 15
_EVERY = 5  # steps between two looks at the stages


@dataclass(frozen=True, kw_only=True)
class ThroughputRegressionSettings(Settings):
    """Limits of ``throughput_regression``."""

    ratio: float = setting(
        1.5, "ratio", "Median time of the last 15 steps, over the least that it ever was, that is a regression.")
    token_ratio: float = setting(
        1.35, "ratio", "The same for the time per token, where tokens are logged: more to do is no regression.")


SPEC = DetectorSpec(
    id="throughput_regression",
    title="Throughput regression",
    severity=Severity.WARNING,
    required=((STEP,),),
    optional=(TOKENS, LENGTH, *(series for _, series in _SERIES), *_OTHER_WORK),
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
    misses="A run that is slow from its first step, and slowness of single steps.",
    source="The run's own fastest stretch of 15 steps. Healthy runs stay within 1.2 times of it per token; validation "
           "steps are up to 2.3 times slower, at most every fifth.",
    guide="2.3",
    panel=(STEP,),
    rise_steps=5,
    clear_steps=15,
    under=("non_finite", "rollout_stall"),
)


class ThroughputRegression(Detector):
    """The median time of the last 15 steps against the least that this median ever was.

    Medians leave out the validation of versions that do not time it, and a slow-down of any pace is measured from the
    run's best. Where tokens are logged the time per token must have grown as well: longer answers take longer. A
    false alarm sends somebody to look for a fault in machines that are well, so one slow step never counts.

    >>> from monitor.model import Observation
    >>> detector = ThroughputRegression()
    >>> for step in range(80):
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
        self._time = Track(_RECENT, 60, 3)
        self._token_time = Track(_RECENT, 60, 3)
        self._steps: deque[int] = deque(maxlen=_RECENT)
        self._since: int | None = None
        # Durations of the stages, now and then: as they were while the steps were fastest, and as they are.
        self._stages: deque[dict[str, float]] = deque(maxlen=3)
        self._fast: list[dict[str, float]] = []
        self._count = 0

    def update(self, observation: Observation) -> Verdict | None:
        """Judge the duration of the step."""
        values = observation.values
        duration = values.get(STEP, NAN)
        if not duration > 0.0 or any(series in values for series in _OTHER_WORK):
            return None
        self._steps.append(observation.step)
        self._time.add(duration)
        tokens = values.get(TOKENS, values.get(LENGTH, NAN))
        if tokens > 0.0:
            self._token_time.add(duration / tokens)
        self._count += 1
        if self._count % _EVERY == 0:
            self._look(values)
        best, level = self._time.low, self._time.level
        if best != best:
            return Verdict(Status.WARMING, signal=STEP, value=duration)
        ratio = level / best
        token_ratio = self._token_time.level / self._token_time.low if self._token_time.low > 0.0 else NAN
        if ratio < self._s.ratio or token_ratio < self._s.token_ratio:
            self._since = None
            score = min(ratio / self._s.ratio, token_ratio / self._s.token_ratio if token_ratio == token_ratio else 9.0)
            return Verdict(Status.OK, score=min(0.99, score), signal=STEP, value=level, threshold=best * self._s.ratio)
        if self._since is None:
            self._since = self._steps[len(self._steps) // 2]
        return self._finding(level, best, ratio, token_ratio)

    def _look(self, values: Mapping[str, float]) -> None:
        stages = {stage: values[series] for stage, series in _SERIES if series in values}
        self._stages.append(stages)
        if self._time.level <= 1.1 * self._time.low or not self._time.low > 0.0:
            self._fast = list(self._stages)

    def _finding(self, level: float, best: float, ratio: float, token_ratio: float) -> Verdict:
        per_token = f", {token_ratio:.2g} times per token" if token_ratio == token_ratio else ""
        stage, before, now = self._grown()
        cause = (f"; the stage {stage} grew most, from {quantity(before, Unit.SECONDS)} to "
                 f"{quantity(now, Unit.SECONDS)}" if stage else "")
        return Verdict(
            Status.WARNING, score=max(1.0, ratio / self._s.ratio), since_step=self._since, signal=STEP, value=level,
            threshold=best * self._s.ratio,
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
