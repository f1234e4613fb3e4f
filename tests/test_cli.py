"""`verl-monitor check` and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from monitor import __version__
from monitor.cli import main
from tests.helpers import CASES, LAB


@pytest.mark.parametrize(("path", "status", "word"), [
    (LAB / "ppo-healthy.jsonl", 0, "healthy"),
    (LAB / "ppo-kl-runaway.jsonl", 2, "critical"),
    (CASES / "32_bad_middle_line.jsonl", 0, "healthy"),
    (CASES / "31_nul_prefix.jsonl", 0, "healthy"),
])
def test_check_json_and_exit_status(path: Path, status: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--format", "json", str(path)]) == status
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"run", "steps", "algorithm", "verdict", "findings", "blind"}
    assert (report["run"], report["verdict"]) == (path.stem, word)
    for finding in report["findings"]:
        assert {"detector", "severity", "first_step", "last_step", "reason", "evidence"} <= set(finding)


def test_check_text_says_what_to_do_and_who_is_blind(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(LAB / "rloo-advantage-explosion.jsonl")])
    text = capsys.readouterr().out
    assert text.startswith("rloo-advantage-explosion: critical")
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


def test_the_installed_command() -> None:
    command = [sys.executable, "-m", "monitor.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"verl-monitor {__version__}"


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(f"{sys.executable} -m monitor.cli check {CASES / '36_label_churn.jsonl'} | head -1",
                          shell=True, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    assert done.stdout.count("\n") == 1
