"""`verl-monitor check` and the command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from monitor import __version__
from monitor.cli import main
from monitor.config import Config, FileConfig, PrometheusConfig, StdinConfig, load
from monitor.config.settings import Address
from tests.helpers import CASES, LAB, wait_for
from tests.servers import get, get_json, monitor


@pytest.mark.parametrize(("path", "status", "word"), [
    (LAB / "ppo-healthy.jsonl", 0, "healthy"),
    (LAB / "ppo-kl-runaway.jsonl", 2, "critical"),
    (CASES / "32_bad_middle_line.jsonl", 0, "healthy"),
    (CASES / "31_nul_prefix.jsonl", 0, "healthy"),
])
def test_check_json_and_exit_status(path: Path, status: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--format", "json", str(path)]) == status
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"run", "steps", "algorithm", "verdict", "findings", "blind", "file", "format"}
    assert (report["run"], report["verdict"]) == (path.stem, word)
    for finding in report["findings"]:
        assert {"detector", "severity", "first_step", "last_step", "reason", "evidence"} <= set(finding)


def test_check_text_says_what_to_do_and_who_is_blind(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(LAB / "rloo-advantage-explosion.jsonl")])
    text = capsys.readouterr().out
    assert text.splitlines()[1].startswith("rloo-advantage-explosion: critical")
    assert "1. bound the reward" in text
    assert "blind     critic_loss_oscillation: not logged: critic/vf_loss" in text


def test_check_a_warning_exits_with_1(tmp_path: Path) -> None:
    log = tmp_path / "warned.jsonl"
    with log.open("w") as file:
        for step in range(20):
            kl = 0.5 if step in (15, 17, 18) else 0.001
            file.write(json.dumps({"step": step, "data": {"actor/pg_loss": 0.1, "actor/ppo_kl": kl}}) + "\n")
    assert main(["check", str(log)]) == 1


def test_check_a_directory_with_something_else_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.jsonl").write_bytes((LAB / "ppo-healthy.jsonl").read_bytes())
    (tmp_path / "other.jsonl").write_text('{"time": 1}\n')
    assert main(["check", "--format", "json", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [report["run"] for report in json.loads(out)] == ["good"]
    assert "skipped" in err
    assert "other.jsonl: not one row" in err


@pytest.mark.parametrize("content", [None, b"", b"\0\0\0", b"[1, 2]\n", b'{"step": "x", "data": {}}\n', b"\xff\xfe\n"])
def test_check_what_cannot_be_read_exits_with_3(tmp_path: Path, content: bytes | None,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    if content is not None:
        log.write_bytes(content)
    assert main(["check", str(log)]) == 3
    assert "expected" in capsys.readouterr().err


def test_case_36_two_thousand_runs_of_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--format", "json", str(CASES / "36_label_churn.jsonl")]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2000


@pytest.mark.parametrize("arguments", [[], ["check"], ["serve", "--listen", "nowhere", "x"],
                                       ["serve", "--poll", "-1", "x"], ["check", "--format", "pdf", "x"]])
def test_wrong_use_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_run_name_goes_with_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--run", "x", str(tmp_path)]) == 3
    assert "--run names one run" in capsys.readouterr().err


BAD_CONFIG = "poll_seconds: 0\nlimits:\n  max_run: 1\ndetectors: {kl: {}}\n"


@pytest.mark.parametrize("arguments", [["serve", "--config", "FILE"], ["config", "--check", "FILE"],
                                       ["check", "--config", "FILE", str(LAB)]])
def test_a_bad_configuration_is_told_whole(arguments: list[str], tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yml"
    file.write_text(BAD_CONFIG)
    assert main([str(file) if argument == "FILE" else argument for argument in arguments]) == 3
    out, err = capsys.readouterr()
    starts = [f"{file}:{start}: expected" for start in ("1: poll_seconds", "3: limits.max_run", "4: detectors.kl")]
    assert [line.startswith(start) for line, start in zip(err.splitlines(), starts, strict=True)] == [True] * 3
    assert out == ""


def test_the_example_is_a_configuration_and_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["config", "--example"]) == 0
    file = tmp_path / "example.yml"
    file.write_text(capsys.readouterr().out)
    monkeypatch.setenv("VERL_MONITOR_SERVE_LIMITS__MAX_RUNS", "7")
    assert main(["config", "--check", str(file)]) == 0
    assert "max_runs: 7\n" in capsys.readouterr().out
    monkeypatch.setenv("VERL_MONITOR_SERVE_MAXRUNS", "7")
    assert main(["config", "--check", str(file)]) == 3
    assert capsys.readouterr().err.startswith("VERL_MONITOR_SERVE_MAXRUNS: maxruns: expected a known setting")


def test_command_line_before_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # put back afterwards
    file = tmp_path / "monitor.yml"
    (tmp_path / "token").write_text("from-file")
    file.write_text("listen: 127.0.0.1:1\npoll_seconds: 1\nlog_level: ERROR\ntoken_file: token\n"
                    "limits: {max_runs: 1}\nretention: {ended_seconds: 1}\nsources: [{file: logs}]\n")
    seen: list[Config] = []
    levels: list[int] = []

    def kept(config: Config) -> int:
        seen.append(config)
        levels.append(logging.getLogger().level)
        return 0

    monkeypatch.setattr("monitor.cli.serve_config", kept)
    monkeypatch.delenv("VERL_MONITOR_TOKEN", raising=False)
    assert main(["serve", "--config", str(file)]) == 0
    for name, value in (("LISTEN", "127.0.0.1:2"), ("POLL_SECONDS", "2"), ("LIMITS__MAX_RUNS", "2"),
                        ("RETENTION__ENDED_SECONDS", "2")):
        monkeypatch.setenv(f"VERL_MONITOR_SERVE_{name}", value)
    monkeypatch.setenv("VERL_MONITOR_TOKEN", "from-environment")
    assert main(["serve", "--config", str(file), "-", "a.jsonl", "http://host/metrics"]) == 0
    assert main(["serve", "--config", str(file), "--listen", ":3", "--poll", "3", "--max-runs", "3", "--retain-ended",
                 "3", "--run", "x", "--project", "y", "--log-level", "DEBUG", "a.jsonl"]) == 0
    assert [(c.listen.port, c.poll_seconds, c.limits.max_runs, c.retention.ended_seconds, c.token) for c in seen] == [
        (1, 1, 1, 1, "from-file"), (2, 2, 2, 2, "from-environment"), (3, 3, 3, 3, "from-environment")]
    assert levels == [logging.ERROR, logging.ERROR, logging.DEBUG]
    logs = FileConfig(file=str(tmp_path / "logs"))
    assert [c.sources for c in seen] == [
        (logs,),
        (logs, StdinConfig(stdin=True), FileConfig(file="a.jsonl"), PrometheusConfig(prometheus="http://host/metrics")),
        (logs, FileConfig(file="a.jsonl", run="x", project="y"))]
    assert load(None, {"VERL_MONITOR_SERVE_LISTEN": "127.0.0.1:2"}) == Config(listen=Address("127.0.0.1", 2))


@pytest.mark.parametrize(("arguments", "message"), [
    (["-", "-"], "SOURCE: expected standard input in one source at most"),
    (["http://me:secret@host/"], "SOURCE: expected a URL such as"),
])
def test_sources_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 3
    assert capsys.readouterr().err.startswith(message)


def test_a_service_with_a_configuration(tmp_path: Path) -> None:
    """Names, detectors and push as the file says, its relative path from where it lies."""
    (tmp_path / "logs").mkdir()
    for name in ("ppo-kl-runaway", "ppo-healthy"):
        (tmp_path / "logs" / f"{name}.jsonl").write_bytes((LAB / f"{name}.jsonl").read_bytes())
    file = tmp_path / "monitor.yml"
    file.write_text("sources: [{file: logs, project: all}]\npush: {enabled: false}\n"
                    "runs: [{match: '*-runaway', detectors: {kl_runaway: {enabled: false}}},\n"
                    "       {match: ppo-healthy, name: good}]\n")
    with monitor(log=tmp_path / "out.log", options=["--config", str(file)]) as url:
        wait_for(lambda: {run["run"] for run in get_json(f"{url}/api/v1/runs")["runs"]} == {"good", "ppo-kl-runaway"},
                 what="both runs")
        runs = {name: get_json(f"{url}/api/v1/runs/{name}") for name in ("good", "ppo-kl-runaway")}
        assert {run["project"] for run in runs.values()} == {"all"}
        watched = {name: {item["detector"] for item in run["detectors"]} for name, run in runs.items()}
        assert watched["good"] - watched["ppo-kl-runaway"] == {"kl_runaway"}
        assert "push" not in get(f"{url}/metrics")[1].decode()


def test_check_judges_by_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "monitor.yml"
    file.write_text("runs: [{match: ppo-kl-runaway, name: known, detectors: {kl_runaway: {enabled: false}}}]")
    main(["check", "--format", "json", "--config", str(file), str(LAB / "ppo-kl-runaway.jsonl")])
    report = json.loads(capsys.readouterr().out)
    assert report["run"] == "known"
    assert "kl_runaway" not in {finding["detector"] for finding in report["findings"]}


def test_the_installed_command() -> None:
    command = [sys.executable, "-m", "monitor.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"verl-monitor {__version__}"


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(f"{sys.executable} -m monitor.cli check {CASES / '36_label_churn.jsonl'} | head -1",
                          shell=True, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    assert done.stdout.count("\n") == 1
