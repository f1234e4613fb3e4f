"""The command line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monitor import __version__, api, evaluate, placement_groups
from monitor.clock import steady_clock
from monitor.compare import command as compare
from monitor.config import (
    ADDRESS,
    COUNT,
    PATH,
    RAY,
    SECONDS,
    URL,
    Config,
    ConfigError,
    FileConfig,
    Kind,
    PrometheusConfig,
    SourceConfig,
    StdinConfig,
    example,
    load,
    understood,
)
from monitor.engine import Engine, EngineSettings
from monitor.model import Severity
from monitor.preflight import command as preflight
from monitor.probes.build import make_room
from monitor.replay import UnreadableError, recorded_files, replay_all
from monitor.run import RunView
from monitor.serve import listen, serve_config
from monitor.service import Service
from monitor.sources.file import FileSource

TOKEN = "VERL_MONITOR_TOKEN"
EXIT_HEALTHY, EXIT_WARNING, EXIT_CRITICAL, EXIT_UNREADABLE = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``verl-monitor``; returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level or "INFO",
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return int(arguments.call(arguments))
    except ConfigError as error:
        for line in error.errors:
            print(line, file=sys.stderr)
        return EXIT_UNREADABLE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-monitor", description="Training-health monitor for LLM reinforcement learning with verl.")
    parser.add_argument("--version", action="version", version=f"verl-monitor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="follow live logs and serve /metrics, the API and a page")
    serve.add_argument("source", nargs="*", metavar="SOURCE",
                       help="a log of verl's, or a directory of them; it may appear later; - is standard input, and "
                            "http://... a page of metrics. Without any the service takes what trainers send to it")
    serve.add_argument("--config", metavar="FILE", help="settings and more sources (see `verl-monitor config`); an "
                                                        "option given here goes before the same one there")
    _listen_option(serve)
    serve.add_argument("--run", help="name of the run, in place of the file's (one SOURCE only)")
    serve.add_argument("--project", help="name of the project of each SOURCE, in place of the directory's")
    serve.add_argument("--poll", type=_kind(SECONDS), metavar="SECONDS", help="how often to look (0.5)")
    serve.add_argument("--retain-ended", type=_kind(SECONDS), metavar="SECONDS",
                       help="how long an ended run stays on /metrics (900)")
    serve.add_argument("--max-runs", type=_kind(COUNT), metavar="N", help="runs kept at once (500)")
    serve.add_argument("--ray-address", type=_kind(RAY), metavar="ADDRESS",
                       help="the run's Ray cluster: HOST:PORT of its head or auto for its state and a probe on every "
                            "node, or its dashboard's URL for the state alone")
    serve.add_argument("--checkpoint-dir", type=_kind(PATH), metavar="DIR",
                       help="where to look for checkpoints: the job's working directory, or trainer.default_local_dir")
    serve.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    serve.set_defaults(call=_serve)

    node = commands.add_parser("node", help="export this machine's GPUs alone, for a node without a monitor of its own")
    _listen_option(node)
    node.set_defaults(call=_node, log_level="INFO")

    config = commands.add_parser("config", help="print an example of a configuration file, or check one", epilog=(
        "Exit status: 0 good, 3 not; then every error is told with its line."))
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--example", action="store_true", help="print all settings with meanings and defaults")
    what.add_argument("--check", metavar="FILE", help="check a file and print what is in force, environment included")
    config.set_defaults(call=_config, log_level="WARNING")

    check = commands.add_parser("check", help="judge recorded runs", epilog=(
        "Exit status: 0 healthy, 1 warning, 2 critical, 3 something could not be read."))
    check.add_argument("path", nargs="+", type=Path, metavar="PATH", help="a recorded log or a directory of them")
    check.add_argument("--config", metavar="FILE", help="names and detectors of runs as a service with this file has")
    check.add_argument("--format", choices=["text", "json"], default="text")
    check.set_defaults(call=_check, log_level="WARNING")

    measure = commands.add_parser("evaluate", help="measure the detectors on labelled runs", epilog=(
        "Exit status: 0 measured and within the budget, 1 over it, 3 something could not be read."))
    measure.add_argument("corpus", type=Path, metavar="CORPUS", help="a directory with labels.json and recorded runs")
    measure.add_argument("--format", choices=["text", "json"], default="text")
    measure.add_argument("--budget", type=Path, metavar="FILE",
                         help='greatest allowed figures as JSON, such as {"missed": 0, "false_critical": 0}')
    measure.add_argument("--jobs", type=_kind(COUNT), default=os.cpu_count() or 1, metavar="N",
                         help="processes (one for each core)")
    measure.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster in their place; local starts Ray here")
    measure.set_defaults(call=_evaluate, log_level="WARNING")

    groups = commands.add_parser("placement-groups", help="list Ray's placement groups, and remove leaked ones",
                                 epilog="Exit status: 0 none is leaked (any more), 1 some are, 3 it failed.")
    placement_groups.add_arguments(groups, _kind(RAY))
    groups.set_defaults(call=placement_groups.run, log_level="WARNING")

    before = commands.add_parser("preflight", help="check a configuration of verl's, and the environment, before a run",
                                 epilog="Exit status: 0 pass, 1 warnings, 2 errors, 3 unreadable.")
    preflight.add_arguments(before)
    before.set_defaults(call=preflight.run, log_level="WARNING")

    two = commands.add_parser("compare", help="memory, time, KL, reward of two runs, with an interval of each change",
                              epilog="Exit status: 0 compared, 3 something could not be read.")
    compare.add_arguments(two)
    two.set_defaults(call=compare.run, log_level="WARNING")

    demo = commands.add_parser("demo", help="recorded runs, healthy and failing, through the whole service")
    _listen_option(demo)
    demo.add_argument("--pace", type=_kind(SECONDS), default=3.0, metavar="N", help="steps a second (3)")
    demo.set_defaults(call=_demo, log_level="WARNING")
    return parser


def _listen_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", type=_kind(ADDRESS), metavar="HOST:PORT",
                        help=f"address to serve on ({Config().listen})")


def _kind(kind: Kind) -> Callable[[str], Any]:
    """An option that is checked as the setting of the configuration file is."""
    def parse(text: str) -> Any:
        try:
            return kind.parse(text, "")
        except (ValueError, LookupError):
            raise argparse.ArgumentTypeError(f"expected {kind.expected}, got {text!r}") from None
    return parse


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.run and (len(arguments.source) != 1 or Path(arguments.source[0]).is_dir()):
        print("verl-monitor: --run names one run, so it goes with one SOURCE that is no directory", file=sys.stderr)
        return EXIT_UNREADABLE
    config = load(arguments.config, os.environ)
    given = [_source(text, arguments.run, arguments.project) for text in arguments.source]
    config = replace(
        config, sources=(*config.sources, *given), listen=arguments.listen or config.listen,
        poll_seconds=arguments.poll or config.poll_seconds, token=os.environ.get(TOKEN, "") or config.token,
        limits=replace(config.limits, max_runs=arguments.max_runs or config.limits.max_runs),
        probes=replace(config.probes, ray_address=arguments.ray_address or config.probes.ray_address,
                       checkpoint_dir=arguments.checkpoint_dir or config.probes.checkpoint_dir),
        retention=replace(config.retention, ended_seconds=arguments.retain_ended or config.retention.ended_seconds))
    if sum(isinstance(source, StdinConfig) for source in config.sources) > 1:
        raise ConfigError(["SOURCE: expected standard input in one source at most, got it again"])
    logging.getLogger().setLevel(arguments.log_level or config.log_level)
    return serve_config(config)


def _node(arguments: argparse.Namespace) -> int:
    config = load(None, os.environ)
    return serve_config(replace(config, listen=arguments.listen or config.listen, push=replace(
        config.push, enabled=False), probes=replace(config.probes, checkpoints=False, ray_address=None)))


def _source(text: str, run: str | None, project: str | None) -> SourceConfig:
    if text == "-":
        return StdinConfig(stdin=True, run=run, project=project)
    if text.startswith(("http://", "https://")):
        try:
            return PrometheusConfig(prometheus=URL.parse(text, ""), run=run, project=project)
        except ValueError:
            raise ConfigError([f"SOURCE: expected {URL.expected}, got {text!r}"]) from None
    return FileConfig(file=text, run=run, project=project)


def _config(arguments: argparse.Namespace) -> int:
    sys.stdout.write(example() if arguments.check is None else understood(load(arguments.check, os.environ)))
    return EXIT_HEALTHY


def _check(arguments: argparse.Namespace) -> int:
    files: list[Path] = []
    errors: list[str] = []
    for path in arguments.path:
        try:
            files.extend(recorded_files(path))
        except UnreadableError as error:
            errors.append(str(error))
    config = load(arguments.config, os.environ) if arguments.config else Config()
    recordings, skipped = replay_all(files, config)
    if all(path.is_dir() for path in arguments.path) and recordings:
        # A directory may hold other things than verl's logs: told, but no reason to fail.
        for message in skipped:
            print(f"verl-monitor: skipped {message}", file=sys.stderr)
    else:
        errors += skipped
    reports = [api.check_report(view) | {"file": str(recording.files[0]), "format": recording.kind.name}
               for recording in recordings for view in recording.runs]
    if arguments.format == "json":
        one = len(reports) == 1 and len(files) == 1
        sys.stdout.write(api.dumps(reports[0] if one else reports, indent=True).decode() + "\n")
    else:
        for recording in recordings:
            more = f" and {len(recording.files) - 1} more of its runs" if len(recording.files) > 1 else ""
            print(f"{recording.files[0]}{more}: {recording.kind.name} ({recording.kind.why})")
            for view in recording.runs:
                print("\n".join(_report_lines(view)))
    for message in errors:
        print(f"verl-monitor: {message}", file=sys.stderr)
    if errors:
        return EXIT_UNREADABLE
    verdicts = {report["verdict"] for report in reports}
    return EXIT_CRITICAL if "critical" in verdicts else EXIT_WARNING if "warning" in verdicts else EXIT_HEALTHY


def _report_lines(view: RunView) -> list[str]:
    lines = [f"{view.run}: {api.check_report(view)['verdict']}  ({view.steps} steps, {view.algorithm})"]
    specs = {item.spec.id: item.spec for item in view.detectors}
    for incident in view.incidents:
        spec = specs[incident.detector]
        critical = f", critical at {incident.critical_step}" if incident.critical_step is not None else ""
        ended = f", {incident.ended}" if incident.ended else ", until the end"
        lines += [f"  {incident.severity.value.upper():8} {spec.title} ({incident.detector}), steps "
                  f"{incident.first_step} to {incident.last_step}, raised at {incident.raised_step}{critical}{ended}",
                  f"    {incident.reason}"]
        if incident.severity is Severity.CRITICAL or len(view.incidents) == 1:
            lines += [f"    {number}. {action}" for number, action in enumerate(spec.actions, 1)]
    for item in view.detectors:
        if item.missing:
            more = f" and {len(item.missing) - 3} more" if len(item.missing) > 3 else ""
            shown = ", ".join(item.missing[:3]) + more
            lines.append(f"  blind     {item.spec.id}: not logged: {shown}")
    return lines


def _evaluate(arguments: argparse.Namespace) -> int:
    try:
        budget = json.loads(arguments.budget.read_text("utf-8")) if arguments.budget else {}
        labels, errors = evaluate.read_labels(arguments.corpus)
        figures = evaluate.evaluate(labels, evaluate.runner(arguments.jobs, arguments.ray))
        exceeded = evaluate.over_budget(figures, budget)
    except (OSError, ValueError, AttributeError, UnreadableError) as error:
        print(f"verl-monitor: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    if arguments.format == "json":
        sys.stdout.write(api.dumps(figures | {"over_budget": exceeded}, indent=True).decode() + "\n")
    else:
        print("\n".join([*evaluate.text_of(figures), *(f"OVER BUDGET {line}" for line in exceeded)]))
    errors += figures["errors"]
    for message in errors:
        print(f"verl-monitor: {message}", file=sys.stderr)
    return EXIT_UNREADABLE if errors else EXIT_WARNING if exceeded else EXIT_HEALTHY


def _demo(arguments: argparse.Namespace) -> int:
    from monitor import demo, demo_machine

    address = arguments.listen or Config().listen
    clock = steady_clock()
    room = demo_machine.recorded_room(clock, demo.rows_of_the_hang() / arguments.pace)
    intro = [
        "", "Seven recorded runs of the real verl trainer are now replayed. What you will see:",
        *demo.expected_story(arguments.pace), "",
        f"Open  http://{address}/           all runs and their verdicts",
        f"      http://{address}/metrics    for Prometheus",
        f"      http://{address}/api/v1/runs/ppo-kl-runaway    one run as JSON", "",
        *([] if room is None else [
            f"      http://{address}/machine    a GPU and a Ray cluster; recorded ones, and marked so, since this "
            "machine", "      shows no GPU: of a run that hangs as gpu-ppo-hang does", ""]),
        "Ctrl-C ends it.",
    ]
    with demo.playing(arguments.pace) as folder:
        engine = Engine(EngineSettings(retain_ended_seconds=86400.0))
        service = Service(engine=engine, sources=[FileSource(folder, clock=clock)], clock=clock, room=room or make_room(
            Config().probes, clock))
        return listen(service, address, intro=intro)


if __name__ == "__main__":
    sys.exit(main())
