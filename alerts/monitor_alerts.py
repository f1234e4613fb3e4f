"""The alerts about the monitor itself: what it cannot say of itself, because it is the one that would have to say it.

They hold for each instance of the job ``verl-monitor``. Times are compared on the monitor's own clock where there is
one: a training host whose clock is wrong is common, and must not look like a monitor that stands still.
"""

from __future__ import annotations

from alerts.monitor_alert import MonitorAlert
from alerts.monitor_warnings import WARNINGS

ACTIVE = 'state=~"starting|running|stalled"'
_RUNS = f'verl_monitor_runs{{job="verl-monitor",{ACTIVE}}}'
_TRAINER = 'verl_monitor_source_up{job="verl-monitor",source="attach"}'
"""Only a trainer that serves for itself (VERL_MONITOR_LISTEN) has this source."""
_HERE = "{{ with $labels.instance }} {{ . }}{{ end }}"

DOWN = MonitorAlert(
    name="VerlMonitorDown",
    title="Monitor down",
    # Two halves: a target that fails to answer has up == 0, one that vanished has no up at all. Both are silent when
    # the last word was that no run was active: a monitor that ends together with its run is no failure. A target that
    # is still configured is given an hour for that; one that was taken away a day, since somebody took it away. A
    # trainer that serves for itself is no service that should come back: it is given a week.
    rules=(("critical", f"""
(
  max by (job, instance) (up{{job="verl-monitor"}}) == 0
  unless on (job, instance)
  sum by (job, instance) (last_over_time({_RUNS}[1h])) == 0
  unless on (job, instance)
  (
    sum by (job, instance) (last_over_time({_RUNS}[7d])) == 0
    and on (job, instance)
    last_over_time({_TRAINER}[7d])
  )
)
or
(
  absent(up{{job="verl-monitor"}})
  unless on (job)
  sum by (job) (last_over_time({_RUNS}[1d])) == 0
)"""),),
    wait="2m",
    summary=f"verl-monitor{_HERE} is down",
    description=f"Prometheus gets no answer from the monitor{_HERE} of job {{{{ $labels.job }}}}, or has no such "
                "target any more. When it last answered, runs were active, or nothing is known of it.",
    meaning="Prometheus cannot scrape the monitor: its process has ended, its host or port cannot be reached, or the "
            "target has left Prometheus's configuration while runs were active.",
    impact="Nobody watches the training. No alert about a run can come until the monitor is back.",
    diagnosis=(
        ("Does it answer on its own host? (`ready`, or nothing)", "curl -sS 127.0.0.1:9560/-/ready"),
        ("Is its process there? Its last words are on its standard error (journal, container log).",
         "pgrep -af 'verl-monitor serve'"),
        ("What does Prometheus say of the target?",
         "curl -s '127.0.0.1:9090/api/v1/targets?scrapePool=verl-monitor'"),
        ("Meanwhile a run can be judged from its log alone:", "verl-monitor check PATH"),
    ),
    actions=(
        "start the monitor again (verl-monitor serve SOURCE); it reads the logs anew and loses nothing",
        "if it answers on its own host, repair the way to it: --listen address, firewall, Prometheus's target and the "
        "job name verl-monitor",
        "until then judge the runs by hand: verl-monitor check PATH",
        "if this page does not open, it is docs/runbooks/VerlMonitorDown.md in the repository",
    ),
    misses="One of several monitors that vanishes from the configuration while others stay; for an hour, a monitor "
           "that died while no run was active; and for a week after the end of a trainer that served for itself, that "
           "the next one at its address cannot be reached. Where monitors come and go with their runs, a day without any run looks "
           "like a monitor that was never there: route alertname=\"VerlMonitorDown\", instance=\"\" to the receiver "
           "null in alertmanager.yml.",
)

NO_DATA = MonitorAlert(
    name="VerlMonitorNoData",
    title="Monitor answers, but not with its metrics",
    rules=(("critical", """
max by (job, instance) (up{job="verl-monitor"}) == 1
unless on (job, instance)
max by (job, instance) (verl_monitor_build_info)"""),),
    wait="2m",
    summary="Nothing of verl-monitor's comes from {{ $labels.instance }}",
    description="The scrape of {{ $labels.instance }} succeeds, yet it holds no verl_monitor_build_info.",
    meaning="Something answers at the monitor's address with a page of metrics, and it is not the monitor, or the "
            "metrics are dropped on their way.",
    impact="No alert about a run can come, while up is 1 and everything looks well.",
    diagnosis=(
        ("Who answers there? The page must hold `verl_monitor_build_info`.",
         "curl -s 127.0.0.1:9560/metrics | grep verl_monitor_build_info"),
        ("Which process has the port?", "ss -ltnp 'sport = :9560'"),
        ("Does Prometheus drop it? Look for metric_relabel_configs and sample_limit in the job.",
         "promtool check config prometheus.yml"),
    ),
    actions=(
        "point the job verl-monitor at the monitor's port (default 9560) and path /metrics",
        "take away relabelling that drops verl_ metrics",
    ),
    misses="Dropping of some of the metrics only.",
)

NOT_INGESTING = MonitorAlert(
    name="VerlMonitorNotIngesting",
    title="Monitor stands still",
    # Whether the heartbeat moves, not how old it looks: an age would compare two hosts' clocks.
    rules=(("critical", """
max by (job, instance) (changes(verl_monitor_heartbeat_timestamp_seconds[2m])) == 0
and
max by (job, instance) (count_over_time(verl_monitor_heartbeat_timestamp_seconds[2m])) > 1"""),),
    wait="30s",
    summary=f"verl-monitor{_HERE} answers, but stands still",
    description="The heartbeat of the monitor {{ $labels.instance }} has not moved for two minutes, although it is "
                "scraped: its engine no longer runs, and every verdict is frozen.",
    meaning="The monitor's HTTP side answers while its engine's loop has stopped. A run that hangs is another alert, "
            "VerlRolloutStall.",
    impact="All values and verdicts are those of the moment it stopped. Failures since then are not seen.",
    diagnosis=(
        ("`stuck` (503) confirms it.", "curl -sS 127.0.0.1:9560/-/healthy"),
        ("Where does it hang? A dead network file system is the usual place.",
         "py-spy dump --pid $(pgrep -f 'verl-monitor serve')"),
        ("Does the logs' file system answer?", "timeout 5 ls LOG_DIRECTORY"),
    ),
    actions=(
        "restart the monitor; it reads the logs anew and loses nothing",
        "if the logs lie on a file system that hangs, repair that first",
        "keep what py-spy said for a report: this is an error of the monitor",
    ),
    misses="Scrapes more than a minute apart: two are needed within two minutes.",
)

# On the monitor's clock: when its loop stands still too, that is the other alert, and this one keeps silent.
_STALE = """
min by (job, instance, source) (verl_monitor_source_up) == 0
or
max by (job, instance) (verl_monitor_heartbeat_timestamp_seconds)
  - on (job, instance) group_right ()
max by (job, instance, source) (verl_monitor_source_last_read_timestamp_seconds) > 120"""
_SOME_ACTIVE = f"on (job, instance) sum by (job, instance) (verl_monitor_runs{{{ACTIVE}}}) > 0"

SOURCE_STALE = MonitorAlert(
    name="VerlMonitorSourceStale",
    title="Source cannot be read",
    # Nobody is woken for the logs of runs that are over.
    rules=(("critical", f"({_STALE}\n)\nand {_SOME_ACTIVE}"), ("warning", f"({_STALE}\n)\nunless {_SOME_ACTIVE}")),
    wait="1m",
    summary="verl-monitor {{ $labels.instance }} cannot read {{ $labels.source }}",
    description="The last poll of source {{ $labels.source }} failed, or the last that succeeded is more than two "
                "minutes ago.",
    meaning="The monitor runs, but one of its sources cannot be read: a file system that hangs or went away, a "
            "directory that is not there or may not be read. Critical while a run is active, else a warning.",
    impact="The runs of this source are not watched, and may be reported as stalled although they go on.",
    diagnosis=(
        ("Does the file system answer?", "timeout 5 ls -l SOURCE"),
        ("What does the monitor say? It logs the error of a poll.",
         "curl -s 127.0.0.1:9560/metrics | grep verl_monitor_source"),
        ("May the monitor's user read it?", "sudo -u MONITOR_USER head -c 100 SOURCE/FILE"),
        ("Can the log be read at all?", "verl-monitor check SOURCE"),
    ),
    actions=(
        "repair the mount or the permissions; the monitor goes on by itself",
        "if the source has moved, restart the monitor with the new path",
    ),
    misses="A source that can be read, but holds another run's log than you think.",
)

WATCHDOG = MonitorAlert(
    name="VerlWatchdog",
    title="Watchdog",
    rules=(("none", "vector(1)"),),
    wait="0s",
    keep=False,
    summary="The way from Prometheus to Alertmanager works",
    description="This alert always fires. Its absence is the message: have a dead man's switch outside of this "
                "installation expect it.",
    meaning="Always firing. It goes to the receiver null, that is nowhere, until you route it to a service that calls "
            "when it stops.",
    impact="None while it fires. When it stops, no alert of Prometheus arrives, about the training or anything else.",
    diagnosis=(
        ("Does Prometheus evaluate its rules?", "curl -s 127.0.0.1:9090/api/v1/alerts"),
        ("Does Alertmanager have it?", "amtool --alertmanager.url=http://127.0.0.1:9093 alert query VerlWatchdog"),
    ),
    actions=(
        "if it has stopped, look at Prometheus, at its alerting section, and at Alertmanager, in this order",
        "to use it, give its route in alertmanager.yml the receiver of a dead man's switch",
    ),
    misses="Whatever lies behind Alertmanager, unless the dead man's switch is reached the same way as people are.",
)

MONITOR_ALERTS: tuple[MonitorAlert, ...] = (DOWN, NO_DATA, NOT_INGESTING, SOURCE_STALE, *WARNINGS, WATCHDOG)
"""Every alert about the monitor, the most serious first."""
