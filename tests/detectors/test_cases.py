"""Group A of the public bug reports, all detectors together: what must fire fires and says so; the rest is silent."""

from __future__ import annotations

import pytest

from monitor.model import Severity
from monitor.replay import replay
from tests.helpers import CASES

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING
MUST_FIRE: dict[str, tuple[str, Severity, int, str]] = {  # detector, severity, step at the latest, words
    "01_nan_onset_as_null": ("non_finite", CRITICAL, 21, "actor/pg_loss, actor/grad_norm"),
    "01_nan_onset_bare_tokens": ("non_finite", CRITICAL, 21, "the policy has diverged"),
    "02_critic_nan_as_null": ("non_finite", CRITICAL, 1, "the critic has diverged"),
    "02_critic_nan_step1": ("non_finite", CRITICAL, 1, "the critic has diverged"),
    "04_kl_runaway_flat_reward": ("kl_runaway", CRITICAL, 36, "the policy drifts without learning"),
    "07_all_zero": ("no_learning_signal", CRITICAL, 8, "The reward is 0 for every answer"),
    "07_zero_group_std": ("no_learning_signal", CRITICAL, 8, "all answers to a prompt tie"),
    "08_dead_update": ("optimizer_idle", CRITICAL, 5, "exactly 0"),
    "09_value_scale": ("critic_divergence", CRITICAL, 30, "scale of returns"),
    "09_vf_oscillation": ("critic_loss_oscillation", CRITICAL, 10, "swings between"),
    "10_entropy_down": ("entropy_collapse", CRITICAL, 27, "Entropy fell from"),
    "10_entropy_up": ("entropy_explosion", CRITICAL, 27, "Entropy"),
    "11_length_cap": ("response_length", CRITICAL, 23, "cut at the limit"),
    "12_reward_hack": ("reward_hacking", CRITICAL, 25, "what is rewarded is no longer what is wanted"),
    "19_ram_creep": ("memory_growth", WARNING, 58, "without levelling off; at this pace it has doubled near step"),
    "21_resume_from_zero": ("restart_from_scratch", WARNING, 1, "after it had reached step 35"),
}
MUST_STAY_QUIET = (
    "00_healthy_grpo", "00_healthy_ppo", "05_benign_loss_follows_kl", "12_not_a_hack", "16_slow_but_alive",
    "21_resume_ok_replay", "27_truncate_part1", "27_truncate_part2", "31_nul_prefix", "32_bad_middle_line",
    "32_half_last_line")
ELSEWHERE = {"36_label_churn"}  # names, not failures: tests/test_exporter.py


@pytest.mark.parametrize("name", MUST_FIRE)
def test_what_must_fire_fires_and_says_what_it_is(name: str) -> None:
    detector, severity, by, words = MUST_FIRE[name]
    (view,) = replay(CASES / f"{name}.jsonl")
    (incident,) = [i for i in view.incidents if i.detector == detector]
    told = incident.critical_step if severity is CRITICAL else incident.raised_step
    assert incident.severity is severity
    assert told is not None
    assert told <= by
    assert words in incident.reason


@pytest.mark.parametrize("name", MUST_STAY_QUIET)
def test_what_must_stay_quiet_is_silent(name: str) -> None:
    (view,) = replay(CASES / f"{name}.jsonl")
    assert view.incidents == ()


def test_cases_7_and_8_are_told_apart() -> None:
    for name, other in (("07_all_zero", "optimizer_idle"), ("07_zero_group_std", "optimizer_idle"),
                        ("08_dead_update", "no_learning_signal")):
        assert other not in {i.detector for i in replay(CASES / f"{name}.jsonl")[0].incidents}


def test_every_fixture_is_in_a_list() -> None:
    there = {path.stem for path in CASES.glob("*.jsonl")}
    assert there == {*MUST_FIRE, *MUST_STAY_QUIET, *ELSEWHERE}
