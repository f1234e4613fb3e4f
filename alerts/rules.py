"""The file of alert rules. Valid in Prometheus 2.42 and 3.x: nothing in it is newer than one or gone in the other."""

from __future__ import annotations

from typing import Any

from alerts.findings import all_finding_rules
from alerts.monitor_alert import monitor_rules
from alerts.monitor_alerts import MONITOR_ALERTS
from alerts.options import DEFAULTS, Options
from alerts.yaml_text import GENERATED, dump


def _group(name: str, rules: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    group: dict[str, Any] = {"name": name}
    if options.interval:
        group["interval"] = options.interval
    return group | {"rules": rules}


def render_rules(options: Options = DEFAULTS) -> str:
    """``verl-monitor.rules.yml``."""
    own = [rule for alert in MONITOR_ALERTS for rule in monitor_rules(alert, options)]
    groups = [_group("verl-runs", all_finding_rules(options), options), _group("verl-monitor", own, options)]
    return GENERATED + "# Keep evaluation_interval at 1m or below: two evaluations in a row make a page.\n" + dump(
        {"groups": groups})
