"""The builder of the dashboards needs a newer Python than the monitor does."""

from __future__ import annotations

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk 0.0.21 needs Python 3.11")
