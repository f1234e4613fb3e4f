"""Alert rules, their promtool tests, Alertmanager's configuration and the runbooks, all made from the detectors' specs.

``python -m alerts.render`` writes the files, ``--check`` compares them with what is committed.
"""
