"""A log's format is told by its content, in a directory of mixed files too, live and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitor.cli import main
from monitor.replay import replay
from monitor.sources.formats import CONSOLE, JSONL, detect
from tests.helpers import CASES, LAB, wait_for
from tests.servers import get_json, monitor

CONSOLE_LOG = CASES.parent / "console" / "ppo-skipped-updates.console.log"


@pytest.mark.parametrize(("head", "expected"), [
    (b"", None), (b"\n\n", None), (b"hello\nworld\n", None), (b'{"step": 1, "data": {}}\n', JSONL),
    (b'\0\0\0{"step": 1', JSONL), (b"step:1 - actor/pg_loss:0.1 - actor/lr:0.000\n", CONSOLE),
    (b"\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m step:0 - val-core/x/acc/mean@1:np.float64(0.5)\n", CONSOLE),
])
def test_detection(head: bytes, expected: object) -> None:
    assert detect(head) is expected


def test_the_console_and_the_file_log_of_one_run_have_the_same_verdict() -> None:
    [console], [file] = replay(CONSOLE_LOG), replay(LAB / "ppo-skipped-updates.jsonl")
    assert (console.steps, console.last_step) == (file.steps, file.last_step)
    assert [(i.detector, i.severity, i.first_step, i.reason) for i in console.incidents] == [
        (i.detector, i.severity, i.first_step, i.reason) for i in file.incidents]
    assert console.values["gradient_warnings"] > 0


def test_check_takes_a_directory_of_mixed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "console.log").write_bytes(CONSOLE_LOG.read_bytes())
    (tmp_path / "file.jsonl").write_bytes((LAB / "ppo-healthy.jsonl").read_bytes())
    (tmp_path / "nginx.log").write_text("GET / 200\n")
    (tmp_path / "notes.txt").write_text("step:1 - a:1\n")
    assert main(["check", "--format", "json", str(tmp_path)]) == 2
    reports = {report["run"]: report["verdict"] for report in json.loads(capsys.readouterr().out)}
    assert reports == {"console": "critical", "file": "healthy"}
    main(["check", str(tmp_path)])
    out = capsys.readouterr().out
    assert f"{tmp_path}/console.log: verl's console log (it has step lines" in out
    assert f"{tmp_path}/file.jsonl: verl's file log (its lines are JSON)" in out


def test_a_console_log_is_followed_live_beside_others(tmp_path: Path) -> None:
    lines = CONSOLE_LOG.read_bytes().splitlines(keepends=True)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "other.log").write_text("nothing of verl's\n")
    with monitor(logs, log=tmp_path / "monitor.log") as url, (logs / "train.log").open("wb", buffering=0) as file:
        for part in range(0, len(lines), 40):
            file.write(b"".join(lines[part:part + 40]))
        wait_for(lambda: (get_json(f"{url}/api/v1/runs/train") or {}).get("last_step") == 60, 10, "step 60")
        assert get_json(f"{url}/api/v1/runs/train")["findings"] == ["non_finite"]
        assert [run["run"] for run in get_json(f"{url}/api/v1/runs")["runs"]] == ["train"]
    assert "is read as verl's console log" in (tmp_path / "monitor.log").read_text()


def test_a_named_file_that_is_empty_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "slurm-17"
    log.touch()
    with monitor(log, log=tmp_path / "monitor.log") as url, log.open("wb", buffering=0) as file:
        file.write(CONSOLE_LOG.read_bytes())
        wait_for(lambda: (get_json(f"{url}/api/v1/runs/slurm-17") or {}).get("last_step") == 60, 10, "step 60")
