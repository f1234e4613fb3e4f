"""What every detector owes, over all of DETECTORS."""

from __future__ import annotations

import math
import pickle
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.catalog import metric_of, verl_keys
from monitor.detectors import ALL_DETECTORS as DETECTORS
from monitor.detectors import Detector
from monitor.model import DetectorSpec, Observation, Status, Verdict
from tests.helpers import CASES, LAB, REPOSITORY, judge, observation

SERIES = sorted({s for d in DETECTORS for group in (*d.spec.required, d.spec.optional) for s in group})
every_detector = pytest.mark.parametrize("kind", DETECTORS, ids=lambda d: d.spec.id)


@every_detector
def test_specification(kind: type[Detector]) -> None:
    spec = kind.spec
    module = sys.modules[kind.__module__]
    assert module.__name__.endswith(f".{spec.id}"), "one file per detector, named like it"
    for series in (*(s for group in spec.required for s in group), *spec.optional, *spec.panel):
        assert metric_of(series)
        assert verl_keys(series)
    assert all(cause in {d.spec.id for d in DETECTORS} for cause in spec.under)
    assert any("." in word for action in spec.actions for word in action.split()), "actions name verl's keys"
    assert kind.__doc__
    assert "false alarm" in kind.__doc__.lower()
    assert ">>>" in kind.__doc__
    for field in fields(kind.settings_type):
        assert field.metadata.get("unit"), f"{field.name} has no unit"
        assert field.metadata.get("help", "").endswith("."), f"{field.name} has no help"


def test_a_specification_with_an_empty_field_fails_at_import() -> None:
    for field in fields(DetectorSpec):
        if field.name not in ("optional", "under", "facts", "machine", "rise_steps", "clear_steps"):
            empty: object = () if field.name in ("required", "diagnosis", "actions", "panel") else ""
            with pytest.raises(ValueError, match=field.name):
                replace(DETECTORS[0].spec, **{field.name: empty})  # type: ignore[arg-type]


@every_detector
def test_the_docstring_example_holds(kind: type[Detector]) -> None:
    import doctest

    module: ModuleType = sys.modules[kind.__module__]
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@every_detector
def test_same_rows_same_verdicts_through_pickle(kind: type[Detector]) -> None:
    path = LAB / "ppo-critic-swing.jsonl"
    once = judge(kind(), path)
    detector, twice = kind(), []
    from monitor.catalog import parse
    from monitor.model import RawStep
    from tests.helpers import rows

    for step, data in rows(path):
        detector = pickle.loads(pickle.dumps(detector))
        verdict = detector.update(parse(RawStep("run", step, 0.0, data)))
        if verdict is not None:
            twice.append((step, verdict))
    assert repr(once) == repr(twice)


def _values(step: int, noise: float) -> dict[str, float]:
    return {series: math.sin(step * (i + 1)) * noise + i + 1.0 for i, series in enumerate(SERIES)}


@every_detector
def test_memory_does_not_grow_with_the_run(kind: type[Detector]) -> None:
    def size_after(steps: int) -> int:
        detector = kind()
        for step in range(steps):
            detector.update(observation(step, _values(step, 0.1), now=float(step)))
        return len(pickle.dumps(detector))

    assert size_after(6000) <= size_after(600) * 1.05 + 1_000  # a window may be between half and wholly full
    assert size_after(600) < 40_000


@every_detector
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_are_taken_and_the_input_is_left_alone(kind: type[Detector], data: st.DataObject) -> None:
    detector = kind()
    rows = data.draw(st.lists(st.tuples(
        st.integers(0, 50), st.floats(0, 1e6),
        st.dictionaries(st.sampled_from(SERIES), st.floats(allow_nan=True, allow_infinity=False), max_size=8)),
        max_size=40))
    for step, now, values in rows:
        row = Observation("run", step, now, values)
        before = dict(values)
        verdict = detector.update(row)
        assert repr(before) == repr(values)
        for judged in (verdict, detector.tick(now)):
            _check(judged)


LOCAL = REPOSITORY / "tests" / "lab"


def _check(verdict: Verdict | None) -> None:
    if verdict is None:
        return
    assert not math.isnan(verdict.score)
    assert verdict.score >= 0
    if verdict.status >= Status.WARNING:
        assert verdict.score >= 1.0
        assert len(verdict.reason) > 20
        assert verdict.reason.endswith(".")
        assert verdict.since_step is not None
        assert verdict.signal
    else:
        assert verdict.score < 1.0


@pytest.mark.parametrize("path", [
    LAB / "ppo-kl-runaway.jsonl", LAB / "ppo-critic-swing.jsonl", LAB / "rloo-advantage-explosion.jsonl",
    LAB / "ppo-skipped-updates.jsonl", LOCAL / "grpo-dead-reward.jsonl", LOCAL / "grpo-unlearning.jsonl",
    CASES / "08_dead_update.jsonl", CASES / "09_value_scale.jsonl", CASES / "10_entropy_up.jsonl",
    CASES / "11_length_cap.jsonl", CASES / "12_reward_hack.jsonl", CASES / "19_ram_creep.jsonl",
], ids=lambda path: path.stem)
@pytest.mark.parametrize("damage", ["nan rows before", "gaps", "steps go back"])
def test_bad_rows_never_hide_a_later_fault(path: Path, damage: str) -> None:
    from monitor.engine import Engine
    from tests.helpers import feed, rows

    data = rows(path)
    engine = Engine()
    feed(engine, data)
    expected = {i.detector for i in engine.snapshot().runs[0].incidents} - {"vanishing_policy_gradient"}
    assert expected
    if damage == "nan rows before":
        nothing: dict[str, object] = dict.fromkeys(data[5][1])
        data = data[:1] + [(step, nothing) for step in range(1, 6)] + [(s + 5, d) for s, d in data[1:]]
    elif damage == "gaps":
        # Validation may come at every seventh step, too, and is left in.
        data = [(s, d if s % 7 else {k: v for k, v in d.items() if k.startswith(("timing", "val"))}) for s, d in data]
    else:
        data = data[:12] + data[6:]
    engine = Engine()
    feed(engine, data)
    found = {i.detector for i in engine.snapshot().runs[0].incidents}
    assert found >= expected


def test_contributing_and_design_know_every_detector() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    for kind in DETECTORS:
        assert f"`{kind.spec.id}`" in changelog
