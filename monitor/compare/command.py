"""`verl-monitor compare RUN_A RUN_B`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monitor.compare.figures import compare_runs, wanted
from monitor.compare.picture import PictureError, check, draw
from monitor.compare.report import as_json, as_text
from monitor.compare.rows import read_record
from monitor.replay import UnreadableError

EXIT_COMPARED, EXIT_UNREADABLE = 0, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("a", type=Path, metavar="RUN_A", help="a run's log, or a directory with the logs of one run")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="the run that is compared with it")
    parser.add_argument("--run-a", default="", metavar="NAME", help="which run, where RUN_A holds several")
    parser.add_argument("--run-b", default="", metavar="NAME", help="which run, where RUN_B holds several")
    parser.add_argument("--from", dest="first", type=int, metavar="STEP", help="first step that takes part")
    parser.add_argument("--to", dest="last", type=int, metavar="STEP", help="last step that takes part")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--picture", type=Path, metavar="FILE",
                        help="draw both runs too, as .svg or .png (needs matplotlib, the extra pictures)")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the exit status: 0 compared, whatever the result, 3 something could not be read or drawn."""
    try:
        if arguments.first is not None and arguments.last is not None and arguments.first > arguments.last:
            raise UnreadableError(f"--to: expected a step from {arguments.first} (--from) on, got {arguments.last}")
        if arguments.picture:
            check(arguments.picture)
        a = read_record(arguments.a, wanted, arguments.run_a, "--run-a")
        b = read_record(arguments.b, wanted, arguments.run_b, "--run-b")
        comparison = compare_runs(a, b, arguments.first, arguments.last)
        if not comparison.figures:
            raise UnreadableError(f"{arguments.a}, {arguments.b}: expected a metric that both runs log in these steps, "
                                  "got none")
        if arguments.picture:
            draw(comparison, arguments.picture, arguments.first, arguments.last)
    except (UnreadableError, PictureError) as error:
        print(f"verl-monitor: {error}", file=sys.stderr)  # noqa: T201 - a command
        return EXIT_UNREADABLE
    print((as_json if arguments.format == "json" else as_text)(comparison))  # noqa: T201 - a command
    return EXIT_COMPARED
