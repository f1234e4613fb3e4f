"""The configuration of `verl-monitor serve`: one YAML file, the environment over it, the command line over both."""

from __future__ import annotations

from monitor.config.example import example, understood
from monitor.config.reading import load
from monitor.config.rules import RunRules
from monitor.config.settings import (
    ADDRESS,
    COUNT,
    PATH,
    RAY,
    SECONDS,
    URL,
    Config,
    FileConfig,
    Kind,
    PrometheusConfig,
    SourceConfig,
    StdinConfig,
)
from monitor.config.tree import ConfigError

__all__ = ["ADDRESS", "COUNT", "PATH", "RAY", "SECONDS", "URL", "Config", "ConfigError", "FileConfig", "Kind",
           "PrometheusConfig", "RunRules", "SourceConfig", "StdinConfig", "example", "load", "understood"]
