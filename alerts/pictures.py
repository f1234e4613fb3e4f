"""Draws each detector as it finds something: ``python -m alerts.pictures`` (matplotlib, a development tool).

What is drawn comes from the real source and engine. A picture's metadata holds a digest of its numbers, so that a test
sees without drawing whether a picture is that of the present detector.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from monitor.catalog import metric_of, parse, verl_keys
from monitor.detectors import DETECTORS
from monitor.engine import Engine
from monitor.model import DetectorSpec, Incident, RawStep
from monitor.sources.recording import read_file

REPOSITORY = Path(__file__).parent.parent
FOLDER = Path("docs/runbooks/pictures")
_DEMO, _LAB, _CASES = Path("monitor/demo_runs"), Path("tests/lab"), Path("tests/data/cases")
RECORDINGS = {
    "non_finite": _CASES / "01_nan_onset_as_null.jsonl",
    "no_learning_signal": _LAB / "grpo-dead-reward.jsonl",
    "optimizer_idle": _CASES / "08_dead_update.jsonl",
    "kl_runaway": _DEMO / "ppo-kl-runaway.jsonl",
    "vanishing_policy_gradient": _DEMO / "ppo-kl-runaway.jsonl",
    "advantage_explosion": _DEMO / "rloo-advantage-explosion.jsonl",
    "critic_loss_oscillation": _DEMO / "ppo-critic-swing.jsonl",
    "critic_divergence": _CASES / "09_value_scale.jsonl",
    "gradient_explosion": _LAB / "ppo-fast-to-the-ceiling.jsonl",
    "entropy_explosion": _CASES / "10_entropy_up.jsonl",
    "entropy_collapse": _DEMO / "ppo-kl-runaway.jsonl",
    "response_length": _CASES / "11_length_cap.jsonl",
    "reward_collapse": _CASES / "11_length_cap.jsonl",
    "reward_hacking": _CASES / "12_reward_hack.jsonl",
    "memory_growth": _CASES / "19_ram_creep.jsonl",
    "restart_from_scratch": _CASES / "21_resume_from_zero.jsonl",
}
"""Recorded runs in which each detector finds something; a stall has no steps to draw."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Lines (verl key -> steps in the order of rows, values), the finding, and a digest of all of it."""

    lines: dict[str, tuple[list[int], list[float]]]
    incident: Incident
    digest: str


def drawing(spec: DetectorSpec) -> Drawing:
    """What a detector's picture shows."""
    detector = next(kind for kind in DETECTORS if kind.spec.id == spec.id)
    engine = Engine(make_detectors=lambda _: [detector()])
    series = list(dict.fromkeys((*spec.panel, *(s for group in spec.required for s in group))))
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for event in read_file(REPOSITORY / RECORDINGS[spec.id], run="run"):
        engine.handle(event)
        if isinstance(event, RawStep):
            values = parse(event).values
            for name in series:
                if name in values:
                    steps, numbers = lines.setdefault(name, ([], []))
                    steps.append(event.step)
                    numbers.append(values[name])
    incident = engine.snapshot().runs[0].incidents[0]
    shown = {name: lines[name] for name in _fitting(spec, lines)}
    drawn = {name: [steps, [f"{value:.4g}" for value in values]] for name, (steps, values) in shown.items()}
    found = [incident.raised_step, incident.critical_step, incident.first_step, incident.reason]
    text = json.dumps([drawn, found], sort_keys=True)
    return Drawing(shown, incident, hashlib.sha256(text.encode()).hexdigest()[:16])


def _fitting(spec: DetectorSpec, there: Iterable[str]) -> list[str]:
    """Up to three series that share an axis."""
    logged = [name for name in dict.fromkeys((*spec.panel, *there)) if name in set(there)]
    first = metric_of(logged[0])
    return [name for name in logged if metric_of(name).unit is first.unit][:3]


def draw(spec: DetectorSpec, path: Path) -> None:
    """Write a detector's picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = drawing(spec)
    figure, axes = pyplot.subplots(figsize=(7, 2.6), dpi=80)
    for name, (steps, values) in shown.lines.items():
        axes.plot(range(len(steps)), values, lw=1.4, label=verl_keys(name)[0])
    steps = next(iter(shown.lines.values()))[0]
    incident = shown.incident
    marks = ((incident.raised_step, "tab:orange", "raised"), (incident.critical_step, "tab:red", "critical"))
    for step, colour, word in marks:
        if step is not None:
            place = len(steps) - 1 - steps[::-1].index(step) if step in steps else len(steps) - 1
            axes.axvline(place, color=colour, lw=1.2, ls="--", label=f"{word} at step {step}")
    positive = all(value > 0 for _, values in shown.lines.values() for value in values)
    if metric_of(next(iter(shown.lines))).log and positive:
        axes.set_yscale("log")
    ticks = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks(list(ticks), [str(steps[place]) for place in ticks])
    axes.set_xlabel("step")
    axes.legend(fontsize=7, loc="best")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Description": shown.digest, "Software": None})
    pyplot.close(figure)


def main() -> None:
    """Draw all that have changed."""
    (REPOSITORY / FOLDER).mkdir(parents=True, exist_ok=True)
    for detector in DETECTORS:
        spec = detector.spec
        path = REPOSITORY / FOLDER / f"{spec.id}.png"
        if spec.id in RECORDINGS and not (path.exists() and drawing(spec).digest.encode() in path.read_bytes()):
            draw(spec, path)
            print(f"drawn: {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
