"""Alert rules, promtool tests, runbooks and Alertmanager configuration, rendered from the detector specs."""
