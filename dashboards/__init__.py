"""Builds the Grafana dashboards from the catalogue and the detector specs: ``python -m dashboards.build``.

The generated JSON lies beside the code and is committed; a test builds it again and fails on a difference.
"""
