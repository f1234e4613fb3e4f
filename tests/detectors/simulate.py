"""Synthetic runs: a healthy one in verl's keys, and gentle faults laid over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

Row = dict[str, float]
Fault = Callable[[Row, float, Random], None]
"""Changes a row; the number is the share of the fault's course that has run, 0 to 1."""


class Wander:
    """Noise that remembers: AR(1) with unit variance, and now and then a large value."""

    def __init__(self, random: Random, memory: float = 0.5) -> None:
        self._random, self._memory, self._state = random, memory, 0.0

    def __call__(self) -> float:
        shock = self._random.gauss(0, 1) * (3.0 if self._random.random() < 0.01 else 1.0)
        self._state = self._memory * self._state + math.sqrt(1 - self._memory**2) * shock
        return self._state


def healthy(seed: int, steps: int, *, critic: bool = True, learns: bool = True, length: float = 400.0) -> Iterator[Row]:
    """Rows of a run that is well: the reward climbs and levels off, KL and entropy follow it."""
    random = Random(seed)
    noise = {name: Wander(random) for name in ("reward", "kl", "step_kl", "entropy", "loss", "grad", "length", "value",
                                               "time", "diff", "ev", "clip")}
    for number in range(1, steps + 1):
        learned = 1 - math.exp(-number / 150) if learns else 0.0
        n = {name: wander() for name, wander in noise.items()}
        mean = min(1.0, 0.25 + 0.45 * learned + 0.02 * n["reward"])
        tokens = length * (1 + 0.15 * learned + 0.03 * n["length"])
        generate = 20.0 * (tokens / length) * (1 + 0.04 * abs(n["time"]))
        row = {
            "actor/pg_loss": 0.01 * n["loss"], "actor/ppo_kl": 3e-4 * (1 + 0.4 * n["step_kl"]),
            "actor/kl_loss": (0.002 + 0.05 * learned) * math.exp(0.15 * n["kl"]),
            "actor/entropy": (0.5 - 0.25 * learned) * math.exp(0.04 * n["entropy"]),
            "actor/grad_norm": 0.3 * math.exp(0.25 * n["grad"]), "actor/pg_clipfrac": 0.002,
            "actor/lr": 1e-6, "critic/score/mean": mean, "critic/score/max": 1.0, "critic/score/min": 0.0,
            "critic/rewards/mean": mean, "critic/rewards/max": 1.0, "critic/rewards/min": 0.0,
            "critic/advantages/mean": 0.0, "critic/advantages/max": 2.2 + 0.1 * n["value"],
            "critic/advantages/min": -2.1 + 0.1 * n["ev"], "critic/returns/mean": mean, "critic/returns/max": 1.0,
            "critic/returns/min": 0.0, "response_length/mean": tokens, "response_length/max": min(2048.0, 4 * tokens),
            "response_length/min": 0.1 * tokens, "response_length/clip_ratio": max(0.0, 0.02 + 0.006 * n["clip"]),
            "timing_s/gen": generate, "timing_s/update_actor": 9.0 * (1 + 0.03 * n["time"]), "timing_s/reward": 2.0,
            "timing_s/step": generate + 14.0 + 0.3 * n["time"],
            "perf/throughput": 256 * tokens / (generate + 14.0), "perf/total_num_tokens": 2048 * tokens,
            "training/rollout_probs_diff_mean": 0.0035 * math.exp(0.1 * n["diff"]),
            "actor/perf/cpu_memory_used_gb": 310.0 + 2.0 * n["time"], "training/global_step": float(number),
            "actor/perf/max_memory_reserved_gb": 61.0, "actor/perf/max_memory_allocated_gb": 48.0 + n["length"],
        }
        if critic:
            row |= {"critic/vf_loss": 0.05 * math.exp(0.2 * n["value"]) * (1 - 0.5 * learned),
                    "critic/vf_explained_var": 0.1 + 0.5 * learned + 0.05 * n["ev"],
                    "critic/values/mean": mean + 0.02 * n["value"], "critic/values/max": 1.1, "critic/values/min": -0.1,
                    "critic/grad_norm": 1.5 * math.exp(0.3 * n["ev"])}
        if number % 20 == 0:
            row["val-core/math/acc/mean@1"] = min(1.0, mean + 0.01 * n["clip"])
            row["timing_s/testing"] = 60.0
        yield row


def faulty(seed: int, steps: int, onset: int, course: int, fault: Fault, **options: bool) -> Iterator[tuple[int, Row]]:
    """Steps and rows of a healthy run over which a fault is laid from ``onset`` on, complete after ``course`` steps."""
    random = Random(seed + 1)
    for step, row in enumerate(healthy(seed, steps, **options), 1):
        if step > onset:
            fault(row, min(1.0, (step - onset) / course), random)
        yield step, row


def between(start: float, end: float, share: float) -> float:
    """Geometric way from start to end."""
    return float(start * (end / start) ** share)


def _scale(*keys: str, by: float) -> Fault:
    def fault(row: Row, share: float, random: Random) -> None:
        for key in keys:
            if key in row:
                row[key] *= between(1.0, by, share)
    return fault


def kl_grows(row: Row, share: float, random: Random) -> None:
    """KL to the reference from 0.02 to 4.5."""
    row["actor/kl_loss"] = between(0.02, 4.5, share) * math.exp(random.gauss(0, 0.1))


def critic_diverges(row: Row, share: float, random: Random) -> None:
    """Value loss times 5, explained variance down to -0.5."""
    row["critic/vf_loss"] = 0.04 * between(1.0, 5.0, share) * math.exp(random.gauss(0, 0.2))
    row["critic/vf_explained_var"] += share * (-0.5 - row["critic/vf_explained_var"])


def slower(row: Row, share: float, random: Random) -> None:
    """Step time times 2.5; the reward stage is what grows."""
    extra = row["timing_s/step"] * 1.5 * share
    row["timing_s/reward"] += extra
    row["timing_s/step"] += extra
    row["perf/throughput"] /= 1 + 1.5 * share


def truncated(row: Row, share: float, random: Random) -> None:
    """Truncation from 2 % to 65 %."""
    row["response_length/clip_ratio"] = 0.02 + 0.63 * share + random.gauss(0, 0.01)
    row["response_length/mean"] *= 1 + share


def longer(row: Row, share: float, random: Random) -> None:
    """Length times 3.5, with the reward following it."""
    factor = between(1.0, 3.5, share)
    for key in ("response_length/mean", "response_length/max", "timing_s/gen", "perf/total_num_tokens"):
        row[key] *= factor
    for key in ("critic/score/mean", "critic/rewards/mean"):
        row[key] += 0.25 * share


def spikes(row: Row, share: float, random: Random) -> None:
    """Seven gradient spikes of 40 to 160 times."""
    if int(share * 400) % 55 == 27:
        row["actor/grad_norm"] *= random.uniform(40, 160)


def entropy_falls(row: Row, share: float, random: Random) -> None:
    """Entropy from 0.6 to 0.006."""
    row["actor/entropy"] = between(0.6, 0.006, share) * math.exp(random.gauss(0, 0.04))


GENTLE: dict[str, tuple[Fault, int, tuple[str, ...], dict[str, bool]]] = {
    "KL 0.02 to 4.5 over 400 steps": (kl_grows, 400, ("kl_runaway", "vanishing_policy_gradient"), {"learns": False}),
    "value loss times 5 over 150 steps": (critic_diverges, 150, ("critic_divergence",), {}),
    "step time times 2.5 over 150 steps": (slower, 150, ("throughput_regression",), {}),
    "truncation 2 % to 65 % in 75 steps": (truncated, 75, ("response_length",), {}),
    "length times 3.5 over 200 steps": (longer, 200, ("response_length", "reward_hacking"), {}),
    "seven gradient spikes in 400 steps": (spikes, 400, ("gradient_explosion",), {}),
    "entropy 0.6 to 0.006 over 400 steps": (entropy_falls, 400, ("entropy_collapse",), {"learns": False}),
}
"""Fault, its course in steps, detectors of which one must report it before half of the course, options of the run."""
