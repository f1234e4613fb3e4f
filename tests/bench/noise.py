"""`make noise`: runs of 10,000 steps of nothing but noise, 200 seeds; no finding may be critical."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from monitor.engine import Engine
from monitor.model import RawStep, Severity
from tests.detectors.simulate import healthy

STEPS, SEEDS = 10_000, 200


def judge(seed: int, steps: int = STEPS) -> list[tuple[str, str, int, str]]:
    """Findings on one run: detector, severity, step, reason."""
    engine = Engine()
    for step, row in enumerate(healthy(seed, steps, critic=seed % 2 == 0, learns=False), 1):
        engine.handle(RawStep("run", step, 40.0 * step, row))
    return [(i.detector, i.severity.value, i.raised_step, i.reason) for i in engine.snapshot().runs[0].incidents]


def main() -> int:
    """Judge all seeds and print what was found; exit status 1 for a critical finding."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [incident for incidents in pool.map(judge, range(SEEDS)) for incident in incidents]
    counts = Counter((detector, severity) for detector, severity, _, _ in found)
    print(f"{SEEDS} runs of {STEPS:,} steps of noise: {sum(counts.values())} findings")
    for (detector, severity), count in sorted(counts.items()):
        example = next(i for i in found if i[:2] == (detector, severity))
        print(f"  {detector} {severity}: {count}; such as step {example[2]}: {example[3]}")
    return int(any(severity == Severity.CRITICAL.value for _, severity in counts))


if __name__ == "__main__":
    sys.exit(main())
