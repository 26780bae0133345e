"""The chart's monitoring objects: copies of the files that Compose uses, and a scrape of every service."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest
import yaml
from helm_chart import CHART, DEFAULT, EVERYTHING, ROOT, render

NEW = ("--kube-version", "1.37.0")
FOLDER = CHART / "observability"


@pytest.fixture
def copies() -> dict[Any, Any]:
    found: dict[Any, Any] = runpy.run_path(str(ROOT / "k8s" / "tools" / "copy_observability.py"))["copies"]()
    return found


def test_the_charts_files_are_copies(copies: dict[Any, Any]) -> None:
    there = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert there == set(copies), "run 'make reference'"
    assert all(copy.read_bytes() == original.read_bytes() for copy, original in copies.items()), "run 'make reference'"


def test_every_service_is_scraped_at_a_port_of_its_service() -> None:
    chart = render(EVERYTHING, "helm4", *NEW)
    monitors = chart.of_kind("ServiceMonitor")
    assert len(monitors) == 6
    for monitor in monitors:
        selector = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (s for s in chart.of_kind("Service") if selector.items() <= s["metadata"]["labels"].items())
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert monitor["spec"]["jobLabel"] in service["metadata"]["labels"]
        assert endpoint["path"] == "/metrics"


def test_rules_and_dashboards_are_those_files() -> None:
    chart = render(EVERYTHING, "helm4", *NEW)
    rules = [item["spec"] for item in chart.of_kind("PrometheusRule")]
    assert rules == [yaml.safe_load(path.read_text()) for path in sorted((FOLDER / "rules").glob("*.yml"))]
    data = chart.get("ConfigMap", "dashboards").get("data") or {}
    shown = {name: json.loads(text) for name, text in data.items()}
    assert shown == {path.name: json.loads(path.read_text()) for path in (FOLDER / "dashboards").glob("*.json")}


def test_nothing_of_it_is_there_unless_asked_for() -> None:
    chart = render(DEFAULT)
    assert not chart.of_kind("ServiceMonitor", "PrometheusRule")
    assert not [c for c in chart.of_kind("ConfigMap") if "dashboards" in c["metadata"]["name"]]
