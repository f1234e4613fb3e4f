"""What is taken from a row, what is not, and what it costs."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from decimal import Decimal
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.attach import attach
from monitor.attach.client import safe
from monitor.attach.recorder import Event, Identity, Recorder
from monitor.attach.rows import Snapshots, counts, plain, settled, step_number


def snapshot(data: Any) -> dict[str, Any]:
    return Snapshots().take(data)


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(name)

    def __float__(self) -> float:
        raise RuntimeError("float")

    def __str__(self) -> str:
        raise RuntimeError("str")

    __repr__ = __str__


class Slow:
    """Would cost the trainer a second."""

    def item(self) -> float:
        time.sleep(1)
        return 1.0

    __float__ = item


class Liar(dict[str, Any]):
    """A dict that cannot be iterated by its own methods."""

    def items(self) -> NoReturn:
        raise RuntimeError("items")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("iter")

    keys = items


class Colour(IntEnum):
    RED = 3


class Kept:
    """A target that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def flush(self, seconds: float) -> bool:
        return True

    def drop(self) -> None:
        """Nothing to forget."""


def test_numbers_of_all_kinds_are_taken_and_become_plain() -> None:
    data = {"float": 1.5, "int": 2, "true": True, "none": None, "np64": np.float64(2.5), "np32": np.float32(0.5),
            "npint": np.int64(7), "npbool": np.bool_(True), "zero_dim": np.array(3.0), "one": np.array([4.0]),
            "decimal": Decimal("1.25"), "enum": Colour.RED, "long": np.longdouble(1.0)}
    snapshot(data)  # types are learned
    row = settled(snapshot(data))
    assert row == {"float": 1.5, "int": 2, "true": 1, "none": None, "np64": 2.5, "np32": 0.5, "npint": 7, "npbool": 1,
                   "zero_dim": 3.0, "one": 4.0, "decimal": 1.25, "enum": 3, "long": 1.0}
    assert {type(value) for value in row.values()} == {float, int, type(None)}
    assert not counts


def test_what_is_no_number_is_dropped_and_counted() -> None:
    odd = {"text": "1.0", "list": [1.0], "dict": {"a": 1}, "array": np.zeros(2), "hostile": Hostile(), "slow": Slow(),
           "complex": 1j, "npstr": np.str_("x"), "date": np.datetime64("2026-01-01"), "bytes": b"1", 5: 1.0}
    start = time.perf_counter()
    assert snapshot({**odd, "good": 1.0}) == {"good": 1.0}
    assert time.perf_counter() - start < 0.5
    assert counts["value"] == len(odd)


def test_no_tensor_is_synchronised_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def __init__(self, device: str, size: int = 1) -> None:
            self.is_cuda, self.device, self._size = device == "cuda", types.SimpleNamespace(type=device), size

        def numel(self) -> int:
            return self._size

        def item(self) -> float:
            assert self.device.type == "cpu", "this would wait for the device"
            return 2.5

    class DTensor(Tensor):
        """A subclass, whose item() may be a collective."""

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    row = snapshot({"cpu": Tensor("cpu"), "cuda": Tensor("cuda"), "npu": Tensor("npu"), "long": Tensor("cpu", 2),
                    "sharded": DTensor("cpu")})
    assert row == {"cpu": 2.5}
    assert counts["value"] == 4


@pytest.mark.parametrize("data", [Liar(a=1.0), OrderedDict(a=1.0), UserDict(a=1.0), [("a", 1.0)]])
def test_every_mapping_is_read(data: Any) -> None:
    assert snapshot(data) == {"a": 1.0}


def test_a_row_is_bounded() -> None:
    assert len(snapshot({str(i): i for i in range(10_000)})) == 4096


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    | st.builds(Hostile) | st.builds(np.float32, st.floats(width=32))
    | st.builds(lambda n: np.zeros(n), st.integers(0, 3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    | st.builds(lambda d: Liar(d), st.dictionaries(st.text(), inner, max_size=3)), max_leaves=8)


@settings(deadline=None)
@given(data=anything | st.dictionaries(st.text() | st.integers(), anything), step=st.integers() | anything)
def test_log_takes_whatever_it_is_given(data: Any, step: Any) -> None:
    kept = Kept()
    recorder = Recorder(Identity("run", "", "i"), (kept,))
    recorder.log(data, step)
    recorder.phase(data)
    recorder.finish(step)
    for event in kept.events:
        values = settled(event.values) if event.kind == "steps" else event.values
        json.dumps(safe(values), allow_nan=False).encode()


@settings(deadline=None)
@given(anything)
def test_a_configuration_of_whatever_begins_a_run(config: Any) -> None:
    assert attach(experiment="run", config=config).who.run == "run"


def test_json_is_strict() -> None:
    values = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "big": 2**64,
              "huge": 10**400, "bad\ud800": "\ud800"}
    assert safe(values) == {"nan": "nan", "inf": "inf", "minus": "-inf", "big": 2.0**64, "huge": "inf", "bad?": "?"}


@pytest.mark.parametrize(("given_", "expected"), [(3, 3), (np.int64(4), 4), (5.0, 5), (np.array(6), 6)])
def test_steps(given_: Any, expected: int) -> None:
    assert step_number(given_) == expected


@pytest.mark.parametrize("step", [None, "3", 1.5, math.nan, [1]])
def test_no_steps(step: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        step_number(step)


def test_secrets_of_the_configuration_stay_here() -> None:
    config = {"trainer": {"wandb_api_key": "abc", "hf_token": "def", "max_token_len": 5}, "password": ""}
    assert plain(config) == {"trainer": {"wandb_api_key": "***", "hf_token": "***", "max_token_len": 5}, "password": ""}


def test_cost_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {f"actor/metric_{i}": np.float64(i * 1.1) if i % 2 else i * 1.1 for i in range(120)}
    recorder = Recorder(Identity("run", "", "i"), (Kept(),))

    def best(call: Any) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            for step in range(200):
                call(step)
            times.append((time.perf_counter() - start) / 200)
        return min(times)

    with (tmp_path / "log.jsonl").open("w", buffering=1) as file:
        writing = best(lambda step: file.write(json.dumps({"step": step, "data": data}) + "\n"))
    logging = best(lambda step: recorder.log(data, step))
    with capsys.disabled():
        sys.stdout.write(f"\nlog() of 120 keys: {logging * 1e6:.1f} µs; json.dumps and write: {writing * 1e6:.1f} µs; "
                         f"ratio {logging / writing:.2f}\n")
    assert logging < 0.4 * writing


def test_rows_that_were_plain_for_long_are_still_sorted_out() -> None:
    snapshots = Snapshots()
    for step in range(100):
        odd = {"b": Hostile() if step == 50 else [1.0] if step > 80 else np.float64(2.0)}
        row = settled(snapshots.take({"a": 1.0, **odd}))
        assert row == ({"a": 1.0, "b": 2.0} if "b" in row else {"a": 1.0})
        assert ("b" in row) is (step != 50 and step <= 80)
    assert counts["value"] == 20
    # What is no number is let go as soon as it is looked at again.
    assert snapshots.take({"a": 1.0, "b": Hostile()}) == {"a": 1.0}
