"""`verl-monitor compare`: what is called a change, what is not, and what is told of both runs."""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from monitor.compare import add_arguments, interval, rows, run
from monitor.compare.interval import Statistic, block_length, compare, spread, student
from tests.helpers import LAB, shared

NOISE = random.Random(7)


def written(path: Path, lines: Iterable[tuple[int, Mapping[str, float | None]]]) -> Path:
    """A log as verl's file logger leaves it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": {"actor/pg_loss": 0.1, **data}}) + "\n"
                            for step, data in lines))
    return path


def steps(seconds: Iterable[float], first: int = 1) -> list[tuple[int, Mapping[str, float | None]]]:
    return [(first + i, {"timing_s/step": value}) for i, value in enumerate(seconds)]


def noisy(level: float, n: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [level * chance.lognormvariate(0, 0.05) * (3 if chance.random() < 0.05 else 1) for _ in range(n)]


def ran(*options: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(option) for option in options]))


def compared(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    assert ran(*options, "--format", "json") == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def figure(out: dict[str, Any], series: str, statistic: str = "") -> dict[str, Any]:
    found: list[dict[str, Any]] = [item for item in out["figures"] if item["series"] == series
                                   and statistic in ("", item["statistic"])]
    assert len(found) == 1
    return found[0]


STEP = "stage_duration_seconds/step"


# --- a change is found, and none where there is none


def test_a_fifth_less_is_found_as_a_fifth_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = noisy(10, 80, 1)
    a = written(tmp_path / "a.jsonl", steps(slow))
    exact = written(tmp_path / "exact.jsonl", steps(0.8 * value for value in slow))
    other = written(tmp_path / "other.jsonl", steps(noisy(8, 80, 3)))
    same = figure(compared(capsys, a, exact), STEP)
    assert (same["change"], same["low"], same["high"]) == pytest.approx((-0.2, -0.2, -0.2))
    apart = figure(compared(capsys, a, other), STEP)
    assert -0.25 < apart["low"] < -0.2 < apart["high"] < -0.15
    assert (same["clear"], apart["clear"], apart["relative"]) == (True, True, True)
    assert apart["steps"] == 79  # the first one compiles


@pytest.mark.parametrize("name", ["grpo-healthy", "ppo-critic-swing"])
def test_a_run_does_not_differ_from_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = compared(capsys, LAB / f"{name}.jsonl", LAB / f"{name}.jsonl")
    assert len(out["figures"]) > 15
    assert [item for item in out["figures"] if item["clear"] or item["change"] != 0] == []
    assert out["only_in_a"] == out["only_in_b"] == []


@pytest.mark.parametrize("n", [10, 40, 120])
def test_noise_is_rarely_called_a_change(n: int) -> None:
    clear = sum(compare(noisy(10, n, seed), noisy(10, n, seed + 1000), Statistic.MEDIAN).clear for seed in range(60))
    assert clear <= 9


def test_a_change_below_the_floor_is_not_clear() -> None:
    a = noisy(10, 60, 3)
    small = compare(a, [1.015 * value for value in a], Statistic.MEDIAN)
    assert small.low > 0
    assert not small.clear
    assert compare(a, [1.025 * value for value in a], Statistic.MEDIAN).clear


def test_what_moves_both_runs_alike_is_no_noise() -> None:
    a = [0.01 * step + NOISE.gauss(0, 0.02) for step in range(100)]
    b = [0.01 * step + 0.05 + NOISE.gauss(0, 0.02) for step in range(100)]
    change = compare(a, b, Statistic.MEAN)
    assert change.clear
    assert change.high - change.low < 0.06 < spread(a) / 4


def test_correlated_steps_have_a_wider_interval() -> None:
    def walk(seed: int) -> list[float]:
        chance, level, out = random.Random(seed), 0.0, []
        for _ in range(100):
            level = 0.8 * level + chance.gauss(0, 0.6)
            out.append(10 + level)
        return out

    a, b = walk(1), walk(2)
    shuffled = random.Random(0).sample(range(100), 100)
    mixed = compare([a[i] for i in shuffled], [b[i] for i in shuffled], Statistic.MEAN)
    ordered = compare(a, b, Statistic.MEAN)
    assert ordered.change == pytest.approx(mixed.change)
    assert ordered.high - ordered.low > 1.5 * (mixed.high - mixed.low)


def test_the_interval_is_the_same_each_time() -> None:
    a, b = noisy(10, 50, 4), noisy(11, 50, 5)
    assert compare(a, b, Statistic.MEDIAN) == compare(a, b, Statistic.MEDIAN)


def test_a_long_run_is_pooled_and_gets_the_same_answer() -> None:
    a, b = noisy(10, 5000, 6), noisy(9, 5000, 7)
    change = compare(a, b, Statistic.MEDIAN)
    assert -0.11 < change.low < change.change < change.high < -0.09
    assert compare(a, [2 * value for value in a], Statistic.SPREAD).low > 0.5


def test_change_of_what_is_near_zero_is_absolute() -> None:
    around = [NOISE.gauss(0.0, 1e-3) for _ in range(40)]
    change = compare(around, [value + 0.3 for value in around], Statistic.MEAN)
    assert (change.relative, change.clear) == (False, True)
    assert change.change == pytest.approx(0.3)
    nothing = compare([0.0] * 40, [0.3] * 40, Statistic.MEAN)
    assert (nothing.relative, nothing.clear) == (False, True)
    assert (nothing.low, nothing.high) == pytest.approx((0.3, 0.3))
    assert compare([-1.0] * 40, [-2.0] * 40, Statistic.MEAN).change == -1.0


def test_what_cannot_be_negative_does_not_fall_by_more_than_all() -> None:
    seldom = [0.0] * 4 + [1.0] * 4
    assert compare([1.0] * 8, seldom, Statistic.MEAN).low == -1.0
    assert compare(seldom, [0.0] * 8, Statistic.MEAN).low == -0.5


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 2.353), (5, 2.015), (10, 1.812), (30, 1.697), (1e6, 1.645)])
def test_students_quantile_is_that_of_the_tables(freedom: float, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=0.007)


def test_blocks_grow_with_length_and_with_correlation() -> None:
    white = [NOISE.random() for _ in range(125)]
    assert block_length([1.0] * 8) == 2
    assert 5 <= block_length(white) <= 8
    assert block_length([float(i) for i in range(125)]) == 31


def test_spread_is_that_of_a_normal_distribution_and_robust() -> None:
    values = [NOISE.gauss(0.3, 0.05) for _ in range(4000)]
    assert spread(values) == pytest.approx(0.05, rel=0.05)
    assert spread([*values, 1e6]) == pytest.approx(spread(values), rel=0.01)


# --- which steps and values take part


def test_figures_are_of_common_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = [(i, {"critic/rewards/mean": 0.1 * i}) for i in range(1, 41)]
    out = compared(capsys, written(tmp_path / "a.jsonl", reward), written(tmp_path / "b.jsonl", reward[:20]))
    assert (out["common_steps"], out["first_step"], out["last_step"]) == (20, 1, 20)
    both = figure(out, "reward/mean")
    assert both["a"] == both["b"] == pytest.approx(1.05)
    narrow = compared(capsys, tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--from", 5, "--to", 14)
    assert figure(narrow, "reward/mean")["a"] == pytest.approx(0.95)
    assert (narrow["common_steps"], narrow["first_step"], narrow["last_step"]) == (10, 5, 14)


def test_runs_without_a_common_step_have_figures_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = compared(capsys, written(tmp_path / "a.jsonl", steps([10.0] * 20)),
                   written(tmp_path / "b.jsonl", steps([5.0] * 30, first=21)))
    step = figure(out, STEP)
    assert (step["change"], step["low"], step["clear"], step["paired"]) == (-0.5, None, False, False)
    assert (out["common_steps"], out["first_step"]) == (0, None)
    assert any("no step in common" in note for note in out["notes"])


@pytest.mark.parametrize(("n", "known"), [(8, False), (9, True)])
def test_a_short_run_has_no_interval(n: int, known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of nine steps eight are left, for the first one compiles."""
    out = compared(capsys, written(tmp_path / "a.jsonl", steps([10.0] * n)),
                   written(tmp_path / "b.jsonl", steps([5.0] * n)))
    step = figure(out, STEP)
    assert step["change"] == -0.5
    assert (step["low"] is not None, step["clear"]) == (known, known)
    ran(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (f"({n - 1} steps)" in capsys.readouterr().out) is not known


def test_few_common_steps_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = compared(capsys, written(tmp_path / "a.jsonl", steps([10.0] * 5)),
                   written(tmp_path / "b.jsonl", steps([5.0] * 5)))
    assert out["notes"] == ["fewer than 8 common steps: figures without an interval"]


def test_values_that_are_not_finite_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = noisy(10, 30, 8)
    holes = [(i + 1, {"timing_s/step": value, "actor/ppo_kl": None if i % 3 == 0 else 0.1})
             for i, value in enumerate(good)]
    whole = [
        (i + 1, {"timing_s/step": value, "actor/ppo_kl": 5.0 if i % 3 == 0 else 0.1}) for i, value in enumerate(good)]
    out = compared(capsys, written(tmp_path / "a.jsonl", holes), written(tmp_path / "b.jsonl", whole))
    kl = figure(out, "kl_divergence/update", "mean")
    assert (kl["a"], kl["b"], kl["steps"], kl["clear"]) == (pytest.approx(0.1), pytest.approx(0.1), 20, False)
    assert out["notes"] == ["A: KL update: 10 values that are not finite take no part"]
    assert figure(out, STEP)["steps"] == 29


def test_a_metric_of_one_run_alone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a.jsonl", [(i, {"timing_s/step": 1.0, "timing_s/ref": 1.0, "perf/mfu/actor": 0.0})
                                       for i in range(1, 20)])
    b = written(tmp_path / "b.jsonl", [(i, {"timing_s/step": 1.0, "val-core/x/acc/mean@1": 1.0, "perf/mfu/actor": 0.0})
                                       for i in range(1, 20)])
    out = compared(capsys, a, b)
    assert (out["only_in_a"], out["only_in_b"]) == (["time of ref"], ["validation x acc mean@1"])
    assert out["zero_in_both"] == ["MFU actor"]
    assert {item["series"] for item in out["figures"]} == {STEP}
    assert ran(a, b) == 0
    text = capsys.readouterr().out
    assert "Only in A: time of ref\n" in text
    assert "Only in B: validation x acc mean@1\n" in text


def test_steps_after_a_restart_replace_what_was_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = steps([100.0] + [10.0] * 19) + steps([100.0] + [4.0] * 19, first=11)
    out = compared(capsys, written(tmp_path / "a.jsonl", again), written(tmp_path / "b.jsonl", steps([4.0] * 30)))
    assert figure(out, STEP)["steps"] == 28  # without 1 and 11, each the first of a start
    assert figure(compared(capsys, tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--from", 11), STEP)["a"] == 4.0


def test_rows_are_bounded_and_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_ROWS", 20)
    log = written(tmp_path / "a.jsonl", steps([1.0] * 30))
    out = compared(capsys, log, log)
    assert out["a"]["steps"] == out["common_steps"] == 20
    assert "A: figures are of the first 20 rows alone" in out["notes"]


def test_validation_leaves_out_the_model_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "a.jsonl", [(0, {"val-core/x/acc/mean@1": 0.0})] + [
        (i, {"val-core/x/acc/mean@1": 0.5 + i / 100, "val-aux/x/y/mean@1": 1.0}) for i in (10, 20)])
    out = compared(capsys, log, log)
    assert [(item["statistic"], item["a"]) for item in out["figures"]] == [
        ("mean", pytest.approx(0.65)), ("last", pytest.approx(0.7))]


# --- real runs, formats, findings


def test_a_runaway_shows_in_figures_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    out = compared(capsys, LAB / "ppo-healthy.jsonl", LAB / "ppo-kl-runaway.jsonl")
    for statistic in ("mean", "spread"):
        kl = figure(out, "kl_divergence/reference", statistic)
        assert (kl["clear"], kl["unit"]) == (True, "nats")
        assert kl["low"] > 0
    finding = next(item for item in out["findings"] if item["detector"] == "kl_runaway")
    assert finding["a"] is None
    assert (finding["b"]["severity"], finding["b"]["last_step"]) == ("critical", 100)
    early = compared(capsys, LAB / "ppo-healthy.jsonl", LAB / "ppo-kl-runaway.jsonl", "--to", 3)
    assert early["findings"] == []


def test_console_and_file_log_of_a_run_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    lab = shared("corpus", "lab")
    for other in ("rloo-advantage-explosion.console.log", "rloo-advantage-explosion.tensorboard"):
        out = compared(capsys, lab / "rloo-advantage-explosion.jsonl", lab / other)
        assert out["common_steps"] == 100
        assert len(out["figures"]) > 15
        assert [item for item in out["figures"] if item["clear"]] == []
        assert all(item["a"] == pytest.approx(item["b"], rel=1e-4) for item in out["figures"])
        assert out["only_in_a"] == out["only_in_b"] == []


def test_the_table_fits_a_hundred_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {f"val-core/{'a-very-long-name-of-a-data-set' * 3}/reward/best@32/mean": 0.5}
    b = written(tmp_path / "b.jsonl", [(i, long | {"timing_s/step": 1.0}) for i in range(1, 30)])
    for a, other in ((LAB / "ppo-healthy.jsonl", LAB / "ppo-kl-runaway.jsonl"), (b, b)):
        assert ran(a, other) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines[2:]) <= 100
        assert any(line.startswith("  time of step  ") for line in lines)


def test_text_tells_change_interval_and_since_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(LAB / "ppo-healthy.jsonl", LAB / "ppo-kl-runaway.jsonl") == 0
    text = capsys.readouterr().out
    assert "Over the 100 steps that both have (1 to 100)" in text
    line = next(line for line in text.splitlines() if "throughput per GPU" in line)
    assert re.search(r"tokens/s +\d+ tokens/s +\+[\d.]+ % +\+[\d.]+ to \+[\d.]+ %  clear$", line)
    assert "KL runaway (kl_runaway)\n    A  -\n    B  critical, since step 5, until step 100" in text


# --- directories, names, errors


def test_a_directory_is_one_run_or_is_asked_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    log = written(one / "x.jsonl", steps([1.0] * 10))
    written(two / "y.jsonl", steps([2.0] * 10))
    written(two / "z.jsonl", steps([3.0] * 10))
    (two / "other.jsonl").write_text('{"something": "else"}\n')
    assert compared(capsys, one, log)["a"]["run"] == "x"
    assert ran(one, two) == 3
    error = capsys.readouterr().err
    assert "expected one run, got 2: y, z; choose with --run-b NAME" in error
    out = compared(capsys, one, two, "--run-b", "z")
    assert (out["b"]["run"], figure(out, STEP)["change"]) == ("z", 2.0)
    assert ran(two, one, "--run-a", "nobody") == 3
    assert "expected a run named 'nobody' (--run-a), got y, z" in capsys.readouterr().err


def test_two_logs_of_one_run_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file log has the longer part; the console's lines fill in what it lacks."""
    written(tmp_path / "run" / "x.jsonl", steps(noisy(5, 20, 9)))
    (tmp_path / "run" / "x.log").write_text("".join(
        f"step:{i} - timing_s/step:100.0 - actor/pg_loss:0.1 - perf/throughput:7.5\n" for i in range(1, 11)))
    out = compared(capsys, tmp_path / "run", tmp_path / "run")
    assert (out["a"]["run"], len(out["a"]["files"]), out["a"]["steps"]) == ("x", 2, 20)
    assert 4 < figure(out, STEP)["a"] < 6
    assert (figure(out, "throughput_tokens_per_second")["a"], figure(out, STEP)["steps"]) == (7.5, 19)


@pytest.mark.parametrize(("options", "expected"), [
    (("none.jsonl", "a.jsonl"), "no such file"),
    (("a.jsonl", "empty.jsonl"), "empty.jsonl: expected rows of training steps, got none"),
    (("a.jsonl", "a.jsonl", "--from", "9", "--to", "4"), "--to: expected a step from 9 (--from) on, got 4"),
    (("a.jsonl", "a.jsonl", "--from", "90"), "expected a metric that both runs log in these steps, got none"),
    (("a.jsonl", "a.jsonl", "--picture", "a.bmp"), "expected a file ending in .svg or .png, got 'a.bmp'"),
    (("a.jsonl", "a.jsonl", "--picture", "no/such/a.png"), "no/such/a.png: No such file or directory"),
])
def test_errors_say_what_was_expected(options: tuple[str, ...], expected: str, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if "no/such/a.png" in options:
        pytest.importorskip("matplotlib")
    written(tmp_path / "a.jsonl", steps([1.0] * 10))
    (tmp_path / "empty.jsonl").touch()
    assert ran(*options) == 3
    out = capsys.readouterr()
    assert expected in out.err
    assert out.err.startswith("verl-monitor: ")
    assert out.out == ""


# --- the picture


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn_and_the_same_each_time(suffix: str, magic: bytes, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    strange = tmp_path / "a $x^{ 漢字 _b.jsonl"
    shutil.copy(LAB / "ppo-healthy.jsonl", strange)
    first, second = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
    for path in (first, second):
        assert ran(strange, LAB / "ppo-kl-runaway.jsonl", "--picture", path) == 0
    assert first.read_bytes().startswith(magic)
    assert first.stat().st_size > 20_000
    assert first.read_bytes() == second.read_bytes()


def test_a_picture_of_little_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = written(tmp_path / "a.jsonl", [(i, {"critic/rewards/mean": 0.5}) for i in (1, 2)])
    assert ran(log, log, "--picture", tmp_path / "x.svg") == 0
    assert (tmp_path / "x.svg").read_text().rstrip().endswith("</svg>")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log = LAB / "grpo-healthy.jsonl"
    assert ran(log, log, "--picture", tmp_path / "x.svg") == 3
    assert "pip install 'verl-monitor[pictures]'" in capsys.readouterr().err
    assert ran(log, log) == 0


def test_level_and_floor_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(LAB / "grpo-healthy.jsonl", LAB / "grpo-healthy.jsonl") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{interval.LEVEL:.0%} interval" in text
    assert f"beyond {interval.FLOOR:.0%}" in text
