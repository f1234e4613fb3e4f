"""verl's console log, the driver's standard output: step lines, the configuration it prints, warnings without a metric.

A step line reads ``(TaskRunnerV1 pid=646) step:1 - actor/pg_loss:np.float64(-0.03) - num_turns/min:2``. Before it may
stand Ray's prefix, colours and a progress bar, around it anything that any process of the job prints. No I/O, no clock.

What is no metric of verl's is handed out under ``console/``, only where it is not zero:

- ``console/rounded_zeros``: values of this row left out because the log rounds and they read zero;
- ``console/grad_norm_not_finite``, ``console/rollout_errors``: such lines since the row before. They come from workers,
  whose prefix says nothing about their run; in a log of several runs, the next row of any run has them;
- ``console/resumed_from_step``: the step that the run's checkpoint was of.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TypeVar

from monitor.sources.jsonl import LineSplitter
from monitor.sources.records import Record, RecordReader, Reject, Row, config_of

LINE_LIMIT = 2**20
"""Longest line, in bytes. A step line of a thousand metrics has 50 kB."""

HEAD = 2**16
"""Bytes of a log's beginning that tell its format."""

_CONFIG_START = "{'actor_rollout_ref':"  # pprint sorts keys
_CONFIG_LINES, _CONFIG_CHARACTERS = 5000, 2 * 2**20  # verl 0.9.1 prints 930 lines, 80 kB
_CONFIG_TRIES = 8  # lines ending in "}" are few: only the last one does, or one cut there
_SOURCES = 64  # prefixes remembered per log; a job has one that prints steps
_CONFIGS = 4  # configurations held until their run's first row
_ROUNDED_AFTER = 20  # fractional values without a fourth decimal that make a log a rounded one
_SHOWN = 60  # characters of a refused pair that a warning quotes

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_PREFIX = re.compile(r"\bpid=(\d{1,20})(?:, ip=([^)\s]{1,64}))?\) ?")
# At a word's start, so that neither global_step:5 nor training/step:5 begins a row; a bar before it ends in "]".
_STEP = re.compile(r"(?<![\w/.:@'\"`-])step:([0-9]{1,15}) - (?=\S)")
# Ray prints a line once and then how many more like it there were.
_REPEATED = re.compile(r" ?\[repeated (\d{1,9})x across (?:all nodes|cluster)\].*")
_RESUMED = re.compile(r"Setting global step to (\d{1,15})\b")
_NOTES = (("grad_norm is not finite", "console/grad_norm_not_finite"),
          ("Error in _run_prompt", "console/rollout_errors"))
_OF_INTEREST = re.compile(rb"step:\d|Setting global step to|grad_norm is not finite|Error in _run_prompt|"
                          + re.escape(_CONFIG_START).encode())

_WRAPPED = re.compile(r"(?:np\.|numpy\.)?(?:float|int|uint|bool|longdouble|tensor)\w{0,9}\(([^()]*)\)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_FLOAT = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII)
_WORDS: dict[str, object] = {"None": None, "True": True, "False": False, "np.True_": True, "np.False_": False}
# Counts that verl <= 0.4.1 prints as "0.000" too, and which then are zero.
_COUNT = re.compile(r"(?:^|/)(?:global_step|epoch|total_num_tokens|num_\w+)(?:/|$)|seqlen/|_length/(?:min|max)$")

# A line of Ray's, of any job. JSON is told apart by how its lines begin.
_RAY_LINE = re.compile(r"\((?:[^()\n]{1,100} )?pid=\d+(?:, ip=[^)\s]+)?\)")
_JSON_LINE = re.compile(r'\s*[{\[]\s*["{\[}]')

_T = TypeVar("_T")
_Source = tuple[str, str] | None  # pid and ip of a line's prefix


@dataclass(slots=True)
class _Run:
    """How one run's values are written. ``fractional``: how many had a fraction; ``precise``: one was not rounded."""

    label: str
    number: int = 1  # in order of appearance
    fractional: int = 0
    precise: bool = False

    def learn(self, text: str) -> None:
        """See how a value is written: only full precision has four decimals, an exponent, a type or a word."""
        decimals = text.partition(".")[2]
        if "(" in text or "e" in text or len(decimals) > 3:
            self.precise = True
        elif decimals.strip("0"):
            self.fractional += 1

    def hides(self, key: str, text: str) -> bool:
        """Whether what reads zero may be a small value. Full precision never writes 0.000, whatever came before;
        0.0 is a rounded value only in a log that never showed a fourth decimal."""
        if "." not in text or _COUNT.search(key):
            return False
        return text.lstrip("+-") == "0.000" or (not self.precise and self.fractional >= _ROUNDED_AFTER)


@dataclass(slots=True)
class _Printing:
    """A configuration that one process is printing."""

    pieces: list[str] = field(default_factory=list)
    lines: int = 0
    characters: int = 0
    tries: int = 0

    def add(self, body: str) -> dict[str, object] | None:
        """Take a line; the configuration when that was the last one.

        Raises:
            ValueError: this will not become a configuration any more.
        """
        # The process may print other lines between. pprint's own are indented; the rest of one that a full output
        # buffer cut is not, and follows a line that ends as none of pprint's does.
        self.lines += 1
        last = self.pieces[-1] if self.pieces else ""
        if body.startswith((" ", ":", ",", "}", "]", ")")) or not last.endswith((",", "'", '"')):
            self.pieces.append(body)
            self.characters += len(body)
        if self.lines > _CONFIG_LINES or self.characters > _CONFIG_CHARACTERS or self.tries >= _CONFIG_TRIES:
            raise ValueError("too long")
        if not body.rstrip().endswith("}"):
            return None
        self.tries += 1
        # Joined without newlines, so that a cut may go through a word; indentation keeps the others apart.
        return _evaluate("".join(self.pieces))


class _Unwrap(ast.NodeTransformer):
    """Leaves of ``np.float64(0.5)`` the 0.5, and takes bare nan and inf."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.visit(node.args[0]) if len(node.args) == 1 else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(float(node.id)) if node.id in ("nan", "inf") else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Constant(node.attr == "True_") if node.attr in ("True_", "False_") else node


def _evaluate(text: str) -> dict[str, object] | None:
    try:
        value = ast.literal_eval(_Unwrap().visit(ast.parse(text, mode="eval")))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # what the parser is known to raise
        return None
    return value if isinstance(value, dict) else None


def parse_value(text: str) -> object:
    """A value as the console shows it.

    Raises:
        ValueError: it is no value, or not a whole one.
    """
    wrapped = _WRAPPED.fullmatch(text)
    bare = wrapped[1] if wrapped else text
    if bare in _WORDS:
        return _WORDS[bare]
    if _INTEGER.fullmatch(bare):
        return int(bare)
    if _FLOAT.fullmatch(bare):
        return float(bare)
    raise ValueError(f"expected a number, got {text[:_SHOWN]!r}")


def parse_pairs(text: str) -> tuple[list[tuple[str, object, str]], list[str]]:
    """``key:value`` pairs of a step line behind its number, each with the value's text; and what was bad.

    A value holds no colon, a key may (``num_turns:min``): the last one parts them.
    """
    pairs: list[tuple[str, object, str]] = []
    bad: list[str] = []
    for piece in text.strip().removesuffix(" -").split(" - "):
        key, _, shown = piece.strip().rpartition(":")
        if not key or " " in key or not key.isprintable():
            bad.append(f"expected key:value, got {piece[:_SHOWN]!r}")
            continue
        try:
            pairs.append((key, parse_value(shown), shown))
        except ValueError as error:
            bad.append(f"{key[:_SHOWN]}: {error}")
    return pairs, bad


def _step_starts(text: str) -> list[re.Match[str]]:
    """Where step lines begin in a line: writers that lose a newline put two on one."""
    starts: list[re.Match[str]] = []
    for match in _STEP.finditer(text):
        if not starts or not text.endswith(" - ", 0, match.start()):  # else a metric that is called "step"
            starts.append(match)
    return starts


def _source(prefix: re.Match[str] | None) -> _Source:
    return (prefix[1], prefix[2] or "") if prefix else None


def _put(store: dict[_Source, _T], key: _Source, value: _T, limit: int) -> None:
    """Remember as the latest; forget the oldest beyond the limit."""
    store.pop(key, None)
    store[key] = value
    if len(store) > limit:
        del store[next(iter(store))]


class ConsoleReader(RecordReader):
    """Turns the bytes of one console log into records; a ``RecordReader``.

    ``read`` counts step lines only: a log that grows by other lines shows no life. A new prefix is the same run
    begun again, as in a log that is appended to at each start, until one before it is heard once more: then two
    runs share the log, and the new one's ``Row.run`` is ``#2``, ``#3`` from there on, in order of appearance and
    never a process id; the caller makes names of them. Lines without a prefix belong to the first run. A
    configuration is handed out right before its run's first row, because only that tells which run it is of.
    """

    def __init__(self, reject: Reject, limit: int = LINE_LIMIT) -> None:
        self._reject = reject
        self._limit = limit
        self._splitter = LineSplitter(limit)
        self._first = _Run("")
        self._prefixes = 0  # that printed steps
        self._latest = self._first  # of the prefixes that have no label
        self._runs: dict[_Source, _Run] = {}
        self._printing: dict[_Source, _Printing] = {}
        self._configs: dict[_Source, dict[str, object]] = {}
        self._resumed: dict[_Source, int] = {}
        self._notes: dict[str, int] = {}

    def feed(self, data: bytes) -> list[Record]:
        """Records that ``data`` completes."""
        before = self._splitter.nul_bytes
        records: list[Record] = []
        for number, line in self._splitter.feed(data):
            if line is None:
                self._reject("too_long", 1, f"line {number}: expected at most {self._limit} bytes, got more")
            elif self._printing or _OF_INTEREST.search(line):
                text = _ANSI.sub("", line.decode("utf-8", "replace"))
                if not self._step_lines(number, text, records):
                    self._other_line(text)
        nul_bytes = self._splitter.nul_bytes - before
        if nul_bytes:
            self._reject("nul_bytes", nul_bytes, "")
        return records

    def finish(self) -> list[Record]:
        """The last line, when the log is over and its newline never came, and a configuration that got no row.

        A line that is no step line stays held: should the log go on after all, its rest may still come. A number that
        was cut between two digits looks whole and is taken.
        """
        records: list[Record] = []
        text = _ANSI.sub("", self._splitter.held.decode("utf-8", "replace"))
        if self._step_lines(self._splitter.number, text, records):
            self._splitter.discard()
        if not self.read and self._configs:
            records.append(config_of(self._configs.popitem()[1]))
        return records

    def _step_lines(self, number: int, text: str, records: list[Record]) -> bool:
        """Rows of the step lines in a line; whether there are any."""
        starts = _step_starts(text)
        if not starts:
            return False
        source = _source(_PREFIX.search(text, 0, starts[0].start()))
        found = False
        for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=True):
            # What follows a carriage return is a progress bar.
            shown = _REPEATED.sub("", text[start.end():end].partition("\r")[0])
            pairs, bad = parse_pairs(shown)
            if not pairs:
                continue  # prose
            found = True
            self.read += 1
            if bad:
                self._reject("bad_value", len(bad), f"line {number}: {bad[0]}")
            self._row(source, int(start[1]), pairs, records)
        return found

    def _row(self, source: _Source, step: int, pairs: list[tuple[str, object, str]], records: list[Record]) -> None:
        run = self._run(source)
        for _, _, text in pairs:
            run.learn(text)
        shown = [(key, value) for key, value, text in pairs if value != 0 or not run.hides(key, text)]
        values = dict(shown)
        if len(shown) < len(pairs):
            values["console/rounded_zeros"] = len(pairs) - len(shown)
        values.update(self._notes)
        self._notes.clear()
        # Lines without a prefix are the first run's.
        for owner in (None, source) if run is self._first else (source,):
            self._printing.pop(owner, None)
            config = self._configs.pop(owner, None)
            if config is not None:
                records.append(config_of(config, run.label))
            resumed = self._resumed.pop(owner, None)
            if resumed is not None:
                values["console/resumed_from_step"] = resumed
        records.append(Row(step, values, run.label))

    def _run(self, source: _Source) -> _Run:
        if source is None:
            return self._first
        run = self._runs.get(source)
        if run is None:
            self._prefixes += 1
            run = self._first if self._prefixes == 1 else _Run("", self._prefixes)
            self._latest = run
        elif not run.label and run is not self._latest:
            self._latest.label, self._latest = f"#{self._latest.number}", run
        _put(self._runs, source, run, _SOURCES)
        return run

    def _other_line(self, text: str) -> None:
        """What no row tells: the configuration, a resume, failures that have no metric."""
        prefix = _PREFIX.search(text)
        source = _source(prefix)
        body = text[prefix.end():] if prefix else text
        body = body.removesuffix("\r")
        if body.startswith(_CONFIG_START):
            _put(self._printing, source, _Printing(), _CONFIGS)
        printing = self._printing.get(source)
        if printing is not None:
            self._config_line(source, printing, body)
        resumed = _RESUMED.search(body)
        if resumed:
            _put(self._resumed, source, int(resumed[1]), _SOURCES)
        for words, key in _NOTES:
            if words in body:
                repeated = _REPEATED.search(body)
                self._notes[key] = self._notes.get(key, 0) + (int(repeated[1]) if repeated else 1)

    def _config_line(self, source: _Source, printing: _Printing, body: str) -> None:
        try:
            config = printing.add(body)
        except ValueError:
            del self._printing[source]
            return
        if config is not None:
            del self._printing[source]
            _put(self._configs, source, config, _CONFIGS)


def looks_like_console(head: bytes) -> bool:
    """Whether a log that begins with ``head`` is a console log: a step line, a line of Ray's or verl's configuration.

    JSON lines are none, whatever their texts hold.
    """
    head = head[:HEAD]
    if b"\0" in head:
        return False
    for line in _ANSI.sub("", head.decode("utf-8", "replace")).splitlines():
        if _JSON_LINE.match(line):
            continue
        if _RAY_LINE.match(line) or line.startswith(_CONFIG_START):
            return True
        if any(parse_pairs(line[match.end():])[0] for match in _step_starts(line)):
            return True
    return False
