"""The alerts about the monitor itself that can wait: something of what it is given does not get through."""

from __future__ import annotations

from alerts.monitor_alert import MonitorAlert

REJECTING = MonitorAlert(
    name="VerlMonitorRejecting",
    title="Rows rejected",
    # Waits longer than the window: rows that were bad once, such as a line cut by a crash, are over before it fires.
    # NUL bytes are counted in bytes and are no rows.
    rules=(("warning", """
sum by (job, instance, source, reason) (rate(verl_monitor_source_rejected_total{reason!="nul_bytes"}[10m])) > 0"""),),
    wait="15m",
    summary="verl-monitor {{ $labels.instance }} rejects rows of {{ $labels.source }}",
    description="Rows of source {{ $labels.source }} have been rejected again and again for more than ten minutes, "
                "reason: {{ $labels.reason }}.",
    meaning="Lines of a log are no rows of verl's file logger. A single bad line is no reason for this alert; these "
            "keep coming.",
    impact="Steps are missing from what the detectors see. If all rows are rejected, the run looks stalled.",
    diagnosis=(
        ("Which reason, how many, beside how many good rows?",
         "curl -s 127.0.0.1:9560/metrics | grep -E 'verl_monitor_source_(rejected|records)_total'"),
        ("What do the rows look like? Each must be {\"step\": N, \"data\": {...}}.", "tail -n 3 LOG_FILE"),
        ("Read it as a whole: problems are told on standard error.", "verl-monitor check LOG_FILE"),
    ),
    actions=(
        "let one process only write a log: two runs of the same project and experiment share a file",
        "take files that are not logs of verl out of the watched directory",
        "if the rows are verl's and look right, keep one for a report",
    ),
    misses="Rows that are rejected less often than every ten minutes.",
)

DETECTOR_ERRORS = MonitorAlert(
    name="VerlMonitorDetectorErrors",
    title="Detector fails",
    # The second half: a counter that is born with its first error has no increase.
    rules=(("warning", """
sum by (job, instance, detector) (
  increase(verl_monitor_detector_errors_total[15m]) > 0
  or (verl_monitor_detector_errors_total > 0 unless verl_monitor_detector_errors_total offset 15m)
)"""),),
    wait="1m",
    summary="Detector {{ $labels.detector }} of verl-monitor {{ $labels.instance }} raises exceptions",
    description="The detector {{ $labels.detector }} has raised exceptions within the last 15 minutes. The others go "
                "on.",
    meaning="A detector failed on a step. It is skipped for that step, and after 20 failures in a row taken out for "
            "the run and reported blind.",
    impact="This one kind of failure may go unseen in the runs concerned.",
    diagnosis=(
        ("Which detector, how often?", "curl -s 127.0.0.1:9560/metrics | grep verl_monitor_detector_errors_total"),
        ("For which runs is it out?", "curl -s 127.0.0.1:9560/metrics | grep 'verl_detector_blind.* 1'"),
        ("Does it fail again? The traceback is in the monitor's log.", "verl-monitor check LOG_FILE"),
    ),
    actions=(
        "report it with the traceback and the row it fails on: this is an error of the monitor",
        "watch the metric itself meanwhile; the detector's runbook names it",
    ),
    misses="A detector that is wrong without raising.",
)

SERIES_DROPPED = MonitorAlert(
    name="VerlMonitorSeriesDropped",
    title="Caps cut something",
    rules=(("warning", """
sum by (job, instance) (increase(verl_monitor_series_dropped_total[15m])) > 0
or
sum by (job, instance) (increase(verl_monitor_runs_dropped_total[15m])) > 0
or
sum by (job, instance) (verl_monitor_source_files_cut) > 0"""),),
    wait="1m",
    summary="verl-monitor {{ $labels.instance }} drops runs, logs or series",
    description="More runs or logs, or more series in a run, arrive at {{ $labels.instance }} than the monitor keeps; "
                "what is beyond its caps is dropped.",
    meaning="The caps that bound the monitor's memory and Prometheus's series were reached: runs at once, logs "
            "followed, or series and unknown keys of one run.",
    impact="A run that was dropped, or whose log is not followed, is not watched at all. A series that was dropped "
           "cannot be seen by any detector.",
    diagnosis=(
        ("Runs, logs or series?", "curl -s 127.0.0.1:9560/metrics | grep -E 'dropped_total|files_cut'"),
        ("How many runs, and of which state?", "curl -s 127.0.0.1:9560/api/v1/runs"),
        ("Keys that change with each step? Their number must be bounded.",
         "curl -s 127.0.0.1:9560/metrics | grep -c verl_unrecognized"),
    ),
    actions=(
        "raise --max-runs, or point the monitor at one project's directory rather than at all logs there ever were",
        "take changing parts (step numbers, sample ids) out of the names of your own metrics",
    ),
    misses="Nothing that is counted; which series was dropped is not told.",
)

PROBE_DOWN = MonitorAlert(
    name="VerlMonitorProbeDown",
    title="Probe does not answer",
    # A cluster that is taken down after its job is no matter, so only while a run is active. A node that has left the
    # cluster is told for ten minutes and then forgotten.
    rules=(("warning", """
(
  max by (job, instance, node) (verl_node_probe_up) == 0
  or
  max by (job, instance) (verl_ray_up) == 0
)
and on (job, instance)
sum by (job, instance) (verl_monitor_runs{state=~"starting|running|stalled"}) > 0"""),),
    wait="15m",
    summary="A probe of verl-monitor {{ $labels.instance }} does not answer{{ with $labels.node }} {{ . }}{{ end }}",
    description="Ray's dashboard, or the probe on a node, has not answered for 15 minutes while a run is active.",
    meaning="The monitor sees the runs, but not the cluster they run on, or not one of its nodes.",
    impact="Leaked placement groups, dead actors and lost GPUs go unseen, and a stall cannot name its culprit.",
    diagnosis=(
        ("What does not answer, and why?", "curl -s 127.0.0.1:9560/api/v1/machine"),
        ("Does Ray's dashboard answer to the monitor's token?", "curl -s -H \"Authorization: Bearer $RAY_AUTH_TOKEN\" "
                                                               "http://HEAD:8265/api/version"),
    ),
    actions=(
        "give the monitor Ray's present address and token (--ray-address, RAY_AUTH_TOKEN_PATH), and restart it",
        "look at the node: a probe without CPUs that does not answer is often a node that does not",
    ),
    misses="A probe that answers with old facts, which Ray itself would have to tell.",
)

WARNINGS = (REJECTING, DETECTOR_ERRORS, SERIES_DROPPED, PROBE_DOWN)
