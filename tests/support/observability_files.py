"""What ``compose/observability`` holds: dashboards, rules, Prometheus' settings, and the metrics that they name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = [
    "FOLDER",
    "alerts",
    "dashboards",
    "metric_names",
    "needs_prometheus",
    "panel_queries",
    "recorded",
    "rule_queries",
    "with_values",
]

FOLDER = Path(__file__).resolve().parents[2] / "compose" / "observability"
NAME = re.compile(r"\b(?:kvmesh|process)_[a-z0-9_]+")

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="there is no Prometheus (Debian: apt install prometheus)",
)


def dashboards() -> dict[str, dict[str, Any]]:
    """By the file's name."""
    paths = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
    return {path.name: json.loads(path.read_text()) for path in paths}


def panel_queries() -> Iterator[tuple[str, str]]:
    """Each panel's name, with its dashboard's, and a query of it."""
    for board in dashboards().values():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{board['title']} / {panel['title']}", target["expr"]


def with_values(query: str, window: str = "1m") -> str:
    """The query with values for Grafana's variables: everything, and a window for rates."""
    for name, value in (("$__rate_interval", window), ("$namespace", ".*"), ("$instance", ".*")):
        query = query.replace(name, value)
    assert "$" not in query
    return query


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Rules that alert."""
    return [rule for rule in _rules() if "alert" in rule]


def recorded() -> set[str]:
    """Names of recorded series."""
    return {rule["record"] for rule in _rules() if "record" in rule}


def rule_queries() -> list[str]:
    """Queries of all rules."""
    return [rule["expr"] for rule in _rules()]


def metric_names(query: str) -> set[str]:
    """Metrics that a query reads, with the suffixes of a histogram's series; not recorded ones."""
    return set(NAME.findall(query))
