"""The configuration file: read, checked, overridden by the environment, and applied to runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example as explicitly
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.config import Config, ConfigError, FileConfig, PrometheusConfig, RunRules, StdinConfig, load, understood
from monitor.config import example as example_text
from monitor.config.reading import BY_ID
from monitor.config.settings import SOURCES, Address, Limits, Probes, Push, Retention, RunRule
from monitor.detectors import DETECTORS
from monitor.detectors.base import setting
from monitor.detectors.non_finite import NonFiniteDetector, NonFiniteSettings
from monitor.engine import Engine, EngineSettings
from monitor.model import RawStep, RunEnded, RunStarted, RunState, Severity
from monitor.replay import replay
from monitor.serve import make_sources
from monitor.service import Service, create_app
from monitor.sources.file import FileSource
from tests.helpers import LAB, REPOSITORY, feed, rows

BAD = """\
listen: nowhere
log_levle: INFO
poll_seconds: .inf
limits:
  max_runs: 0
  max_serie: 5
retention: [1]
sources:
  - file: logs
    every_seconds: 5
  - {}
  - prometheus: ftp://host/
  - file: a
    name: one
  - prometheus: http://host/metrics
    name: one
detectors:
  kl_runawy: {}
  kl_runaway:
    floor_nats: low
    flor_nats: 1
  critic_loss_oscillation:
    window_steps: 1e300
runs:
  - match: "ppo-*"
    name: best
  - name: lonely
  - match: x
    detectors:
      non_finite:
        enabled: perhaps
poll_seconds: 1
"""

LINES = [
    (1, "listen: expected HOST:PORT such as 127.0.0.1:9560, got 'nowhere'"),
    (2, "log_levle: expected a known setting, got an unknown one; did you mean log_level?"),
    (3, "poll_seconds: expected a number of seconds above 0, got '.inf'"),
    (5, "limits.max_runs: expected a whole number from 1 on, got '0'"),
    (6, "limits.max_serie: expected a known setting, got an unknown one; did you mean max_series?"),
    (7, "retention: expected a mapping of settings, got a list"),
    (10, "sources[0].every_seconds: expected a known setting, got an unknown one; did you mean ended_after_seconds?"),
    (11, "sources[1]: expected one of file, stdin, prometheus, got nothing"),
    (12, "sources[2].prometheus: expected a URL such as http://HOST:PORT/metrics, without a password, got "
         "'ftp://host/'"),
    (16, "sources[4].name: expected a name that no other source has, got 'one'"),
    (18, "detectors.kl_runawy: expected a detector, got an unknown one; did you mean kl_runaway?"),
    (20, "detectors.kl_runaway.floor_nats: expected a number from 0 on (nats), got 'low'"),
    (21, "detectors.kl_runaway.flor_nats: expected a known setting, got an unknown one; did you mean floor_nats?"),
    (22, "detectors.critic_loss_oscillation: expected settings that it can work with"),
    (26, "runs[0].name: expected no name where match is a pattern: it names one run, got 'best'"),
    (27, "runs[1].match: expected a run's name or a pattern, got nothing"),
    (31, "runs[2].detectors.non_finite.enabled: expected true or false, got 'perhaps'"),
    (32, "poll_seconds: expected once, got it again after line 3"),
]


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    return tmp_path / "monitor.yml"


def read(file: Path, text: str | bytes, **environment: str) -> Config:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file, {f"VERL_MONITOR_SERVE_{name}": value for name, value in environment.items()})


def errors(file: Path, text: str | bytes, **environment: str) -> list[str]:
    """What is wrong, without the file's folder."""
    with pytest.raises(ConfigError) as raised:
        read(file, text, **environment)
    return [line.replace(f"{file}:", "") for line in raised.value.errors]


# --- errors


def test_all_errors_are_told_at_once_each_with_its_line(file: Path) -> None:
    found = errors(file, BAD)
    assert [int(line.partition(":")[0]) for line in found] == [line for line, _ in LINES]
    for line, (number, message) in zip(found, LINES, strict=True):
        assert line.startswith(f"{number}: {message}")
    assert "known are suspect_critical_steps, enabled" in errors(file, "detectors: {non_finite: {zzz: 1}}")[0]


@pytest.mark.parametrize(("text", "message"), [
    ("a: [1, 2\nb: 3\n", "2: expected YAML: while parsing a flow sequence, expected ',' or ']'"),
    ("limits:\n\tmax_runs: 5\n", "2: expected YAML: while scanning for the next token, found character"),
    ("listen: *nowhere\n", "1: expected YAML: found undefined alias"),
    ("poll_seconds: 1\n---\npoll_seconds: 2\n", "2: expected YAML: expected a single document"),
    ("- 1\n", "1: expected a mapping of settings, got a list"),
    ("text\n", "1: expected a mapping of settings, got 'text'"),
    ("? [a]\n: 1\n", "1: expected the name of a setting, got a list or a mapping"),
    ("\nlog_level: !secret INFO\n", "2: log_level: expected no tags of one's own, got !secret"),
    ("limits:\n  max_runs: 1\n  max_runs: 2\n", "3: limits.max_runs: expected once, got it again after line 2"),
    ("limits: &a [*a]\n", "1: expected YAML: it is nested too deep, or within itself"),
    ("[" * 5000, "1: expected YAML: it is nested too deep, or within itself"),
    ('\n"\\UFFFFFFFF": 1\n', "1: expected YAML: "),
    ("poll_seconds:\n", "1: poll_seconds: expected a number of seconds above 0, got nothing"),
    (b"ok: 1\n\xff\xfe\n", "2: expected text in UTF-8, got the byte 0xff"),
    (b"listen: 1\n# \0\x01\x02\n", "2: expected YAML: the character '\\x00' must not stand in it"),
    ("# \u00e4\n".encode("utf-16"), "1: expected text in UTF-8, got the byte 0xff"),
    ("sources: [{stdin: true}, {stdin: true}]", "1: sources[1].stdin: expected true, in one source at most"),
    ("sources: [{stdin: true, file: x}]", "1: sources[0]: expected one of file, stdin, prometheus, got file and stdin"),
    ("sources: [{file: x, patterns: []}]", "1: sources[0].patterns: expected a list that is not empty, got a list"),
    ('sources: [{file: "a\\0b"}]', "1: sources[0].file: expected a path, got 'a\\x00b'"),
    ("sources: [{prometheus: 'http://me:secret@host/'}]", "1: sources[0].prometheus: expected a URL such as"),
    ("runs: [{match: a, name: c}, {match: b, name: c}]", "1: runs[1].name: expected a name that no other run is given"),
    ("token: secret", "1: token: expected a known setting, got an unknown one; did you mean token_file?"),
    ("max_runs: 5", "1: max_runs: expected a known setting, got an unknown one; did you mean limits.max_runs?"),
    ("x" * (2**20 + 1), " expected a file of at most 1048576 bytes"),
])
def test_what_cannot_be_used(file: Path, text: str | bytes, message: str) -> None:
    [found] = errors(file, text)
    assert found.startswith(message)


def test_a_name_for_a_directory_and_a_file_that_is_not_there(file: Path) -> None:
    (file.parent / "logs").mkdir()
    assert errors(file, "sources: [{file: logs, run: x}]")[0].startswith("1: sources[0].run: expected no name")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(file.parent / "other.yml", {})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(file.parent, {})


KEYS = ["listen", "log_level", "poll_seconds", "token_file", "push", "limits", "retention", "sources", "detectors",
        "runs", "enabled", "max_runs", "ended_seconds", "file", "stdin", "prometheus", "run", "name", "patterns",
        "match", "project", "kl_runaway", "floor_nats", "critic_loss_oscillation", "window_steps", "<<"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(max_size=20) | \
    st.sampled_from(["127.0.0.1:1", "1", "0", "true", "a*", "http://host/", "http://[", "~", "~nobody/x", "1e999", "²"])
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=5), max_leaves=30)


@settings(max_examples=200, deadline=None)
@given(document=DOCUMENTS.map(lambda value: yaml.safe_dump(value).encode()) | st.binary() | st.text().map(
    lambda text: text.encode("utf-8", "replace")) | st.lists(st.sampled_from(
        [*KEYS, ": ", "- ", "\n", "  ", "{", "}", "[", "]", "&a", "*a", "!!x", "|", ">", "'", '"', "#", "? ", "%", "\\",
         "1", ",", "\ud7ff", "---", "..."])).map(lambda parts: "".join(parts).encode()))
@explicitly(document=b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1\n")
@explicitly(document=b'token_file: "\\ud800"\nlisten: "\\ud800"')
@explicitly(document=b"a: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 60)))
@explicitly(document=b"' ': 1\n'': {'': 2}")
@explicitly(document=b"a: &a [*b]\nb: &b [*a]\n")
@explicitly(document=b"sources: [{file: x, max_files: " + b"9" * 5000 + b"}]\n")
def test_any_document_is_a_configuration_or_a_config_error(document: bytes,
                                                           tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yml"
    try:
        config = read(file, document)
    except ConfigError as error:
        lines = error.errors
    else:
        file.write_text(understood(config))
        assert load(file, {}) == config
        RunRules(config).detectors("a1")
        RunRules(config).rename(RunStarted("a1", 0.0))
        return
    assert lines
    for line in lines:
        assert re.match(rf"{re.escape(str(file))}:\d+: \S", line), line
        assert line.isprintable(), line


@dataclass(frozen=True, kw_only=True)
class _PairSettings(NonFiniteSettings):
    low: float = setting(1.0, "s", "Low.")
    high: float = setting(2.0, "s", "High.")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


def test_what_a_detector_refuses_is_told_and_a_rule_adds_to_what_holds_for_all(
        file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(NonFiniteDetector):
        settings_type = _PairSettings

    monkeypatch.setitem(BY_ID, "non_finite", Pair)
    good = "runs: [{match: a, detectors: {non_finite: {low: 7}}}]\ndetectors: {non_finite: {high: 9}}"
    assert read(file, good).runs[0].detectors == {"non_finite": {"low": 7.0}}
    [found] = errors(file, good.replace("9", "6"))
    assert found == ("1: runs[0].detectors.non_finite: expected settings that it can work with, got {'low': 7.0} (low "
                     "is above high); known are suspect_critical_steps, low, high, "
                     "enabled")


# --- values


@pytest.mark.parametrize("text", ["", "# nothing\n", "\ufeff{}", "limits:\nsources:\nruns:\ndetectors: {kl_runaway: }"])
def test_an_empty_file_is_the_defaults(file: Path, text: str) -> None:
    assert read(file, text) == Config()


def test_defaults_are_those_of_what_they_configure() -> None:
    assert Config().engine == EngineSettings()
    constructor = inspect.signature(FileSource).parameters
    for f in fields(FileConfig):
        if f.name in ("patterns", "ended_after_seconds", "max_files"):
            assert getattr(FileConfig(file="x"), f.name) == constructor[f.name].default
    assert Config().poll_seconds == constructor["poll_seconds"].default


def test_every_kind_of_value(file: Path) -> None:
    (file.parent / "token").write_text(" s3cret\n")
    config = read(file, """
        listen: "[::1]:80"
        log_level: debug
        poll_seconds: 1e-1
        token_file: token
        push: {enabled: off}
        limits: &limits {max_runs: 1_000, max_series: "7"}
        retention: {gone_after_seconds: 60}
        sources:
          - file: logs/a.jsonl
            run: 0123
            patterns: ["*.jsonl"]
          - file: /var/log
          - stdin: yes
            project: on
          - {prometheus: "http://[::1]:8000/metrics", every_seconds: 1, token_file: token}
        detectors: {non_finite: {suspect_critical_steps: 5}}
        runs: [{match: a, name: b, detectors: {non_finite: {enabled: false}}}]
        """.replace("\n        ", "\n"))
    folder = file.parent
    assert config == Config(
        listen=Address("::1", 80), log_level="DEBUG", poll_seconds=0.1, push=Push(enabled=False),
        token_file=str(folder / "token"), token="s3cret", limits=Limits(max_runs=1000, max_series=7),
        retention=Retention(gone_after_seconds=60),
        sources=(FileConfig(file=str(folder / "logs" / "a.jsonl"), run="0123", patterns=("*.jsonl",)),
                 FileConfig(file="/var/log"), StdinConfig(stdin=True, project="on"),
                 PrometheusConfig(prometheus="http://[::1]:8000/metrics", every_seconds=1.0,
                                  token_file=str(folder / "token"), token="s3cret")),
        detectors={"non_finite": {"suspect_critical_steps": 5.0}},
        runs=(RunRule(match="a", name="b", detectors={"non_finite": {"enabled": False}}),))
    assert config.engine == EngineSettings(max_runs=1000, max_series=7, gone_after_seconds=60)
    assert "s3cret" not in understood(config) + repr(config)
    file.write_text(understood(config))
    assert load(file, {}) == config


def test_a_token_file_must_hold_a_token(file: Path) -> None:
    assert errors(file, "\ntoken_file: token")[0].endswith("token' (No such file or directory)")
    (file.parent / "token").write_text(" \n")
    assert errors(file, "\ntoken_file: token")[0].startswith("2: token_file: expected a file with a token in it")
    (file.parent / "token").write_bytes(b"\xff")
    assert errors(file, "\ntoken_file: token")[0].endswith("(not UTF-8)")
    [found] = errors(file, "sources:\n- prometheus: http://host\n  token_file: other")
    assert found.startswith("3: sources[0].token_file: expected a file that can be read")


def test_sources_have_names_of_their_own_on_metrics(file: Path) -> None:
    config = read(file, "sources: [{file: a/logs}, {file: b/logs}, {file: c, name: 'file:logs-2'}, {stdin: true}, "
                        "{prometheus: 'http://h:8000/metrics'}, {prometheus: 'http://h:8000/other'}]")
    names = [source.stats.name for source in make_sources(config, lambda: 0.0)]
    assert names == ["file:logs", "file:logs-3", "file:logs-2", "stdin", "prometheus:h:8000", "prometheus:h:8000-2"]


# --- environment


def test_the_environment_goes_before_the_file(file: Path) -> None:
    text = "poll_seconds: bad\nlimits: &l {max_runs: 5, max_series: 6}\n"
    config = read(file, text, POLL_SECONDS="2", LIMITS__MAX_RUNS="9", LISTEN="", DETECTORS__KL_RUNAWAY__FLOOR_NATS="1",
                  RETENTION__ENDED_SECONDS="3")
    assert (config.poll_seconds, config.limits) == (2.0, Limits(max_runs=9, max_series=6))
    assert config.detectors == {"kl_runaway": {"floor_nats": 1.0}}
    assert config.retention.ended_seconds == 3.0
    assert config.listen == Config().listen
    assert load(None, {"VERL_MONITOR_SERVE_LOG_LEVEL": "ERROR", "VERL_MONITOR_TOKEN": "x"}) == Config(log_level="ERROR")


def test_the_environments_errors_name_the_variable(file: Path) -> None:
    assert errors(file, "log_level: x", LIMITS__MAX_RUNS="many", LISTN=":1", MAX_RUNS="5", SOURCES__0__FILE="x",
                  LIMITS="7", SOURCES="x", DETECTORS__KL_RUNAWAY__ENABLED="0") == [
        "1: log_level: expected DEBUG, INFO, WARNING or ERROR, got 'x'",
        "VERL_MONITOR_SERVE_DETECTORS__KL_RUNAWAY__ENABLED: detectors.kl_runaway.enabled: expected true or false, got "
        "'0'",
        "VERL_MONITOR_SERVE_LIMITS: limits: expected a mapping of settings, got '7'",
        "VERL_MONITOR_SERVE_LIMITS__MAX_RUNS: limits.max_runs: expected a setting that is one value; lists belong into "
        "the file",
        "VERL_MONITOR_SERVE_LISTN: listn: expected a known setting, got an unknown one; did you mean listen?",
        "VERL_MONITOR_SERVE_MAX_RUNS: max_runs: expected a known setting, got an unknown one; did you mean "
        "limits.max_runs?",
        "VERL_MONITOR_SERVE_SOURCES: sources: expected a list of sources, got 'x'",
        "VERL_MONITOR_SERVE_SOURCES__0__FILE: sources.0.file: expected a setting that is one value; lists belong into "
        "the file",
    ]


# --- runs


def test_rules_rename_runs_and_the_last_one_wins(file: Path) -> None:
    rules = RunRules(read(file, """
runs:
  - {match: "*", project: all}
  - {match: "ppo-*", project: ppo}
  - {match: ppo-1, name: best}
"""))
    step = RawStep("ppo-1", 3, 5.0, {"a": 1}, "found")
    assert rules.rename(step) == replace(step, run="best", project="ppo")
    assert rules.rename(RunStarted("grpo", 1.0)) == RunStarted("grpo", 1.0, "all")
    ended = RunEnded("ppo-1", 9.0, RunState.FINISHED, "over")
    assert rules.rename(ended) == replace(ended, run="best")
    assert RunRules(Config()).rename(step) is step


def test_detectors_per_run_in_an_engine(file: Path) -> None:
    """Two runs with the same values: one is judged by its own limits, another is not judged at all."""
    rules = RunRules(read(file, """
detectors:
  advantage_explosion: {enabled: false}
  kl_runaway: {step_limit_nats: 0.4, step_ceiling_nats: 9}
runs:
  - {match: "lax-*", detectors: {kl_runaway: {step_limit_nats: 2}}}
  - {match: lax-2, name: named, detectors: {kl_runaway: {enabled: no}, advantage_explosion: {enabled: yes}}}
"""))
    engine = Engine(EngineSettings(), rules.detectors, rules.rename)
    kl = [0.5 if step in (15, 17, 18) else 0.001 for step in range(20)]
    for run in ("strict", "lax-1", "lax-2"):
        feed(engine, [(step, {"actor/pg_loss": 0.1, "actor/ppo_kl": value}) for step, value in enumerate(kl)], run=run)
    found = {view.run: view for view in engine.snapshot().runs}
    assert {run: view.severity for run, view in found.items()} == {
        "strict": Severity.WARNING, "lax-1": None, "named": None}
    watched = {run: {item.spec.id for item in view.detectors} for run, view in found.items()}
    everything = {detector.spec.id for detector in DETECTORS}
    assert watched["strict"] == watched["lax-1"] == everything - {"advantage_explosion"}
    assert watched["named"] == everything - {"kl_runaway"}


def test_a_recorded_run_under_a_configuration(file: Path) -> None:
    config = read(file, "runs: [{match: ppo-kl-*, detectors: {kl_runaway: {enabled: false}}},"
                        "{match: ppo-kl-runaway, name: known, project: mine}]")
    [view] = replay(LAB / "ppo-kl-runaway.jsonl", config=config)
    assert (view.run, view.project) == ("known", "mine")
    assert "kl_runaway" not in {item.spec.id for item in view.detectors}
    [plain] = replay(LAB / "ppo-kl-runaway.jsonl")
    assert plain.severity is Severity.CRITICAL


async def _page(service: Service, path: str) -> tuple[int, bytes]:
    from httpx2 import ASGITransport, AsyncClient

    async with AsyncClient(transport=ASGITransport(create_app(service)), base_url="http://test") as client:
        answer = await client.get(path)
        return answer.status_code, answer.content


def test_a_run_without_any_detector_is_still_shown(file: Path) -> None:
    import asyncio

    off = ", ".join(f"{detector.spec.id}: {{enabled: false}}" for detector in DETECTORS)
    rules = RunRules(read(file, f"detectors: {{{off}}}"))
    engine = Engine(EngineSettings(), rules.detectors, rules.rename)
    engine.tick(feed(engine, rows(LAB / "ppo-kl-runaway.jsonl"), run="bare"))
    service = Service(engine=engine, sources=[], clock=lambda: 0.0)
    for path, word in (("/metrics", b'verl_policy_loss{run="bare"}'), ("/", b"bare"), ("/runs/bare", b"bare"),
                       ("/api/v1/runs/bare", b'"detectors"')):
        status, body = asyncio.run(_page(service, path))
        assert (status, word in body) == (200, True), path


# --- the example


def _uncommented(text: str) -> str:
    """The example with everything in force: `#key` is a setting, `# text` is prose."""
    return re.sub(r"(?m)^( *)#(?! \S)", r"\1", text)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def test_the_example_says_what_no_file_says(file: Path) -> None:
    assert read(file, example_text()) == Config()
    assert max(map(len, example_text().splitlines())) <= 120


def test_the_example_holds_every_setting_with_its_default(file: Path) -> None:
    (file.parent / "token").write_text("x")
    (file.parent / "page-token").write_text("y")
    config = read(file, _uncommented(example_text()), TOKEN_FILE=str(file.parent / "token"))
    probes = replace(config.probes, checkpoint_dir=None, ray_address=None, ray_dashboard=None, name=None)
    assert replace(config, token="", token_file=None, sources=(), runs=(), detectors={}, probes=probes) == Config()
    assert [type(source) for source in config.sources] == list(SOURCES.values())
    for detector in DETECTORS:
        given = {name: value for name, value in config.detectors[detector.spec.id].items() if name != "enabled"}
        assert detector.settings_type(**given) == detector.settings_type()
        assert given.keys() == {f.name for f in fields(detector.settings_type)}
    kinds = (Config, Push, Probes, Limits, Retention, *SOURCES.values(), RunRule)
    known = {f.name for kind in kinds for f in fields(kind)}
    assert known - {"token"} <= set(_keys(yaml.safe_load(_uncommented(example_text()))))
    for line in example_text().splitlines():  # prose is prose: nothing in it looks like a setting that is in force
        assert not line.strip() or line.lstrip().startswith("#") or line.endswith(":"), line


def test_the_readmes_file_is_a_configuration(file: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    config = read(file, text)
    assert config.sources
    assert config.runs
    assert config.detectors
