"""Lines and rows of verl's file log: both dialects, damage of every kind, any chunking."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monitor.catalog import parse
from monitor.model import RawStep, RunEnded, RunStarted, RunState, SourceEvent
from monitor.sources import NAME_LIMIT, clean_name
from monitor.sources.events import EventReader
from monitor.sources.jsonl import LineSplitter, Rejected, RowReader, parse_line
from monitor.sources.records import REASONS, Row

CASES = Path(__file__).parents[1] / "data" / "cases"


class Rejects:
    """Records what a reader refuses."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.details: list[str] = []

    def __call__(self, reason: str, count: int, detail: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count
        if detail:
            self.details.append(detail)


def row(line: bytes) -> Row:
    result = parse_line(line)
    assert isinstance(result, Row), result
    return result


def test_values_pass_untouched() -> None:
    got = row(b'{"step":7,"data":{"a":1.5,"b":null,"c":"x","d":true,"e":[1],"f":{"g":2}}}')
    assert got == Row(7, {"a": 1.5, "b": None, "c": "x", "d": True, "e": [1], "f": {"g": 2}})


def test_bare_tokens_become_floats() -> None:
    values = row(b'{"step":1,"data":{"a":NaN,"b":Infinity,"c":-Infinity,"d":1.5}}').values
    assert math.isnan(values["a"])  # type: ignore[arg-type]  # values are objects by contract
    assert (values["b"], values["c"], values["d"]) == (math.inf, -math.inf, 1.5)


@pytest.mark.parametrize("digits", [18, 25, 400, 5000])
@pytest.mark.parametrize("other", ["1", "NaN"])
def test_huge_integers_keep_their_row(digits: int, other: str) -> None:
    values = row(f'{{"step":1,"data":{{"big":{"9" * digits},"other":{other}}}}}'.encode()).values
    assert values["big"] == pytest.approx(float("9" * digits))
    assert "other" in values


@pytest.mark.parametrize(("text", "step"), [("3", 3), ("3.0", 3), ('"3"', 3), ("0", 0), ("-1", -1), ('" 12 "', 12)])
def test_steps_taken(text: str, step: int) -> None:
    got = row(b'{"step":%s,"data":{}}' % text.encode())
    assert got.step == step
    assert type(got.step) is int


@pytest.mark.parametrize(
    "text", ["true", "3.5", "null", '"x"', '"3.5"', "[3]", "{}", "NaN", "Infinity", "1e30", "9" * 30, '"1_0"', '""']
)
def test_steps_refused(text: str) -> None:
    got = parse_line(b'{"step":%s,"data":{}}' % text.encode())
    assert isinstance(got, Rejected)
    assert got.reason == "bad_step"


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        (b'{"step": 5, "data": {"training/global_step": 5, "t', "bad_json", "Unterminated string"),
        (b"step:1 - actor/pg_loss:-0.03", "bad_json", "step:1"),
        (b"[1,2]", "bad_json", "[1,2]"),
        (b"17", "bad_json", "17"),
        (b"[" * 5000, "bad_json", "expected"),
        (b"\xff\xfe\x00", "bad_json", "expected"),
        (b'{"data":{}}', "bad_step", "no step"),
        (b'{"step":1}', "bad_data", "no data"),
        (b'{"step":1,"data":null}', "bad_data", "None"),
        (b'{"step":1,"data":[1]}', "bad_data", "a list"),
    ],
)
def test_bad_lines_say_what_was_expected(line: bytes, reason: str, says: str) -> None:
    got = parse_line(line)
    assert isinstance(got, Rejected)
    assert got.reason == reason
    assert got.reason in REASONS
    assert 'expected {"step": N, "data": {...}}' in got.detail
    assert says in got.detail
    assert len(got.detail) < 300


@pytest.mark.parametrize("line", [b"", b"  ", b"\r", b"\xef\xbb\xbf", b"\t\r"])
def test_blank_lines_are_nothing(line: bytes) -> None:
    assert parse_line(line) is None


def test_text_that_cannot_be_encoded_stays_out_of_keys() -> None:
    (key,) = row(b'{"step":1,"data":{"a\\ud800":1}}').values
    key.encode()
    assert row(b'{"step":1,"data":{"caf\xe9":1}}').values == {"caf\ufffd": 1}
    assert row(b'\xef\xbb\xbf{"step":1,"data":{}}\r').step == 1


def test_both_dialects_mean_the_same() -> None:
    """Case 25: NaN as null (orjson) and as a bare token (json) give the same observations."""
    observations = []
    for name in ("01_nan_onset_as_null", "01_nan_onset_bare_tokens"):
        rows = [row(line) for line in (CASES / f"{name}.jsonl").read_bytes().splitlines()]
        observations.append([parse(RawStep("r", r.step, 0.0, r.values)) for r in rows])
    nulls, tokens = observations
    assert len(nulls) == 40
    for left, right in zip(nulls, tokens, strict=True):
        assert left.step == right.step
        assert list(left.values) == list(right.values)
        assert [repr(value) for value in left.values.values()] == [repr(value) for value in right.values.values()]
        assert left.rejected == right.rejected == ()
    assert math.isnan(nulls[20].values["policy_loss"])


def test_nul_head_is_stripped_and_counted() -> None:
    """Case 31: 4,096 NUL bytes where a truncated log's old content was."""
    rejects = Rejects()
    rows = RowReader(rejects).feed((CASES / "31_nul_prefix.jsonl").read_bytes())
    assert [r.step for r in rows] == [31, 32, 33]
    assert rejects.counts == {"nul_bytes": 4096}


def test_bad_middle_line_costs_itself_only() -> None:
    """Case 32: one broken and one blank line among ten rows."""
    rejects = Rejects()
    rows = RowReader(rejects).feed((CASES / "32_bad_middle_line.jsonl").read_bytes())
    assert [r.step for r in rows] == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert rejects.counts == {"bad_json": 1}
    assert rejects.details[0].startswith("line 5: expected")


def test_half_last_line_waits_for_its_rest() -> None:
    """Case 32: the tail is held until its newline comes."""
    rejects = Rejects()
    reader = RowReader(rejects)
    rows = reader.feed((CASES / "32_half_last_line.jsonl").read_bytes())
    assert [r.step for r in rows] == list(range(1, 10))
    assert reader.finish() == []  # an end that turns out to be none keeps the half line
    assert [r.step for r in reader.feed((CASES / "32_half_last_line_rest.txt").read_bytes())] == [10]
    assert rejects.counts == {"bad_json": 1}
    assert rejects.details == []


def test_last_line_without_newline_counts_at_the_end_once() -> None:
    reader = RowReader(Rejects())
    assert reader.feed(b'{"step":1,"data":{}}') == []
    assert reader.finish() == [Row(1, {})]
    assert reader.finish() == []
    assert reader.feed(b'\n{"step":2,"data":{}}\n') == [Row(2, {})]


def test_five_megabytes_in_a_line() -> None:
    data = {f"val-aux/source{i}/score/mean@8": 0.5 for i in range(130_000)}
    line = json.dumps({"step": 1, "data": data}).encode() + b"\n"
    assert len(line) > 5e6
    reader = RowReader(Rejects())
    rows = [r for start in range(0, len(line), 65536) for r in reader.feed(line[start : start + 65536])]
    assert rows == [Row(1, data)]


def test_a_line_beyond_the_limit_is_dropped_without_being_kept() -> None:
    rejects = Rejects()
    reader = RowReader(rejects, limit=1000)
    for _ in range(100):
        assert reader.feed(b"x" * 400) == []
        assert len(reader._splitter.held) <= 1000
    assert reader.feed(b'\n{"step":2,"data":{}}\n') == [Row(2, {})]
    assert rejects.counts == {"too_long": 1}
    assert rejects.details == ["line 1: expected at most 1000 bytes, got more"]


PIECES = st.one_of(
    st.sampled_from(
        [b'{"step":1,"data":{"a":1}}', b'{"step":2,"data":{"a":NaN}}', b"\n", b"\n\n", b"\0\0\0", b"\r\n", b'{"step":'
         , b"x" * 70, b"   "]
    ),
    st.binary(max_size=12),
)


@given(stream=st.lists(PIECES, max_size=25).map(b"".join), cuts=st.lists(st.integers(0, 400), max_size=12))
@example(stream=b'{"step":1,"data":{}}\n', cuts=[20])
def test_any_chunking_gives_the_same(stream: bytes, cuts: list[int]) -> None:
    def read(chunks: list[bytes]) -> tuple[list[tuple[int, bytes | None]], int, bytes]:
        splitter = LineSplitter(limit=60)
        lines = [line for chunk in chunks for line in splitter.feed(chunk)]
        return lines, splitter.nul_bytes, splitter.held

    def rows(chunks: list[bytes]) -> tuple[list[str], list[Row], dict[str, int], list[str]]:
        rejects = Rejects()
        reader = RowReader(rejects, limit=60)
        found = [repr(r) for chunk in chunks for r in reader.feed(chunk)]  # NaN is not equal to itself
        return found, reader.finish(), dict(sorted(rejects.counts.items())), rejects.details

    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[a:b] for a, b in pairwise(edges)]
    assert read(chunks) == read([stream])
    assert repr(rows(chunks)) == repr(rows([stream]))


def test_rows_may_name_their_runs() -> None:
    """Case 36: 2,000 run names in one file."""
    out: list[SourceEvent] = []
    reader = EventReader("36_label_churn", "p", lambda: RowReader(Rejects()))
    assert reader.feed((CASES / "36_label_churn.jsonl").read_bytes(), 5.0, True, out) == 2000
    started = [event.run for event in out if isinstance(event, RunStarted)]
    assert len(set(started)) == len(started) == 2000
    assert "36_label_churn" not in started
    assert all(event.time_seconds == 5.0 for event in out)


def test_run_names_are_bounded() -> None:
    out: list[SourceEvent] = []
    reader = EventReader("r", "", lambda: RowReader(Rejects()))
    for number in range(10_000):
        reader.feed(b'{"run":"n%d","step":1,"data":{}}\n' % number, 0.0, True, out)
    assert len(reader.runs) <= 4096


def test_a_restart_is_told_to_every_run_at_its_next_row() -> None:
    out: list[SourceEvent] = []
    reader = EventReader("own", "", lambda: RowReader(Rejects()))
    both = b'{"step":1,"data":{}}\n{"run":"a","step":1,"data":{}}\n'
    reader.feed(both, 0.0, True, out)
    out.clear()
    reader.revive(1.0, True, out)
    assert out == [RunStarted("own", 1.0, "", restarted=True)]
    out.clear()
    reader.feed(both, 2.0, True, out)
    assert [event for event in out if isinstance(event, RunStarted)] == [RunStarted("a", 2.0, "", restarted=True)]


def test_a_log_of_other_things_is_no_run() -> None:
    """verl's rollout dumps are JSONL too. Seen while empty, one looks like a run that starts."""
    out: list[SourceEvent] = []
    reader = EventReader("12", "", lambda: RowReader(Rejects()))
    reader.announce(0.0, 0.0, out)
    assert out == [RunStarted("12", 0.0, "")]
    reader.feed(b'{"input":"q","output":"a","score":1.0,"step":12}\n' * 3, 1.0, True, out)
    reader.announce(1.0, 1.0, out)
    reader.announce(2.0, 2.0, out)
    assert out[1:] == [RunEnded("12", 1.0, RunState.GONE, "its log holds no rows of it")]


def test_names_are_cleaned_and_stay_distinct() -> None:
    assert clean_name("exp-1/ä b") == "exp-1/ä b"
    hostile = ["a\nb", "a\tb", "a\x1b[31mb", "a\u202eb", "a\udcffb", "", " ", "x" * 201, "x" * 202, "x" * 5000 + "y"]
    cleaned = [clean_name(name) for name in hostile]
    assert len(set(cleaned)) == len(cleaned)
    for name in cleaned:
        assert 0 < len(name) <= NAME_LIMIT
        assert name.isprintable()
        name.encode()
    assert clean_name("a\nb") == clean_name("a\nb")
