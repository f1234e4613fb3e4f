"""Render every generated file of alerts and runbooks: ``python -m alerts.render``; ``--check`` only compares.

    python -m alerts.render --webhook http://host:9561 --out DIR    # for an installation of your own
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alerts.alertmanager import render_alertmanager
from alerts.finding_cases import finding_cases
from alerts.monitor_alerts import MONITOR_ALERTS
from alerts.monitor_cases import monitor_cases
from alerts.options import DEFAULTS, SPECS, Options, seconds
from alerts.rules import render_rules
from alerts.runbooks import render_runbooks
from alerts.yaml_text import GENERATED, MARK, dump

__all__ = ["Options", "generated", "main", "render_alertmanager", "render_rules", "render_runbooks"]

REPOSITORY = Path(__file__).parent.parent
_TESTS, _RUNBOOKS = Path("alerts/tests"), Path("docs/runbooks")


def generated(options: Options = DEFAULTS) -> dict[Path, str]:
    """Path from the repository -> text of every generated file."""
    cases = {spec.alert: finding_cases(spec, options) for spec in SPECS}
    cases |= {alert.name: monitor_cases(alert, options) for alert in MONITOR_ALERTS}
    return {
        Path("alerts/verl-monitor.rules.yml"): render_rules(options),
        Path("alerts/alertmanager.yml"): render_alertmanager(options.webhook),
        **{_TESTS / f"{name}.test.yml": GENERATED + dump(case) for name, case in cases.items()},
        **{_RUNBOOKS / name: text for name, text in render_runbooks().items()},
    }


def _left_over(root: Path, files: dict[Path, str]) -> list[Path]:
    """Tests and pages of alerts that are no more."""
    there = [*(root / _TESTS).glob("*.yml"), *(root / _RUNBOOKS).glob("*.md")]
    return sorted(path.relative_to(root) for path in there
                  if path.relative_to(root) not in files and MARK in path.read_text("utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; returns the exit status."""
    arguments = _parser().parse_args(argv)
    options = Options(monitor_url=arguments.monitor_url, runbook_base=arguments.runbook_base,
                      webhook=arguments.webhook, job=arguments.job, interval=arguments.interval,
                      keep_firing_for=arguments.keep_firing_for)
    files = generated(options)
    differs = [path for path, text in files.items()
               if not (file := arguments.out / path).exists() or file.read_text("utf-8") != text]
    left_over = _left_over(arguments.out, files)
    for path in [] if arguments.check else differs:
        (arguments.out / path).parent.mkdir(parents=True, exist_ok=True)
        (arguments.out / path).write_text(files[path], "utf-8")
    for path in [] if arguments.check else left_over:
        (arguments.out / path).unlink()
    for path in differs:
        print(f"{'differs' if arguments.check else 'written'}: {path}")
    for path in left_over:
        print(f"{'no alert has it' if arguments.check else 'removed'}: {path}")
    return int(arguments.check and bool(differs or left_over))


def _time(text: str) -> str:
    if text:
        seconds(text)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m alerts.render", description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    add("--out", type=Path, default=REPOSITORY, metavar="DIR", help="write alerts/ and docs/runbooks/ below DIR")
    add("--monitor-url", default=DEFAULTS.monitor_url, metavar="URL",
        help=f"where a reader's browser finds the monitor ({DEFAULTS.monitor_url})")
    add("--runbook-base", default=DEFAULTS.runbook_base, metavar="URL",
        help="where the runbooks are, if not with the monitor (MONITOR_URL/runbooks)")
    add("--webhook", default=DEFAULTS.webhook, metavar="URL",
        help=f"Alertmanager posts to URL/page and URL/notice ({DEFAULTS.webhook})")
    add("--job", default=DEFAULTS.job, help=f"the monitor's job in Prometheus ({DEFAULTS.job})")
    add("--interval", type=_time, default=DEFAULTS.interval, metavar="TIME",
        help="of the rule groups (Prometheus's evaluation_interval)")
    add("--keep-firing-for", type=_time, default=DEFAULTS.keep_firing_for, metavar="TIME",
        help=f"how long an alert outlives gaps ({DEFAULTS.keep_firing_for})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
