"""A log that is piped into the service."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import CASES, LAB, REPOSITORY, free_port, wait_for
from tests.servers import get, get_json

CONSOLE_LOG = CASES.parent / "console" / "ppo-skipped-updates.console.log"


@pytest.mark.parametrize("log", [CONSOLE_LOG, LAB / "ppo-skipped-updates.jsonl"])
def test_a_piped_log_is_a_run_that_ends_with_it(log: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "monitor.cli", "serve", "--listen", f"127.0.0.1:{port}", "--run", "piped", "-"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             cwd=REPOSITORY)
    assert child.stdin
    assert child.stderr
    try:
        wait_for(lambda: get(f"{url}/-/ready")[0] == 200, 10, "ready")
        child.stdin.write(log.read_bytes())
        child.stdin.flush()
        wait_for(lambda: (get_json(f"{url}/api/v1/runs/piped") or {}).get("last_step") == 60, 10, "step 60")
        assert get_json(f"{url}/api/v1/runs/piped")["state"] == "running"
        assert get_json(f"{url}/api/v1/runs/piped")["findings"] == ["non_finite"]
        child.stdin.close()
        wait_for(lambda: get_json(f"{url}/api/v1/runs/piped")["state"] == "finished", 10, "the end")
        assert get(f"{url}/-/healthy")[0] == 200, "the service outlives its input"
    finally:
        child.terminate()
        child.wait(10)
        child.stderr.close()
        if not child.stdin.closed:
            child.stdin.close()


def test_sigterm_ends_it_while_the_pipe_is_silent() -> None:
    port = free_port()
    command = [sys.executable, "-m", "monitor.cli", "serve", "--listen", f"127.0.0.1:{port}", "-"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             cwd=REPOSITORY)
    try:
        wait_for(lambda: get(f"http://127.0.0.1:{port}/-/ready")[0] == 200, 10, "ready")
        started = time.monotonic()
        child.terminate()
        assert child.wait(10) == 0
        assert time.monotonic() - started < 5.0
    finally:
        child.kill()
        child.wait()
        assert child.stdin
        child.stdin.close()
