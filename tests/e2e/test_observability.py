"""A mesh under load, a real Prometheus that scrapes it, and every query of every dashboard and rule (`make
observability-test`).
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from meshes.process import request, until
from meshes.up import Up
from observability_files import FOLDER, needs_prometheus, panel_queries, recorded, with_values
from otlp_collector import Collector, Span, collecting
from soaks import soak_only

pytestmark = [pytest.mark.slow, soak_only, needs_prometheus]

LOAD_S = 60
CLIENTS = 3
SERVED = ("router", "context", "generation", "indexer", "coordinator")
SLOW = {"KVMeshLateAnswersBurnFast", "KVMeshLateAnswersBurnSlowly", "KVMeshQueueWaits"}
"""Alerts that a slow machine may well cause."""


class Prometheus:
    """A server that scrapes a mesh once a second, with the rules of ``compose/observability``."""

    def __init__(self, directory: Path, targets: dict[str, list[str]]) -> None:
        settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(FOLDER / "rules.yml")]
        jobs = [job for job in settings["scrape_configs"] if job["job_name"] in targets]
        assert {job["job_name"] for job in jobs} == set(targets), "a service that compose does not scrape"
        for job in jobs:
            del job["dns_sd_configs"]
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        settings["scrape_configs"] = jobs
        config = directory / "prometheus.yml"
        config.write_text(yaml.safe_dump(settings))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        self.log = directory / "prometheus.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={address}",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        status, body = request(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        answer = json.loads(body) if status else {}
        assert answer.get("status") == "success", (status, body, self.log.read_text()[-2000:])
        return answer["data"]

    def query(self, query: str) -> list[float]:
        return [float(series["value"][1]) for series in self.get("query", query=query)["result"]]

    def healthy(self) -> bool:
        """Every target has been scraped."""
        assert self.popen.poll() is None, self.log.read_text()
        if request(f"{self.url}/-/ready")[0] != 200:
            return False
        return all(target["health"] == "up" for target in self.get("targets")["activeTargets"])

    def stop(self) -> None:
        self.popen.terminate()
        self.popen.wait(30)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def up(make_up: Callable[..., Up], collector: Collector) -> Up:
    flags = ("--context", "2", "--generation", "2", "--set", f"otlp_endpoint={collector.url}")
    return make_up(*flags, OTEL_BSP_SCHEDULE_DELAY="200").start()


@pytest.fixture(scope="module")
def targets(up: Up) -> dict[str, list[str]]:
    """Addresses of all services, by role."""
    found: dict[str, list[str]] = {"coordinator": [up.state().coordinator_url]}
    for member in up.members().values():
        found.setdefault(member["role"], []).append(member["url"])
    return {role: [url.removeprefix("http://") for url in urls] for role, urls in found.items()}


@pytest.fixture(scope="module")
def prometheus(up: Up, targets: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has watched a minute of load."""
    directory = tmp_path_factory.mktemp("prometheus")
    server = Prometheus(directory, targets)
    try:
        until(server.healthy, "Prometheus has scraped every service")
        load = (
            "--concurrency",
            "3",
            "--requests",
            "100000",
            "--duration-s",
            str(LOAD_S),
            "--shared-prefix-tokens",
            "64",
        )
        up.command("bench", *load, "--prompt-tokens", "96:160", "--output-tokens", "4:8", timeout_s=LOAD_S + 120)
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory / "data")


def test_every_service_is_scraped(prometheus: Prometheus, targets: dict[str, list[str]]) -> None:
    assert set(targets) == set(SERVED)
    assert len(targets["context"]) == len(targets["generation"]) == 2
    active = prometheus.get("targets")["activeTargets"]
    assert len(active) == sum(len(addresses) for addresses in targets.values())
    assert {target["health"] for target in active} == {"up"}


def test_pages_are_well_formed(targets: dict[str, list[str]], prometheus: Prometheus) -> None:
    """``promtool check metrics`` takes every page after a load, and Prometheus every family's help and type."""
    for address in (address for addresses in targets.values() for address in addresses):
        page = request(f"http://{address}/metrics")[1]
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), address
    assert prometheus.query("max(scrape_samples_post_metric_relabeling)")[0] > 100


def test_every_query_of_every_panel_has_data(prometheus: Prometheus) -> None:
    queries = list(panel_queries())
    assert len(queries) > 100
    empty = []
    for panel, query in queries:
        values = prometheus.query(with_values(query))
        if not any(math.isfinite(value) for value in values):
            empty.append((panel, query))
    assert empty == []


def test_rules_are_evaluated(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    for name in recorded():
        assert prometheus.query(name), name
    firing = {
        alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"
    }
    assert firing - SLOW == set()


def test_exemplars_lead_to_whole_traces(prometheus: Prometheus, collector: Collector) -> None:
    """Each trace is one tree, and goes through router, context server and generation server."""
    now = prometheus.query("vector(time())")[0]
    window = {"start": str(now - 600), "end": str(now)}
    named: dict[str, set[str]] = defaultdict(set)
    for metric in (
        "kvmesh_router_first_byte_seconds",
        "kvmesh_time_to_first_token_seconds",
        "kvmesh_http_request_seconds",
    ):
        for series in prometheus.get("query_exemplars", query=f"{metric}_bucket", **window):
            named[metric] |= {exemplar["labels"]["trace_id"] for exemplar in series["exemplars"]}
        assert named[metric], metric

    def traces() -> dict[str, list[Span]]:
        found = defaultdict(list)
        for span in list(collector.spans):
            found[span.trace_id].append(span)
        return found

    wanted = set().union(*named.values())
    until(lambda: wanted <= set(traces()), "the traces of all exemplars", 30.0)
    everything = traces()
    assert len(everything) > len(wanted)
    assert [trace for trace, spans in everything.items() if not is_tree(spans)] == []
    # When the time is over, the load's clients leave in mid-answer.
    assert sum(not is_complete(spans) for spans in everything.values()) <= CLIENTS


def is_tree(spans: list[Span]) -> bool:
    """Everything is below the router's span."""
    ids = {span.span_id for span in spans}
    return [span.name for span in spans if not span.parent_id] == ["router"] and all(
        span.parent_id in ids for span in spans if span.parent_id
    )


def is_complete(spans: list[Span]) -> bool:
    """From the router through a context server to a generation server, with what each of them does."""
    return {span.service for span in spans} == {"kvmesh-router", "kvmesh-context", "kvmesh-generation"} and {
        span.name for span in spans
    } >= {"queue", "tokenize", "match", "prefill", "transfer", "decode"}
