"""restart_from_scratch, throughput_regression, memory_growth and rollout_mismatch: what fires and what stays silent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

import pytest

from monitor.detectors.memory_growth import MemoryGrowth, MemoryGrowthSettings
from monitor.detectors.restart_from_scratch import RestartFromScratch
from monitor.detectors.rollout_mismatch import RolloutMismatch
from monitor.detectors.throughput_regression import ThroughputRegression
from monitor.model import Incident, Severity
from tests.detectors.lone import Row, found, noisy
from tests.helpers import CASES, LAB, rows, shared

KINDS = (RestartFromScratch, ThroughputRegression, MemoryGrowth, RolloutMismatch)


def made(steps: int, **series: Callable[[int], float]) -> Iterable[Row]:
    return [(step, {key.replace("__", "/"): call(step) for key, call in series.items()})
            for step in range(1, steps + 1)]


def only(incidents: list[Incident]) -> Incident:
    (incident,) = incidents
    return incident


# --- restart from scratch


def starts(*ranges: range, **values: float) -> list[Row]:
    return [(step, {"actor/pg_loss": 0.1, **values}) for steps in ranges for step in steps]


def test_case_21_a_resume_that_begins_at_step_1_again() -> None:
    incident = only(found(RestartFromScratch, rows(CASES / "21_resume_from_zero.jsonl")))
    assert (incident.severity, incident.raised_step) == (Severity.WARNING, 1)
    assert "after it had reached step 35" in incident.reason
    assert found(RestartFromScratch, rows(CASES / "21_resume_ok_replay.jsonl")) == []


@pytest.mark.parametrize(("data", "expected"), [
    (starts(range(1, 40), range(36, 60)), 0), (starts(range(1, 6), range(1, 40)), 0),
    (starts(range(1, 40), range(1, 50)), 1), (starts(range(40), range(50)), 1),
    (starts(range(1, 40), range(1, 60), range(1, 60)), 2), (starts(range(1, 40), range(3, 60)), 0),
])
def test_starts(data: list[Row], expected: int) -> None:
    assert len(found(RestartFromScratch, data)) == expected


def test_validation_before_training_is_no_start() -> None:
    validation: list[Row] = [(0, {"val-core/x/acc/mean@1": 0.5})]
    data = [*starts(range(1, 40)), *validation, *starts(range(40, 60))]
    assert found(RestartFromScratch, data) == []


def test_a_start_that_is_meant_is_silent() -> None:
    detector = RestartFromScratch()
    detector.configured({"trainer.resume_mode": "disable"})
    from monitor.catalog import parse
    from monitor.model import RawStep, Status

    verdicts = [detector.update(parse(RawStep("run", step, 0.0, values)))
                for step, values in starts(range(1, 40), range(1, 5))]
    assert all(verdict is not None and verdict.status is Status.OK for verdict in verdicts)


# --- throughput


def slow(step: int) -> float:
    return 30.0 * (1 + 1.5 * max(0.0, step - 60) / 150) * (1 + 0.03 * math.sin(step))


def test_a_slow_loss_of_speed_names_its_stage_before_half_of_its_course() -> None:
    data = made(210, timing_s__step=slow, timing_s__reward=lambda s: slow(s) - 25.0, timing_s__gen=lambda s: 20.0)
    incident = only(found(ThroughputRegression, data))
    assert 60 < incident.raised_step <= 60 + 75
    assert incident.severity is Severity.WARNING
    assert "the stage reward grew most, from 7.59 s to" in incident.reason


def test_longer_answers_are_no_loss_of_speed() -> None:
    data = made(210, timing_s__step=slow, perf__total_num_tokens=lambda s: 1e5 * slow(s))
    assert found(ThroughputRegression, data) == []


@pytest.mark.parametrize("every", [2, 5, 20])
def test_validation_and_checkpoints_are_not_counted(every: int) -> None:
    usual: dict[str, object] = {"timing_s/step": 30.0}
    saving: dict[str, object] = {"timing_s/step": 90.0, "timing_s/save_checkpoint": 60.0}
    timed = [(s, usual if s % every else saving) for s in range(1, 200)]
    untimed: list[Row] = [(s, {"timing_s/step": 90.0 if s % max(every, 3) == 0 else 30.0}) for s in range(1, 200)]
    assert found(ThroughputRegression, timed) == found(ThroughputRegression, untimed) == []


# --- memory


def memory(gib: Callable[[int], float], steps: int = 200) -> Iterable[Row]:
    return made(steps, perf__cpu_memory_used_gb=gib)


def test_case_19_memory_creeps_up() -> None:
    incident = only(found(MemoryGrowth, rows(CASES / "19_ram_creep.jsonl")))
    assert incident.raised_step <= 58, "before half of the run is gone"
    assert "5.1 GiB a step without levelling off; at this pace it has doubled near step" in incident.reason


def test_with_a_limit_the_end_is_told_and_is_critical_when_near() -> None:
    from monitor.engine import Engine
    from tests.helpers import feed

    engine = Engine(make_detectors=lambda _: [MemoryGrowth(MemoryGrowthSettings(host_limit_gib=890.0))])
    feed(engine, rows(CASES / "19_ram_creep.jsonl"))
    incident = engine.snapshot().runs[0].incidents[0]
    assert incident.severity is Severity.CRITICAL
    assert "the 890 GiB of the node are full near step 11" in incident.reason


@pytest.mark.parametrize("gib", [
    lambda s: 300 + 150 * (1 - math.exp(-s / 25)), lambda s: 300 + 100 * (s % 20 > 15), lambda s: 300 + 0.5 * s,
    lambda s: 100 + 5 * (s % 20), lambda s: 300.0 + 40 * (s > 100), lambda s: 10 + 0.03 * s,
])
def test_memory_that_is_well(gib: Callable[[int], float]) -> None:
    random = Random(1)
    assert found(MemoryGrowth, memory(lambda s: gib(s) + random.gauss(0, 1))) == []


def test_a_sawtooth_on_a_leak_is_a_leak() -> None:
    random = Random(1)
    data = memory(lambda s: 200 + 2 * s + 60 * (s % 20 > 15) + random.gauss(0, 1))
    assert only(found(MemoryGrowth, data)).raised_step < 120


# --- mismatch


@pytest.mark.parametrize(("key", "value", "words"), [
    ("rollout_corr/kl", -0.2, "KL of trainer to rollout engine is -0.2"),
    ("rollout_corr/chi2_token", 3.0, "chi-squared"),
    ("rollout_corr/rollout_is_mean", 0.3, "mean importance weight is 0.3 and beyond 0.5"),
    ("rollout_corr/rollout_is_std", 1.5, "standard deviation"),
    ("rollout_corr/rollout_is_eff_sample_size", 0.1, "effective share"),
    ("training/rollout_probs_diff_mean", 0.08, "mean probability difference is 0.08"),
])
def test_what_verls_documentation_calls_too_much(key: str, value: float, words: str) -> None:
    data: list[Row] = [(s, {"rollout_corr/kl": 0.001, key: value}) for s in range(1, 12)]
    incident = only(found(RolloutMismatch, data))
    assert (incident.severity, incident.raised_step, incident.first_step) == (Severity.WARNING, 5, 1)
    assert words in incident.reason
    good: dict[str, object] = {"rollout_corr/kl": 0.001}
    now_and_then = [(s, good | ({key: value} if s % 3 else {key: 0.04 if "diff" in key else 0.9 if "kl" not in key else
                                                            0.0})) for s in range(1, 60)]
    assert found(RolloutMismatch, now_and_then) == []


def test_a_slow_drift_is_told_and_noise_is_not() -> None:
    random = Random(2)

    def drift(step: int) -> float:
        return 0.0035 * (1 + 7 * max(0, step - 50) / 200) * math.exp(random.gauss(0, 0.1))

    assert 50 < only(found(RolloutMismatch, made(250, training__rollout_probs_diff_mean=drift))).raised_step <= 150
    still = made(2000, training__rollout_probs_diff_mean=lambda s: 0.0035 * math.exp(random.gauss(0, 0.3)))
    assert found(RolloutMismatch, still) == []


# --- all


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.spec.id)
@pytest.mark.parametrize("name", ["ppo-healthy", "grpo-healthy", "gpu-ppo-hang"])
def test_recorded_runs_that_are_well(kind: type[RolloutMismatch], name: str) -> None:
    assert found(kind, rows(LAB / f"{name}.jsonl")) == []
    assert found(kind, noisy(LAB / f"{name}.jsonl", 1)) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.spec.id)
def test_the_corpus_is_well(kind: type[RolloutMismatch]) -> None:
    for path in sorted(shared("corpus", "runs").glob("*healthy*.jsonl")):
        assert found(kind, rows(path)) == [], path.name
