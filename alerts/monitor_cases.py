"""promtool tests of the alerts about the monitor itself: when each fires, and when it must not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from alerts.monitor_alert import MonitorAlert, monitor_annotations
from alerts.options import DEFAULTS, Options

_HERE = 'job="verl-monitor",instance="m:9560"'
_UP, _BUILD, _BEAT = f"up{{{_HERE}}}", f'verl_monitor_build_info{{{_HERE},version="1"}}', (
    f"verl_monitor_heartbeat_timestamp_seconds{{{_HERE}}}")
_SOURCE = f'{_HERE},source="logs"'
_SOURCE_UP, _READ = f"verl_monitor_source_up{{{_SOURCE}}}", (
    f"verl_monitor_source_last_read_timestamp_seconds{{{_SOURCE}}}")
_REJECTED = f"verl_monitor_source_rejected_total{{{_SOURCE},reason="
_ERRORS = f'verl_monitor_detector_errors_total{{{_HERE},detector="kl_runaway"}}'
_FILES_CUT = f"verl_monitor_source_files_cut{{{_SOURCE}}}"
_RAY_UP, _NODE_UP = f"verl_ray_up{{{_HERE}}}", f'verl_node_probe_up{{{_HERE},node="n"}}'
_RUNS_CUT, _SERIES_CUT = (f"verl_monitor_{what}_dropped_total{{{_HERE}}}" for what in ("runs", "series"))


def _runs(state: str) -> str:
    return f'verl_monitor_runs{{{_HERE},state="{state}"}}'


_ATTACH = f'verl_monitor_source_up{{{_HERE},source="attach"}}'
_M = (("job", "verl-monitor"), ("instance", "m:9560"))
_L = (*_M, ("source", "logs"))
_Fires = tuple[str, tuple[tuple[str, str], ...]]  # severity, labels


@dataclass(frozen=True, slots=True)
class Case:
    """Input series, one sample each 15 s, and what fires at which times: ``None`` for nothing."""

    name: str
    series: dict[str, str]
    expected: tuple[tuple[str, _Fires | None], ...]


_DOWN: _Fires = ("critical", _M)
_VANISHED: _Fires = ("critical", (("job", "verl-monitor"),))
_ENDED = {_runs("running"): "1x20 0x3 stale", _runs("starting"): "0x24 stale", _runs("stalled"): "0x24 stale",
          _runs("finished"): "0x20 1x3 stale"}

CASES: dict[str, tuple[Case, ...]] = {
    "VerlMonitorDown": (
        Case("(case 57 a) it stops to answer while a run is active", {_UP: "1 1 0x60", _runs("running"): "1 1 stale"},
             (("15s", None), ("2m15s", None), ("2m30s", _DOWN), ("15m", _DOWN))),
        Case("(case 57 a) it stops to answer, and nothing is known of runs", {_UP: "1 1 0x60"}, (("3m", _DOWN),)),
        Case("(case 57 b) its series end while a run is active",
             {_UP: "1x8 stale", _runs("running"): "1x8 stale"}, (("2m", None), ("5m", _VANISHED), ("30m", _VANISHED))),
        Case("(case 57 c) it never existed", {'up{job="another"}': "1x60"}, (("1m45s", None), ("5m", _VANISHED))),
        Case("(case 57 d) its run finished, then its series end", {_UP: "1x24 stale", **_ENDED},
             (("5m", None), ("10m", None), ("50m", None), ("80m", None))),
        Case("its run finished, then it ends and its target stays: told an hour later", {_UP: "1x24 0x400", **_ENDED},
             (("10m", None), ("1h", None), ("70m", _DOWN))),
        Case("a trainer serves for itself, its run finished, then it ends and its target stays",
             {_UP: "1x24 0x500", _ATTACH: "1x24 stale", **_ENDED},
             (("10m", None), ("70m", None), ("2h", None))),
        Case("a trainer serves for itself and dies in the midst of its run",
             {_UP: "1x24 0x400", _ATTACH: "1x24 stale", _runs("running"): "1x24 stale"},
             (("6m", None), ("10m", _DOWN), ("90m", _DOWN))),
        Case("a trainer that has ended is followed at its address by one that dies",
             {_UP: "1x24 0x8 1x24 0x40", _ATTACH: "1x24 stale _x7 1x24 stale",
              _runs("running"): "1x20 0x3 stale _x7 1x24 stale"}, (("13m", None), ("18m", _DOWN))),
        Case("a trainer has ended, a monitor beside it stops to answer",
             {_UP: "1x24 0x60", 'up{job="verl-monitor",instance="trainer"}': "1x24 0x60",
              _ATTACH.replace("m:9560", "trainer"): "1x24 stale", _runs("running"): "1x24 stale",
              _runs("running").replace("m:9560", "trainer"): "0x24 stale"}, (("10m", _DOWN),)),
        Case("no run is active and it answers", {_UP: "1x60", _runs("running"): "0x60"}, (("10m", None),)),
        Case("scrapes fail for 90 s (case 56)", {_UP: "1x10 0x5 1x10 0x5 1x30", _runs("running"): "1x60"},
             (("4m", None), ("8m", None), ("12m", None))),
        Case("one of two is down: told of that one, whose run is active",
             {_UP: "1 1 0x60", _runs("running"): "1 1 stale", 'up{job="verl-monitor",instance="idle"}': "1 1 0x60",
              'verl_monitor_runs{job="verl-monitor",instance="idle",state="running"}': "0 0 stale"}, (("5m", _DOWN),)),
    ),
    "VerlMonitorNoData": (
        Case("another page answers", {_UP: "1x20", 'other_build_info{job="verl-monitor",instance="m:9560"}': "1x20"},
             (("1m45s", None), ("2m15s", ("critical", _M)))),
        Case("the monitor answers", {_UP: "1x20", _BUILD: "1x20"}, (("5m", None),)),
        Case("it is down, which is another alert", {_UP: "0x20"}, (("5m", None),)),
    ),
    "VerlMonitorNotIngesting": (
        Case("(case 41) its loop stops, HTTP goes on", {_UP: "1x60", _BEAT: "1000+15x10 1150x30"},
             (("2m30s", None), ("5m30s", ("critical", _M)))),
        Case("its loop runs, on a host whose clock is an hour behind", {_UP: "1x60", _BEAT: "-3600+15x60"},
             (("10m", None),)),
        Case("its clock is NaN or its scrapes fail (cases 39, 56)",
             {_BEAT: "1000+15x10 stale _x8 1300+15x10 NaN NaN NaN _x10"}, (("4m", None), ("7m", None), ("8m", None))),
    ),
    "VerlMonitorSourceStale": (
        Case("a poll fails while a run is active", {_SOURCE_UP: "1x4 0x20", _runs("running"): "1x30"},
             (("1m", None), ("3m", ("critical", _L)))),
        Case("polls hang while a run is active",
             {_SOURCE_UP: "1x60", _READ: "0+15x10 150x50", _BEAT: "0+15x60", _runs("stalled"): "1x60"},
             (("4m", None), ("6m30s", ("critical", _L)))),
        Case("a poll fails, no run is active", {_SOURCE_UP: "0x30", _runs("running"): "0x30"},
             (("3m", ("warning", _L)),)),
        Case("it is read, on a host whose clock is an hour behind",
             {_SOURCE_UP: "1x60", _READ: "-3600+15x60", _BEAT: "-3600+15x60", _runs("running"): "1x60"},
             (("10m", None),)),
        Case("the monitor's loop stands still, which is another alert",
             {_SOURCE_UP: "1x60", _READ: "0+15x10 150x50", _BEAT: "0+15x10 150x50", _runs("running"): "1x60"},
             (("10m", None),)),
        Case("its times are NaN (case 39)", {_SOURCE_UP: "NaN NaN NaN NaN NaN NaN", _READ: "NaN NaN NaN NaN NaN NaN",
                                             _BEAT: "0+15x6", _runs("running"): "1x6"}, (("90s", None),)),
    ),
    "VerlMonitorRejecting": (
        Case("rows are rejected all the time", {_REJECTED + '"bad_json"}': "0+1x60"},
             (("14m", None), ("16m", ("warning", (*_L, ("reason", "bad_json")))))),
        Case("one burst of bad rows, and NUL bytes",
             {_REJECTED + '"bad_json"}': "0x4 500x90", _REJECTED + '"nul_bytes"}': "0+4096x94"},
             (("10m", None), ("20m", None))),
    ),
    "VerlMonitorDetectorErrors": (
        Case("a detector raises", {_ERRORS: "0x8 3x80"},
             (("2m", None), ("4m", ("warning", (*_M, ("detector", "kl_runaway")))), ("25m", None))),
        Case("a counter is born with its errors", {_ERRORS: "_x8 20x80"},
             (("2m", None), ("4m", ("warning", (*_M, ("detector", "kl_runaway")))), ("25m", None))),
        Case("none raises, after errors long ago", {_ERRORS: "20x160"}, (("20m", None), ("30m", None))),
    ),
    "VerlMonitorSeriesDropped": (
        Case("series are cut", {_SERIES_CUT: "0x8 0+3x20", _RUNS_CUT: "0x30"},
             (("2m", None), ("5m", ("warning", _M)))),
        Case("runs are cut", {_SERIES_CUT: "0x30", _RUNS_CUT: "0x8 0+1x20"}, (("2m", None), ("5m", ("warning", _M)))),
        Case("logs are not followed", {_FILES_CUT: "0x8 2x20"}, (("2m", None), ("5m", ("warning", _M)))),
        Case("nothing is cut any more", {_SERIES_CUT: "7x30", _RUNS_CUT: "7x30", _FILES_CUT: "2x3 0x30"},
             (("5m", None),)),
    ),
    "VerlMonitorProbeDown": (
        Case("Ray does not answer while a run is active", {_RAY_UP: "1x4 0x90", _runs("running"): "1x94"},
             (("15m", None), ("17m", ("warning", _M)))),
        Case("a node does not answer while a run is stalled", {_NODE_UP: "0x90", _runs("stalled"): "1x94"},
             (("14m", None), ("16m", ("warning", (*_M, ("node", "n")))))),
        Case("no run is active", {_RAY_UP: "0x90", _NODE_UP: "0x90", _runs("running"): "0x94", _runs("finished"):
             "2x94"}, (("20m", None),)),
        Case("all answer, or the values are NaN (case 39)",
             {_RAY_UP: "1x90", _NODE_UP: " ".join(["NaN"] * 90), _runs("running"): "1x94"}, (("20m", None),)),
    ),
    # No quiet case: it always fires, with nothing scraped at all.
    "VerlWatchdog": (Case("always", {'up{job="another"}': "0x10"}, (("0s", ("none", ())), ("1m", ("none", ())))),),
}


def _filled(template: str, labels: dict[str, str]) -> str:
    """What Prometheus makes of the few templates that these alerts use."""
    text = re.sub(r"\{\{ with \$labels\.(\w+) \}\} \{\{ \. \}\}\{\{ end \}\}",
                  lambda match: f" {labels[match[1]]}" if labels.get(match[1]) else "", template)
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels.get(match[1], ""), text)
    if "{{" in text:
        raise ValueError(f"a template that the tests cannot fill in: {text}")
    return text


def monitor_cases(alert: MonitorAlert, options: Options = DEFAULTS) -> dict[str, Any]:
    """The test file of an alert about the monitor."""
    def expected(fires: _Fires | None) -> list[dict[str, Any]]:
        if fires is None:
            return []
        severity, labels = fires[0], dict(fires[1])
        if "job" in labels:
            labels["job"] = options.job
        words = {key: _filled(text, labels) for key, text in monitor_annotations(alert, options).items()}
        return [{"exp_labels": {**labels, "severity": severity}, "exp_annotations": words}]

    tests = [{
        "name": f"{alert.name}: {case.name}",
        "interval": "15s",
        "input_series": [{"series": series.replace('job="verl-monitor"', f'job="{options.job}"'), "values": values}
                         for series, values in case.series.items()],
        "alert_rule_test": [{"eval_time": when, "alertname": alert.name, "exp_alerts": expected(fires)}
                            for when, fires in case.expected],
    } for case in CASES[alert.name]]
    return {"rule_files": ["../verl-monitor.rules.yml"], "evaluation_interval": "15s", "tests": tests}
