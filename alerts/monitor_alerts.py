"""Alerts about the monitor itself: what Python cannot say when it is not there to say it."""

from __future__ import annotations

from dataclasses import dataclass

JOB = 'job="verl-monitor"'
ACTIVE = 'state=~"starting|running|stalled"'


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorAlert:
    """One PromQL alert with its runbook. ``wait`` and ``keep`` are the rule's ``for`` and ``keep_firing_for``."""

    name: str
    severity: str
    expr: str
    wait: str
    keep: str
    summary: str
    description: str
    meaning: str
    impact: str
    diagnosis: tuple[str, ...]
    mitigation: tuple[str, ...]


# The last word of a monitor that has gone: were there runs to watch? A sidecar that ends with its finished run must not
# page. A day is how long that word is remembered.
_IDLE = f"sum by (instance) (last_over_time(verl_monitor_runs{{{JOB},{ACTIVE}}}[1d])) == 0"
_ALL_IDLE = f"sum(last_over_time(verl_monitor_runs{{{JOB},{ACTIVE}}}[1d])) == 0"

MONITOR_ALERTS = (
    MonitorAlert(
        name="VerlMonitorDown", severity="critical", wait="1m", keep="2m",
        # `up == 0` needs a target that still exists, `absent` one that never did or has gone: both, or one of them is missed.
        expr=f"(up{{{JOB}}} == 0 unless on (instance) ({_IDLE}))\n"
             f"or\n"
             f"(absent(up{{{JOB}}}) unless on () ({_ALL_IDLE}))",
        summary="verl-monitor is down",
        description="Prometheus cannot scrape verl-monitor{{ with $labels.instance }} at {{ . }}{{ end }}, and runs were "
                    "active when it was last heard. No training failure is told until it is back.",
        meaning="Prometheus gets no answer from the monitor, or no longer has it among its targets, and the monitor had "
                "active runs when it was last scraped (or was never scraped at all).",
        impact="Every training alert is silent, whatever happens to the runs. Training itself is not affected.",
        diagnosis=("`curl http://127.0.0.1:9560/-/healthy` on the monitor's host, and its log.",
                   "Prometheus, Status > Targets: is the job called `verl-monitor`, and is the address right?",
                   "Was the container stopped together with its job, while a run was still active?"),
        mitigation=("start the monitor again: it reads its logs from their beginning and knows everything again",
                    "if it was stopped for good, remove its target, or silence this alert for a day"),
    ),
    MonitorAlert(
        name="VerlMonitorNotIngesting", severity="critical", wait="1m", keep="2m",
        expr=f"time() - verl_monitor_heartbeat_timestamp_seconds{{{JOB}}} > 60",
        summary="verl-monitor answers but its loop has stopped",
        description="The loop of verl-monitor at {{ $labels.instance }} last ran {{ $value | humanizeDuration }} ago. Its "
                    "values are frozen.",
        meaning="The monitor still answers scrapes, but the loop that takes in steps and judges them has stopped.",
        impact="All values and verdicts are frozen at the last moment of the loop; nothing new is told.",
        diagnosis=("`curl -i http://127.0.0.1:9560/-/healthy` answers 503.",
                   "The monitor's log around the time of the last heartbeat.",
                   "Clocks of Prometheus and the monitor that differ by more than a minute look the same."),
        mitigation=("restart the monitor; a health check on `/-/healthy` does that by itself",
                    "keep its log and report what stands in it"),
    ),
    MonitorAlert(
        name="VerlMonitorSourceStale", severity="warning", wait="1m", keep="2m",
        expr=f"verl_monitor_source_up{{{JOB}}} == 0\n"
             f"or\n"
             f"time() - verl_monitor_source_last_read_timestamp_seconds{{{JOB}}} > 120",
        summary="verl-monitor cannot read {{ $labels.source }}",
        description="The source {{ $labels.source }} of verl-monitor at {{ $labels.instance }} could not be read lately.",
        meaning="The directory or file that the source follows cannot be read: it is not there, permission is missing, or "
                "its file system does not answer.",
        impact="Runs that are logged there look as if they had stopped; a stall may be told that is none.",
        diagnosis=("The landing page `http://127.0.0.1:9560/` says of each source whether it is up.",
                   "`ls` and `stat` of the path as the monitor's user, on the monitor's host.",
                   "A network file system that hangs shows in `dmesg` and in processes in state D."),
        mitigation=("mount the file system again, or correct the path or its permissions; the source goes on by itself",),
    ),
    MonitorAlert(
        name="VerlMonitorNoData", severity="warning", wait="2m", keep="2m",
        expr=f"up{{{JOB}}} == 1 unless on (instance) verl_monitor_build_info{{{JOB}}}",
        summary="{{ $labels.instance }} is scraped as verl-monitor but says nothing of it",
        description="The target {{ $labels.instance }} of the job verl-monitor answers, but none of the monitor's metrics "
                    "is among what it says.",
        meaning="Prometheus scrapes something under the job `verl-monitor` that is not the monitor, or its metrics are "
                "dropped on the way.",
        impact="Every training alert is silent.",
        diagnosis=("`curl http://127.0.0.1:9560/metrics | grep verl_monitor_build_info`.",
                   "Path, port and `metric_relabel_configs` of the scrape configuration."),
        mitigation=("correct the address or the relabelling",),
    ),
    MonitorAlert(
        name="VerlMonitorRejecting", severity="warning", wait="5m", keep="5m",
        # NUL bytes are counted in bytes and are no rows.
        expr=f'sum by (instance, source, reason) '
             f'(increase(verl_monitor_source_rejected_total{{{JOB},reason!="nul_bytes"}}[10m])) > 5',
        summary="verl-monitor rejects rows of {{ $labels.source }}",
        description="{{ $value | printf \"%.0f\" }} rows of {{ $labels.source }} could not be used in 10 minutes: "
                    "{{ $labels.reason }}.",
        meaning="Rows of a log cannot be used, again and again: they are no JSON, have no integer step, or hold no data.",
        impact="These steps are not judged. The rest of the log is.",
        diagnosis=("The monitor's log names the first bad line of each file, and what was expected.",
                   "`verl-monitor check PATH` on the log says the same.",
                   "Two jobs that write one log (same project and experiment name) tear each other's lines."),
        mitigation=("give each job its own `trainer.experiment_name`",
                    "point the monitor at verl's logs only"),
    ),
    MonitorAlert(
        name="VerlMonitorDetectorErrors", severity="warning", wait="0s", keep="10m",
        expr=f"sum by (instance, detector) (increase(verl_monitor_detector_errors_total{{{JOB}}}[10m])) > 0",
        summary="The detector {{ $labels.detector }} raises errors",
        description="The detector {{ $labels.detector }} of verl-monitor at {{ $labels.instance }} raised errors. After 20 in "
                    "a row it is taken out for that run.",
        meaning="A detector failed with an exception. It is isolated: the others go on.",
        impact="The failure that this detector looks for may go unseen in the run concerned.",
        diagnosis=("The monitor's log names the run and the exception.",
                   "`http://127.0.0.1:9560/api/v1/runs/RUN` shows the detector as broken and blind."),
        mitigation=("keep the run's log: `verl-monitor check` on it shows the error again; report it with that",),
    ),
    MonitorAlert(
        name="VerlMonitorSeriesDropped", severity="warning", wait="0s", keep="10m",
        expr=f"increase(verl_monitor_runs_dropped_total{{{JOB}}}[10m]) > 0\n"
             f"or\n"
             f"increase(verl_monitor_series_dropped_total{{{JOB}}}[10m]) > 0",
        summary="verl-monitor has more runs or series than its caps allow",
        description="verl-monitor at {{ $labels.instance }} cut runs or series because of its caps.",
        meaning="More runs are active than `--max-runs` allows, or a run logs more keys than are kept.",
        impact="The runs or values that were cut are neither judged nor exported.",
        diagnosis=("`verl_monitor_runs`, `verl_monitor_runs_dropped_total`, `verl_monitor_series_dropped_total`.",
                   "Keys that hold a step, a date or an id make new series without end."),
        mitigation=("raise `--max-runs`, or let several monitors share the logs",
                    "log values under a bounded number of keys"),
    ),
    MonitorAlert(
        name="VerlWatchdog", severity="none", wait="0s", keep="",
        expr="vector(1)",
        summary="Alerting works",
        description="This alert always fires. It is there so that its absence can be noticed.",
        meaning="Always firing. Route it to a service that raises the alarm when it does not hear it any more (a dead "
                "man's switch).",
        impact="None while it fires. When it does not arrive, neither would any page.",
        diagnosis=("Is Prometheus running, and does it evaluate these rules (Status > Rules)?",
                   "Does Alertmanager get it (`amtool alert query`)?"),
        mitigation=("bring Prometheus or Alertmanager back",),
    ),
)
