"""verl's console log: every way a value, a prefix and a line may look, any chunking, and prose that is no row."""

from __future__ import annotations

import ast
import json
import math
import pprint
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.catalog import parse
from monitor.model import RawStep
from monitor.sources.console import ConsoleReader, looks_like_console, parse_pairs, parse_value
from monitor.sources.records import REASONS, Config, Record, RecordReader, Row
from tests.sources.test_jsonl import Rejects

DATA = Path(__file__).parents[1] / "data"
CASES = DATA / "cases"
REAL = DATA / "console" / "ppo-skipped-updates.console.log"
CONFIG = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-06, "betas": [0.9, 0.999]}, "clip_ratio": 0.2,
                                          "strategy": "fsdp2", "path": None},
                                "rollout": {"name": "vllm", "n": 8, "template": "{% if x %}{{ it's }} a long text of "
                                            "two and more lines, {'a': 1}, that pprint will cut in two {% endif %}"}},
          "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "use_kl_in_reward": False},
          "trainer": {"logger": ["console", "file"], "nnodes": 1, "total_training_steps": 20, "device": "cpu"}}


def read(data: bytes | str, rejects: Rejects | None = None, limit: int = 2**20) -> list[Record]:
    """All records of a log; without ``rejects``, nothing may be refused."""
    strict = Rejects()
    reader = ConsoleReader(strict if rejects is None else rejects, limit)
    checked: RecordReader = reader
    records = [*checked.feed(data.encode() if isinstance(data, str) else data), *checked.finish()]
    assert not strict.counts, strict.details
    assert reader.read == sum(isinstance(record, Row) for record in records)
    return records


def rows(data: bytes | str, rejects: Rejects | None = None) -> list[Row]:
    return [record for record in read(data, rejects) if isinstance(record, Row)]


def printed(config: object, prefix: str = "(TaskRunner pid=1) ") -> list[str]:
    return [prefix + line for line in pprint.pformat(config).split("\n")]


# --- whole logs


def test_numpy2_fixture_every_value() -> None:
    data = (CASES / "26_console_numpy2.log").read_bytes()
    found = rows(data)
    assert [row.step for row in found] == list(range(14))
    assert {row.run for row in found} == {""}  # step 0 has no prefix, the others have one
    assert sum(len(row.values) for row in found) == data.count(b" - ") == 377
    assert all(type(value) in (int, float) for row in found for value in row.values.values())
    assert found[0].values == {"val-core/ds/acc/mean@1": 0.5}
    assert found[1].values["actor/pg_loss"] == -0.0010235211537904017
    last = found[13].values
    assert math.isnan(last["actor/grad_norm"])  # type: ignore[arg-type]
    assert last["actor/pg_loss"] == math.inf
    assert (last["critic/score/mean"], last["actor/lr"]) == (-1.0, 1e-06)


def test_rounded_fixture_never_says_zero() -> None:
    data = (CASES / "26_console_rounded.log").read_bytes()
    found = rows(data)
    assert len(found) == 12
    hidden = sum(int(str(row.values.get("console/rounded_zeros", 0))) for row in found)
    kept = sum(not key.startswith("console/") for row in found for key in row.values)
    assert (kept, hidden, kept + hidden) == (311, 61, data.count(b" - "))
    assert not any("actor/lr" in row.values for row in found)  # an lr of 1e-6 reads 0.000
    assert all(row.values["training/epoch"] == 0 for row in found)  # no decimals: truly zero
    assert "actor/ppo_kl" not in found[0].values  # -0.000


def test_real_log_holds_what_the_file_log_beside_it_holds() -> None:
    found = rows(REAL.read_bytes())
    expected = [json.loads(line) for line in (DATA / "lab" / "ppo-skipped-updates.jsonl").read_text().splitlines()]
    assert [row.step for row in found] == [row["step"] for row in expected] == list(range(61))
    compared = 0
    for row, other in zip(found, expected, strict=True):
        assert [key for key in row.values if not key.startswith("console/")] == list(other["data"])
        for key, value in other["data"].items():
            # The file log writes null for what the console shows as nan.
            assert math.isnan(row.values[key]) if value is None else row.values[key] == value  # type: ignore[arg-type]
            compared += 1
    assert compared == 6751
    skipped = [row.values.get("console/grad_norm_not_finite", 0) for row in found]
    assert sum(skipped) == REAL.read_text().count("grad_norm is not finite") == 117  # type: ignore[arg-type]
    assert skipped[:5] == [0, 0, 1, 1, 2]


def test_rows_go_through_the_catalogue() -> None:
    row = rows(REAL.read_bytes())[5]
    observation = parse(RawStep("r", row.step, 0.0, row.values))
    assert observation.rejected == ()
    assert {key for key in observation.unknown if not key.startswith("console/")} == set()


def test_worker_warnings_are_counted_into_the_next_row() -> None:
    warnings = (CASES / "02_worker_stderr.log").read_bytes()
    assert read(warnings) == []
    first, second = rows(warnings + b"step:1 - a:1\nstep:2 - a:1\n")
    assert first.values == {"a": 1, "console/grad_norm_not_finite": 40}
    assert second.values == {"a": 1}


def test_pings_are_no_life() -> None:
    pings = "(LLMServer pid=7) pending: 0, running: 8, finished: 0\n" * 720
    reader = ConsoleReader(Rejects())
    reader.feed(f"step:1 - a:1\n{pings}".encode())
    assert reader.read == 1


# --- lines


@pytest.mark.parametrize("prefix", [
    "", "(TaskRunner pid=12) ", "(TaskRunnerV1 pid=12) ", "(TaskRunner pid=12, ip=10.0.0.3) ", "(main_task pid=12) ",
    "\x1b[36m(TaskRunnerV1 pid=12)\x1b[0m ", "(pid=12) ", "2026-01-01T00:00:00Z stdout F (TaskRunner pid=12) ",
    "(TaskRunner pid=12) \rTraining:   2%|▏ | 1/60 [00:17<16:56, 17.23s/it]\r", "Training: 0/60 [00:00<?, ?it/s]",
    "\rTraining:   2%|▏         | 1/60 [00:17<16:56]", "(TaskRunner pid=12) INFO:2026-01-01 05:34:22,581:",
])
@pytest.mark.parametrize("end", ["\n", "\r\n", "", "\rTraining:  3%|2/60", " -\n", " [repeated 2x across cluster]\n"])
def test_prefixes_and_ends(prefix: str, end: str) -> None:
    if prefix.endswith(":"):
        prefix += " "
    assert read(f"{prefix}step:7 - a/b@1:-0.5 - num_turns:min:np.int32(2){end}") == [
        Row(7, {"a/b@1": -0.5, "num_turns:min": 2})]


@pytest.mark.parametrize(("text", "value"), [
    ("1", 1), ("-3", -3), ("1.", 1.0), (".5", 0.5), ("-0.000", 0.0), ("1e-06", 1e-06), ("-2.5E+3", -2500.0),
    ("inf", math.inf), ("-inf", -math.inf), ("True", True), ("False", False), ("None", None),
    ("np.float64(-4.2e-09)", -4.2e-09), ("np.int32(2)", 2), ("np.float32(inf)", math.inf), ("np.True_", True),
    ("numpy.float64(1.0)", 1.0), ("np.bool_(True)", True), ("9" * 30, 1e30),
])
def test_values(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize("text", ["nan", "np.float32(nan)", "-nan"])
def test_nan(text: str) -> None:
    assert math.isnan(parse_value(text))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "np.float64(0.1", "1e-", "-", "abc", "0.1.2", "0.5)", "np.float64()", "1 2",
                                  "1_0", "print(3)", "٣"])
def test_no_values(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        parse_value(text)


@pytest.mark.parametrize("text", [
    "step: 3 - a:1", "global_step:5 - a:1", "Training step:12 done", "training/step:5 - a:1", "step:5", "step:5 - ",
    "step:5 - and so on", "step:x - a:1", "step:5 - note: hello", "step:5 - took:12 minutes", "step:5-a:1",
    "a_step:3 - a:1", '{"text": "step:1 - a:1 - b:2"}', "step:5 - a:np.float64(0.1", "step:1.5 - a:1",
    "first-step:1 - a:1", "step:٣ - a:1",
])
def test_prose_is_no_row(text: str) -> None:
    reader = ConsoleReader(rejects := Rejects())
    assert reader.feed(f"(TaskRunner pid=1) {text}\n".encode()) == []
    assert (reader.read, rejects.counts) == (0, {})


@pytest.mark.parametrize(("tail", "what"), [
    (" - c:np.float64(0.1", "line 2: c: expected a number, got 'np.float64(0.1'"),
    (" - actor/pg_lo", "line 2: expected key:value, got 'actor/pg_lo'"),
    (" - c:", "line 2: c: expected a number, got ''"),
    (" - :5", "line 2: expected key:value, got ':5'"),
])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_cut_line_costs_its_last_pair(tail: str, what: str, end: str) -> None:
    rejects = Rejects()
    assert read(f"\nstep:3 - a:1 - b:2{tail}{end}", rejects) == [Row(3, {"a": 1, "b": 2})]
    assert rejects.counts == {"bad_value": 1}
    assert rejects.details == [what]
    assert set(rejects.counts) <= set(REASONS)


def test_two_step_lines_that_lost_a_newline() -> None:
    assert rows("step:1 - a:np.float64(1.5)step:2 - a:2 - step:7 - b:3\n") == [
        Row(1, {"a": 1.5}), Row(2, {"a": 2, "step": 7, "b": 3})]


def test_the_last_line_without_a_newline_comes_once() -> None:
    reader = ConsoleReader(Rejects())
    assert reader.feed(b"step:1 - a:1") == []
    assert reader.finish() == [Row(1, {"a": 1})]
    assert reader.finish() == []
    assert reader.feed(b"\nstep:2") == []
    assert reader.finish() == []  # no row yet: its rest may come
    assert reader.feed(b" - a:2\n") == [Row(2, {"a": 2})]


def test_long_lines_and_nul_bytes_are_counted() -> None:
    rejects = Rejects()
    assert read(b"step:1 - a:" + b"1" * 90 + b"\n\0\0step:2 - a:2\n", rejects, limit=80) == [Row(2, {"a": 2})]
    assert rejects.counts == {"too_long": 1, "nul_bytes": 2}


# --- rounding


def test_rounding_is_told_from_short_numbers() -> None:
    shorts = " - ".join(f"k{i}:0.{i}" for i in range(11, 31))
    assert rows(f"step:1 - {shorts} - z:0.0")[0].values["console/rounded_zeros"] == 1
    assert "z" in rows(f"step:1 - {shorts} - z:0.0 - p:0.1234")[0].values  # one value of full precision
    assert "z" in rows(f"step:1 - {shorts} - z:0")[0].values
    few = rows("step:1 - a:0.5 - z:0.0 - y:0.000")[0].values  # full precision never writes 0.000
    assert few == {"a": 0.5, "z": 0.0, "console/rounded_zeros": 1}


def test_rounded_counts_are_zero() -> None:
    counts = {"training/epoch": 0.0, "training/global_step": 0.0, "response_length/min": 0.0,
              "val-aux/num_turns/min": 0.0}
    text = " - ".join(f"{key}:0.000" for key in counts)
    found = rows(f"step:0 - {text} - response_length/clip_ratio:0.000")[0].values
    assert found == {**counts, "console/rounded_zeros": 1}


# --- runs and notes


def test_a_log_that_is_appended_to_is_one_run() -> None:
    log = ("(A pid=1) step:1 - a:1\n(A pid=1) step:2 - a:1\n(A pid=7) Setting global step to 1\n"
           "(A pid=7) step:2 - a:1\n(A pid=7) step:3 - a:1\n(A pid=9) step:1 - a:1\n")
    assert [(row.run, row.step) for row in rows(log)] == [("", 1), ("", 2), ("", 2), ("", 3), ("", 1)]


def test_further_prefixes_are_numbered_without_pids() -> None:
    log = ("(A pid=1) step:1 - a:1\n(A pid=2) hello\n(A pid=3) step:1 - a:2\nstep:2 - a:3\n(A pid=1) step:3 - a:4\n"
           "(A pid=1, ip=10.0.0.2) step:1 - a:5\n(A pid=3) step:2 - a:6\n")
    assert [(row.run, row.values["a"]) for row in rows(log)] == [
        ("", 1), ("", 2), ("", 3), ("", 4), ("", 5), ("#2", 6)]


def test_a_job_with_endless_prefixes_stays_bounded() -> None:
    log = "".join(f"(A pid={i}) step:1 - a:1\n(A pid=0) step:1 - a:1\n(A pid={i}) step:1 - a:1\n"
                  f"(A pid={i}) Setting global step to 5\n" for i in range(500))
    reader = ConsoleReader(Rejects())
    assert len({record.run for record in reader.feed(log.encode())}) == 500
    assert len(reader._runs) == len(reader._resumed) == 64


def test_notes() -> None:
    log = ("(B pid=9) WARN: grad_norm is not finite: nan\n"
           "(B pid=8) WARN: grad_norm is not finite: nan\x1b[32m [repeated 7x across cluster]\x1b[0m (Ray ...)\n"
           "(L pid=5) ERROR:2026: Error in _run_prompt for uid=3\n"
           "(L pid=5) Error in _run_prompt: boom [repeated 3x across cluster]\n"
           "(A pid=2) Setting global step to 40\n(A pid=1) step:1 - a:1\n(A pid=2) step:41 - a:1\n")
    first, second = rows(log)
    assert first.values == {"a": 1, "console/grad_norm_not_finite": 8, "console/rollout_errors": 4}
    assert second == Row(41, {"a": 1, "console/resumed_from_step": 40})


# --- configuration


@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=1) ", "\x1b[36m(TaskRunnerV1 pid=1, ip=10.0.0.1)\x1b[0m "])
def test_config(prefix: str) -> None:
    log = [*printed(CONFIG, prefix), f"{prefix}step:0 - a:1", f"{prefix}step:1 - a:1"]
    assert read("\n".join(log)) == [Config(CONFIG), Row(0, {"a": 1}), Row(1, {"a": 1})]


def test_config_cut_anywhere_within_a_line() -> None:
    # Ray shows what a full output buffer holds, and the rest as a line of its own. A piece that begins neither with a
    # space nor a delimiter is known by how the piece before it ends; only a cut behind a quote loses the configuration.
    lines = printed(CONFIG, "")
    lost = 0
    for index, line in enumerate(lines):
        for at in range(1, len(line)):
            cut = [*lines[:index], line[:at], line[at:], *lines[index + 1:]]
            records = read("".join(f"(T pid=1) {piece}\n" for piece in cut) + "(T pid=1) step:1 - a:1\n")
            lost += records != [Config(CONFIG), Row(1, {"a": 1})]
            assert records[-1] == Row(1, {"a": 1})
    assert lost < 0.15 * sum(map(len, lines))


def test_config_between_other_lines() -> None:
    log: list[str] = []
    for line in printed(CONFIG):
        log += [line, "(TaskRunner pid=1) WARNING: something", "(B pid=2) step:1 - a:1", "(B pid=2) {'other': 1}"]
    records = read("\n".join([*log, "(TaskRunner pid=1) step:5 - b:2"]))
    assert records[-2:] == [Config(CONFIG), Row(5, {"b": 2})]
    assert len(records) == len(printed(CONFIG)) + 2


def test_config_with_numpy_and_not_finite_values() -> None:
    text = ("{'actor_rollout_ref': {'a': np.float64(0.5), 'b': inf, 'c': -inf, 'd': np.True_},\n"
            " 'path': PosixPath('/x')}\nstep:1 - a:1\n")
    values = {"a": 0.5, "b": math.inf, "c": -math.inf, "d": True}
    assert read(text)[0] == Config({"actor_rollout_ref": values, "path": "/x"})


@pytest.mark.parametrize("text", [
    "{'actor_rollout_ref': {'a': <object at 0x1>}}",
    "{'actor_rollout_ref': 1",
    "{'actor_rollout_ref': print('x', 'y')}",
    "{'actor_rollout_ref': " + "[" * 5000 + "}",
    "{'actor_rollout_ref': " + "-" * 50000 + "1}",
    "{'actor_rollout_ref': " + "1+" * 50000 + "1}",
    "{'actor_rollout_ref':}\n}\n" * 20,
    "{'actor_rollout_ref': {\n" + " 'a': 1,\n" * 6000 + "}}",
    "{'actor_rollout_ref': [\n" + (" " * 10**6 + "\n") * 3 + "]}",
], ids=lambda text: text[:40])
def test_what_is_no_config_is_given_up_quietly(text: str) -> None:
    records = read("".join(f"(T pid=1) {line}\n" for line in text.split("\n")) + "(T pid=1) step:1 - a:1\n")
    assert records == [Row(1, {"a": 1})]


def test_config_of_an_attempt_that_printed_no_step_is_not_the_next_ones() -> None:
    other = {**CONFIG, "trainer": {"nnodes": 2}}
    log = [*printed(other, "(T pid=1) "), *printed(CONFIG, "(T pid=2) "), "(T pid=2) step:1 - a:1"]
    assert read("\n".join(log)) == [Config(CONFIG), Row(1, {"a": 1})]
    assert read("\n".join(printed(CONFIG)) + "\n") == [Config(CONFIG)]  # nothing else came: told at the end


# --- chunks, garbage, format

LOG = "\n".join([*printed(CONFIG, "\x1b[36m(T pid=1)\x1b[0m "), "(W pid=3) WARN: grad_norm is not finite: nan",
                 "(T pid=1) \rTraining:  0%|▏| 0/60\x1b[0m", "(T pid=1) step:0 - val-core/d/acc/mean@1:np.float64(0.5)",
                 "\0(U pid=2) step:1 - a:0.000 - b:np.float64(0.1", "", "(T pid=1) step:1 - a:1\r",
                 "step:2 - a:2 - c:-"])


@given(st.lists(st.integers(0, len(LOG.encode())), max_size=12))
def test_any_split_gives_the_same(cuts: list[int]) -> None:
    data = LOG.encode()
    whole, parts = Rejects(), Rejects()
    expected = [*(one := ConsoleReader(whole)).feed(data), *one.finish()]
    reader = ConsoleReader(parts)
    edges = [0, *sorted(cuts), len(data)]
    records = [record for a, b in pairwise(edges) for record in reader.feed(data[a:b])]
    records += reader.finish()
    assert records == expected
    assert len(records) == 5
    assert (parts.counts, parts.details, reader.read) == (whole.counts, whole.details, one.read)


_WORDS = st.sampled_from(["step:", "1", " - ", "a:", "0.5", "np.float64(", ")", "\r", "\n", "(T pid=1) ", "\x1b[36m",
                          "{'actor_rollout_ref':", "}", "'", " ", "[repeated 2x across cluster]", "nan", "\0", "é",
                          "Setting global step to ", "grad_norm is not finite"])


@given(st.lists(_WORDS, max_size=60).map("".join), st.integers(0, 200))
def test_garbage_never_raises_and_splits_alike(text: str, cut: int) -> None:
    data = text.encode()
    one, two = ConsoleReader(Rejects()), ConsoleReader(Rejects())
    assert repr([*one.feed(data), *one.finish()]) == repr([*two.feed(data[:cut]), *two.feed(data[cut:]), *two.finish()])
    looks_like_console(data)


_KEYS = st.from_regex(r"[a-z][a-z0-9_/@:-]{0,20}", fullmatch=True)


_NUMBERS = st.floats(allow_nan=False) | st.integers(-2**40, 2**40) | st.booleans()


@given(st.integers(0, 10**6), st.dictionaries(_KEYS, _NUMBERS, min_size=1))
def test_what_verl_writes_comes_back(step: int, values: dict[str, float]) -> None:
    line = " - ".join([f"step:{step}", *(f"{key}:{pprint.pformat(value)}" for key, value in values.items())])
    assert {key: value for key, value, _ in parse_pairs(line.partition(" - ")[2])[0]} == values


@pytest.mark.parametrize("head", [
    REAL.read_bytes(), (CASES / "26_console_numpy2.log").read_bytes(), (CASES / "26_console_rounded.log").read_bytes(),
    b"hello\nstep:1 - a:1", b"(pid=3) x", b"\x1b[36m(W pid=3, ip=1.2.3.4)\x1b[0m x",
    "\n".join(printed(CONFIG, "")).encode(), b'{"NCCL_DEBUG": 1}\n(TaskRunner pid=1) x',
], ids=lambda head: str(len(head)))
def test_console_logs_are_known(head: bytes) -> None:
    assert looks_like_console(head)


@pytest.mark.parametrize("head", [
    b"", b"\n\n", b"Training step:12 done\n", b'{"step": 1, "data": {"a": 1}}\n', b"\0\0\0step:1 - a:1\n",
    b"\xff\xfe\x00", b'{"step": 1, "text": "(TaskRunner pid=1) step:1 - a:1 - b:2"}\n', b"see (pid=3) there\n",
    b"x" * 2**16 + b"\nstep:1 - a:1\n",
    *(path.read_bytes() for path in sorted((DATA / "lab").glob("*.jsonl"))),
], ids=lambda head: str(len(head)))
def test_other_files_are_not(head: bytes) -> None:
    assert not looks_like_console(head)


def test_the_printed_form_is_python() -> None:
    assert ast.literal_eval("".join(printed(CONFIG, ""))) == CONFIG  # lines joined without their newlines
