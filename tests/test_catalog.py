"""The catalogue: one name per metric, base units, and values that never cost their row."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.catalog import (
    BY_NAME,
    METRICS,
    label_map,
    metric_of,
    nonfinite_kind,
    parse,
    resolve,
    to_number,
    verl_keys,
)
from monitor.metric import NonFinite
from monitor.model import RawStep
from tests.helpers import CASES, LAB, rows, shared

GUIDE_NAMES = {"policy_loss", "kl_divergence"}  # fixed by the guide, without a unit at their end


def _values(data: dict[str, object]) -> dict[str, float]:
    return dict(parse(RawStep("run", 1, 0.0, data)).values)


@pytest.mark.parametrize(
    ("key", "series"),
    [
        ("actor/pg_loss", "policy_loss"),
        ("actor/ppo_kl", "kl_divergence/update"),
        ("actor/kl_loss", "kl_divergence/reference"),
        ("actor/reward_kl_penalty", "kl_divergence/reference"),
        ("critic/kl", "kl_divergence/reference"),
        ("rollout_corr/kl", "kl_divergence/rollout"),
        ("actor/entropy", "entropy_nats"),
        ("actor/entropy_loss", "entropy_nats"),
        ("critic/score/mean", "score/mean"),
        ("timing_s/gen", "stage_duration_seconds/gen"),
        ("timing/gen", "stage_duration_seconds/gen"),
        ("perf/time_per_step", "stage_duration_seconds/step"),
        ("timing_s/agent_loop/num_preempted/max", "agent_loop/num_preempted|max"),
        ("timing_s/agent_loop/slowest/response_length", "agent_loop/response_length|slowest"),
        ("timing_s/agent_loop/generate_sequences/max", "stage_duration_seconds/agent_loop/generate_sequences/max"),
        ("val-core/openai/gsm8k/acc/mean@8", "validation_score/openai/gsm8k|acc|mean@8|core"),
        ("val-aux/a/b/reward/best@2/std", "validation_score/a/b|reward|best@2/std|aux"),
        ("val/test_score/openai/gsm8k", "validation_score/openai/gsm8k|score|mean|core"),
        ("val-aux/num_turns/mean", "validation_turns/mean"),
        ("training/off_policy/trajectory_staleness_worst/max", "trajectory_off_policy/staleness_worst|max"),
        ("rollout_corr/rollout_is_eff_sample_size", "rollout_importance_weight/eff_sample_size"),
        ("train/loss", "supervised_loss_nats/train"),
    ],
)
def test_keys_of_all_versions_meet_in_one_series(key: str, series: str) -> None:
    target = resolve(key)
    assert target is not None
    assert target.series == series
    assert key in verl_keys(series) or "{" in " ".join(metric_of(series).keys)
    assert dict(label_map(series)) == dict(zip(target.metric.labels, target.label_values, strict=True))


def test_values_are_in_base_units() -> None:
    values = _values({"actor/perf/max_memory_allocated_gb": 2, "timing_per_token_ms/gen": 5.0,
                      "timing_per_token/ref": 0.25, "train/lr(1e-3)": 0.5})
    assert values == {"gpu_allocated_peak_bytes/actor": 2 * 2**30, "stage_token_duration_seconds/gen": 0.005,
                      "stage_token_duration_seconds/ref": 0.25, "learning_rate/supervised": 0.0005}


def test_every_key_of_recorded_runs_is_known() -> None:
    own = {"analysis/covariance_mean", "analysis/entropy_per_token_mean", "analysis/reward_sum_mean",
           "analysis/wH_per_token", "analysis/wH_sum"}  # one run's private metrics
    files = [*LAB.glob("*.jsonl"), *shared("corpus", "runs").glob("*.jsonl")]
    assert len(files) > 15
    unknown = {key for file in files for _, data in rows(file) for key in data if resolve(key) is None}
    assert unknown <= own


class _Odd:
    def __float__(self) -> float:
        raise RuntimeError("no number today")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0), (True, 1.0), (False, 0.0), ("0.5", 0.5), (" -1e-3 ", -0.001), (np.float32(0.5), 0.5),
        (np.float64(2), 2.0), (np.int64(7), 7.0), (np.bool_(True), 1.0), (np.array(3.0), 3.0), (2**70, float(2**70)),
        (None, math.nan), ("nan", math.nan), ("Infinity", math.nan), (float("inf"), math.nan),
        (np.float32("nan"), math.nan), (10**400, math.nan), (-(10**400), math.nan),
    ],
)
def test_numbers_of_every_kind(value: object, expected: float) -> None:
    number = to_number(value)
    assert number is not None
    assert number == expected or (math.isnan(number) and math.isnan(expected))


@pytest.mark.parametrize("value", ["", "three", [1.0], (1,), {"a": 1}, b"1", _Odd(), object(), 1j])
def test_no_number_is_rejected_by_itself(value: object) -> None:
    row = parse(RawStep("run", 1, 0.0, {"actor/pg_loss": value, "actor/grad_norm": 1.0}))
    assert dict(row.values) == {"gradient_norm/actor": 1.0}
    assert [key for key, _ in row.rejected] == ["actor/pg_loss"]
    assert "expected a number" in row.rejected[0][1]


@given(st.dictionaries(st.text(max_size=30), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2))))
def test_parse_takes_anything_and_loses_nothing(data: dict[str, object]) -> None:
    row = parse(RawStep("run", 1, 0.0, data))
    assert len(row.values) + len(row.unknown) + len(row.rejected) <= len(data)
    assert set(row.unknown) | {key for key, _ in row.rejected} | {k for k in data if resolve(k)} == set(data)
    assert all(math.isnan(v) or math.isfinite(v) for v in row.values.values())


def test_unknown_keys_are_kept() -> None:
    row = parse(RawStep("run", 1, 0.0, {"my/own": 3, "other": None}))
    assert row.unknown["my/own"] == 3.0
    assert math.isnan(row.unknown["other"])


def test_the_reference_kl_that_is_measured_wins_over_one_that_is_not() -> None:
    assert _values({"actor/kl_loss": 0.0, "actor/reward_kl_penalty": 0.2}) == {"kl_divergence/reference": 0.2}
    assert _values({"actor/reward_kl_penalty": 0.2, "actor/kl_loss": 0.0}) == {"kl_divergence/reference": 0.2}
    assert _values({"actor/reward_kl_penalty": 0.2, "actor/kl_loss": 0.3}) == {"kl_divergence/reference": 0.3}
    assert math.isnan(_values({"actor/kl_loss": 0.3, "critic/kl": None})["kl_divergence/reference"])


def test_names_end_in_their_unit_and_are_legal() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.labels)
        assert metric.help.endswith("."), metric.name
        assert not metric.name.endswith("_total"), "counters are the engine's"
        if metric.unit.suffix and metric.name not in GUIDE_NAMES:
            assert metric.name.endswith(metric.unit.suffix), metric.name
    assert len(BY_NAME) == len(METRICS)


def test_what_not_a_number_means() -> None:
    assert nonfinite_kind("gradient_norm/actor") is NonFinite.FATAL
    assert nonfinite_kind("advantage/mean") is NonFinite.SUSPECT
    assert nonfinite_kind("kl_divergence/update") is NonFinite.FATAL
    assert nonfinite_kind("kl_divergence/rollout") is NonFinite.SUSPECT
    assert nonfinite_kind("rollout_probability_correlation") is NonFinite.UNDEFINED
    assert nonfinite_kind("value_explained_variance") is NonFinite.UNDEFINED


def test_a_series_tells_its_labels_whatever_the_key_held() -> None:
    target = resolve("val-core/a|b/c/acc/mean@1")
    assert target is not None
    assert dict(label_map(target.series))["source"] == "a_b/c"


def test_null_and_bare_tokens_are_the_same() -> None:
    def first_bad(name: str) -> dict[str, float]:
        return dict(parse(RawStep("run", 21, 0.0, dict(rows(CASES / name))[21])).values)
    as_null, bare = first_bad("01_nan_onset_as_null.jsonl"), first_bad("01_nan_onset_bare_tokens.jsonl")
    assert {k for k, v in as_null.items() if math.isnan(v)} == {k for k, v in bare.items() if math.isnan(v)} != set()
