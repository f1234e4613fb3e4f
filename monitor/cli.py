"""The command line."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from monitor import __version__, api
from monitor.clock import steady_clock
from monitor.engine import Engine, EngineSettings
from monitor.model import Severity
from monitor.replay import UnreadableError, recorded_files, replay_all
from monitor.run import RunView
from monitor.service import Service, create_app
from monitor.sources import Source
from monitor.sources.file import FileSource
from monitor.sources.push import PushSource
from monitor.sources.stdin import StdinSource

DEFAULT_LISTEN = "127.0.0.1:9560"
EXIT_HEALTHY, EXIT_WARNING, EXIT_CRITICAL, EXIT_UNREADABLE = 0, 1, 2, 3
SHUTDOWN_SECONDS = 4.0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``verl-monitor``; returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=getattr(arguments, "log_level", "INFO"),
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return int(arguments.call(arguments))
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
    serve.add_argument("source", nargs="*", type=Path, metavar="SOURCE",
                       help="a log of verl's file logger, or a directory of them; it may appear later; - is "
                            "standard input. Without any the service takes what trainers send to it")
    _listen_option(serve)
    serve.add_argument("--run", help="name of the run, in place of the file's (one file only)")
    serve.add_argument("--project", help="name of the project, in place of the directory's")
    serve.add_argument("--poll", type=_positive, default=0.5, metavar="SECONDS", help="how often to look (0.5)")
    serve.add_argument("--retain-ended", type=_positive, default=900.0, metavar="SECONDS",
                       help="how long an ended run stays on /metrics (900)")
    serve.add_argument("--max-runs", type=int, default=500, metavar="N", help="runs kept at once (500)")
    serve.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    serve.set_defaults(call=_serve)

    check = commands.add_parser("check", help="judge recorded runs", epilog=(
        "Exit status: 0 healthy, 1 warning, 2 critical, 3 something could not be read."))
    check.add_argument("path", nargs="+", type=Path, metavar="PATH", help="a recorded log or a directory of them")
    check.add_argument("--format", choices=["text", "json"], default="text")
    check.set_defaults(call=_check, log_level="WARNING")

    demo = commands.add_parser("demo", help="recorded runs, healthy and failing, through the whole service")
    _listen_option(demo)
    demo.add_argument("--pace", type=_positive, default=3.0, metavar="N", help="steps a second (3)")
    demo.set_defaults(call=_demo, log_level="WARNING")
    return parser


def _listen_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", type=_address, default=_address(DEFAULT_LISTEN), metavar="HOST:PORT",
                        help=f"address to serve on ({DEFAULT_LISTEN})")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT such as {DEFAULT_LISTEN}, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.run and (len(arguments.source) != 1 or arguments.source[0].is_dir()):
        print("verl-monitor: --run names one run, so it goes with one file, not with a directory or several sources",
              file=sys.stderr)
        return EXIT_UNREADABLE
    clock = steady_clock()
    sources: list[Source] = [
        StdinSource(sys.stdin.buffer, clock, arguments.run or "stdin", arguments.project or "") if str(path) == "-" else
        FileSource(path, clock=clock, run=arguments.run, project=arguments.project, poll_seconds=arguments.poll,
                   name=name)
        for path, name in zip(arguments.source, _source_names(arguments.source), strict=True)]
    engine = Engine(EngineSettings(max_runs=arguments.max_runs, retain_ended_seconds=arguments.retain_ended))
    token = os.environ.get("VERL_MONITOR_TOKEN", "")
    # Whoever reaches the port could write runs of their own, so without a token only this host may.
    push = PushSource(clock) if token or arguments.listen[0] in ("127.0.0.1", "::1", "localhost") else None
    return _listen(Service(engine=engine, sources=sources, clock=clock, push=push, token=token), arguments.listen)


def _source_names(paths: Sequence[Path]) -> list[str]:
    """Names of sources on /metrics: the last part of the path, and a number where that is not enough."""
    names: list[str] = []
    for path in paths:
        name = f"file:{path.absolute().name}"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def _listen(service: Service, address: tuple[str, int], *, intro: Sequence[str] = ()) -> int:
    """Serve until SIGTERM or SIGINT."""
    host, port = address
    try:
        # Bound here and not by uvicorn, so that a port in use is told in one line and port 0 can be told at all.
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        print(f"verl-monitor: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return EXIT_UNREADABLE
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(f"verl-monitor {__version__} on http://{shown}:{port}/  (metrics: http://{shown}:{port}/metrics)")
    for line in intro:
        print(line)
    sys.stdout.flush()
    config = uvicorn.Config(create_app(service), log_level="warning", access_log=False,
                            timeout_graceful_shutdown=2, lifespan="on")
    server = _Server(config)
    server.run(sockets=[listener])
    return EXIT_HEALTHY if server.started else EXIT_UNREADABLE


class _Server(uvicorn.Server):
    """A server whose end cannot be held up: a thread that hangs in a dead network file system would be waited for
    without end by the interpreter."""

    def handle_exit(self, sig: int, frame: object) -> None:
        # Not passed on: uvicorn would raise the signal again at its end and turn a clean end into a death by signal.
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        deadline = threading.Timer(SHUTDOWN_SECONDS, os._exit, (0,))
        deadline.daemon = True
        deadline.start()


def _check(arguments: argparse.Namespace) -> int:
    files: list[Path] = []
    errors: list[str] = []
    for path in arguments.path:
        try:
            files.extend(recorded_files(path))
        except UnreadableError as error:
            errors.append(str(error))
    views, skipped = replay_all(files)
    if all(path.is_dir() for path in arguments.path) and views:
        # A directory may hold other things than verl's logs: told, but no reason to fail.
        for message in skipped:
            print(f"verl-monitor: skipped {message}", file=sys.stderr)
    else:
        errors += skipped
    reports = [api.check_report(view) for view in views]
    if arguments.format == "json":
        one = len(reports) == 1 and len(files) == 1
        sys.stdout.write(api.dumps(reports[0] if one else reports, indent=True).decode() + "\n")
    else:
        for view, report in zip(views, reports, strict=True):
            print("\n".join(_report_lines(view, report)))
    for message in errors:
        print(f"verl-monitor: {message}", file=sys.stderr)
    if errors:
        return EXIT_UNREADABLE
    verdicts = {report["verdict"] for report in reports}
    return EXIT_CRITICAL if "critical" in verdicts else EXIT_WARNING if "warning" in verdicts else EXIT_HEALTHY


def _report_lines(view: RunView, report: dict[str, object]) -> list[str]:
    lines = [f"{view.run}: {report['verdict']}  ({view.steps} steps, {view.algorithm})"]
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


def _demo(arguments: argparse.Namespace) -> int:
    from monitor import demo

    host, port = arguments.listen
    intro = [
        "", "Seven recorded runs of the real verl trainer are now replayed. What you will see:",
        *demo.expected_story(arguments.pace), "",
        f"Open  http://{host}:{port}/           all runs and their verdicts",
        f"      http://{host}:{port}/metrics    for Prometheus",
        f"      http://{host}:{port}/api/v1/runs/ppo-kl-runaway    one run as JSON", "",
        "verl_gpu_memory_used_bytes has no samples here: recordings have no GPU, and none is probed.",
        "Ctrl-C ends it.",
    ]
    clock = steady_clock()
    with demo.playing(arguments.pace) as folder:
        engine = Engine(EngineSettings(retain_ended_seconds=86400.0))
        service = Service(engine=engine, sources=[FileSource(folder, clock=clock)], clock=clock)
        return _listen(service, arguments.listen, intro=intro)


if __name__ == "__main__":
    sys.exit(main())
