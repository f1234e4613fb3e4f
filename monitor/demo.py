"""The demo: bundled recordings of real verl runs, replayed line by line through the real source.

A child process writes the recordings as verl would (one row a time into a file it holds open), so the monitor sees
what it sees beside a trainer: files that grow, close, and one that stays open while nothing comes any more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoRun:
    """A bundled recording and what it shows. ``hangs``: its file stays open after the last row."""

    name: str
    shows: str
    hangs: bool = False


RUNS = (
    DemoRun("ppo-healthy", "PPO with a critic, all well: stays silent"),
    DemoRun("grpo-healthy", "GRPO, reward and KL rise together: stays silent"),
    DemoRun("ppo-skipped-updates", "non_finite, critical at step 2: only the gradient norm is not a number"),
    DemoRun("ppo-kl-runaway", "kl_runaway, critical about step 23: KL climbs, policy loss and reward are flat"),
    DemoRun("rloo-advantage-explosion", "advantage_explosion, critical about step 49: an unbounded reward"),
    DemoRun("ppo-critic-swing", "critic_loss_oscillation, critical about step 51: the reward's scale jumps"),
    DemoRun("gpu-ppo-hang", "rollout_stall, critical 60 s after its last step (46): the rollout never answers", True),
)
ROWS_PER_SECOND = 3.0


def expected_story(rows_per_second: float) -> list[str]:
    """What will happen, a line per run."""
    return [f"  {run.name:26} {run.shows}" for run in RUNS] + [
        f"  Each run plays at {rows_per_second:g} steps a second, and is finished when its file is closed."]


def rows_of_the_hang() -> int:
    """Rows that are written before the run that hangs does."""
    return max(len(recording(run.name).splitlines()) for run in RUNS if run.hangs)


def recording(name: str) -> bytes:
    """A bundled recording."""
    return (resources.files("monitor") / "demo_runs" / f"{name}.jsonl").read_bytes()


@contextmanager
def playing(rows_per_second: float = ROWS_PER_SECOND) -> Iterator[Path]:
    """A directory in which the recordings are being written by a child process, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="verl-monitor-demo-") as folder:
        logs = Path(folder) / "demo"
        logs.mkdir()
        command = [sys.executable, "-m", "monitor.demo", str(logs), str(rows_per_second)]
        # Its standard input is a pipe that closes when this process ends, however it ends.
        writer = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            yield logs
        finally:
            writer.terminate()
            writer.wait(5)
            if writer.stdin:
                writer.stdin.close()


def _write(folder: Path, rows_per_second: float) -> None:
    """The child: write all recordings side by side, then hold open the one that hangs until told to end."""
    with ExitStack() as kept_open:
        playing_runs = []
        for run in RUNS:
            file = (folder / f"{run.name}.jsonl").open("wb", buffering=0)
            playing_runs.append((run, file, iter(recording(run.name).splitlines(keepends=True))))
        while playing_runs:
            for entry in list(playing_runs):
                run, file, rows = entry
                row = next(rows, None)
                if row is not None:
                    file.write(row)
                    continue
                playing_runs.remove(entry)
                if run.hangs:
                    kept_open.enter_context(file)
                else:
                    file.close()
            time.sleep(1 / rows_per_second)
        sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows_per_second", type=float)
    arguments = parser.parse_args()
    _write(arguments.folder, arguments.rows_per_second)
