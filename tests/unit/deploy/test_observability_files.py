"""Dashboards, rules and the settings of Prometheus, Grafana and the collector, as far as files can be judged."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import yaml
from containers.engine import REPOSITORY
from observability_files import (
    FOLDER,
    alerts,
    dashboards,
    metric_names,
    needs_prometheus,
    panel_queries,
    recorded,
    rule_queries,
    with_values,
)

COMPOSE = yaml.safe_load(re.sub(r"\$\{[^}]*\}", "", (REPOSITORY / "compose" / "compose.yaml").read_text()))["services"]
PORTS = {"router": 8000, "context": 8100, "generation": 8100, "indexer": 8300, "coordinator": 8400, "etcd": 2379}
SUFFIXES = re.compile(r"_(bucket|count|sum)$")


def settings(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def documented() -> set[str]:
    """Names of metrics in docs/telemetry.md, with the prefix of their section."""
    names: set[str] = set()
    prefix = ""
    for line in (REPOSITORY / "docs" / "telemetry.md").read_text().splitlines():
        if line.startswith("**"):
            prefix = "".join(re.findall(r"`(kvmesh_[a-z]+_(?:legs_)?)\.\.\.`", line)) or ""
        elif line.startswith("| `"):
            for cell in re.findall(r"`([a-z0-9_]+)(?:\{[a-z,]+\})?`", line.split("|")[1]):
                names.add(cell if cell.startswith("kvmesh_") else prefix + cell)
    return names


def test_dashboards_are_those_of_the_script() -> None:
    wanted = runpy.run_path(str(FOLDER / "dashboards.py"))["files"]()
    there = {path: path.read_text() for path in (FOLDER / "grafana" / "dashboards").iterdir()}
    assert there == wanted, "run 'make reference'"


def test_panels_do_not_overlap_and_have_queries() -> None:
    assert len({board["uid"] for board in dashboards().values()}) == len(dashboards())
    for board in dashboards().values():
        taken: set[tuple[int, int]] = set()
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24
            taken |= cells
            assert panel["type"] == "row" or panel["targets"], panel["title"]


def test_what_a_mesh_is_watched_for_is_shown() -> None:
    """Traffic, TTFT, TPOT, ITL, queue, cache per tier, transfers (in flight, stuck by age, bytes/s), index, breaker."""
    shown = set().union(*(metric_names(query) for _, query in panel_queries()))
    assert shown >= {
        "kvmesh_router_requests_total",
        "kvmesh_router_first_byte_seconds_bucket",
        "kvmesh_inter_token_latency_seconds_bucket",
        "kvmesh_inter_token_latency_seconds_sum",
        "kvmesh_router_queued_requests",
        "kvmesh_cache_pages",
        "kvmesh_engine_in_transfer",
        "kvmesh_cache_pinned_pages",
        "kvmesh_engine_transfer_bytes_total",
        "kvmesh_indexer_drift_total",
        "kvmesh_router_breaker_opened_total",
    }


def test_every_metric_is_documented() -> None:
    """With the test of a running mesh's pages, which knows what is exposed: no panel and no rule asks for nothing."""
    names = documented()
    assert len(names) > 150
    queries = [query for _, query in panel_queries()] + rule_queries()
    used = set().union(*map(metric_names, queries))
    assert len(used) > 80
    unknown = {name for name in used if not name.startswith("process_") and SUFFIXES.sub("", name) not in names}
    assert unknown == set()


def test_every_recorded_series_exists() -> None:
    used = set(re.findall(r"kvmesh:[a-z0-9_:]+", " ".join([query for _, query in panel_queries()] + rule_queries())))
    assert used <= recorded()
    assert len(recorded()) == 10


def test_every_alert_has_a_runbook_and_a_case() -> None:
    page = (REPOSITORY / "docs" / "observability.md").read_text()
    headings = {heading.strip().lower() for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
    tested = {
        case["alertname"]
        for test in settings("rules_test.yml")["tests"]
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    assert tested == set(names)
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook"] == f"docs/observability.md#{alert['alert'].lower()}"
        assert alert["alert"].lower() in headings


def test_every_service_is_scraped_where_it_listens() -> None:
    jobs = {job["job_name"]: job for job in settings("prometheus.yml")["scrape_configs"]}
    assert set(jobs) == set(PORTS)
    assert set(jobs) <= set(COMPOSE)
    for name, job in jobs.items():
        (found,) = job["dns_sd_configs"]
        assert (found["names"], found["type"], found["port"]) == ([name], "A", PORTS[name])
    assert COMPOSE["context"]["environment"]["KVMESH_PORT"] == str(PORTS["context"])


def test_the_encrypted_one_differs_in_encryption_only() -> None:
    plain, encrypted = settings("prometheus.yml"), settings("prometheus-encrypted.yml")
    for job in encrypted["scrape_configs"]:
        assert job.pop("scheme") == "https"
        tls = job.pop("tls_config")
        assert {Path(tls[key]).parent for key in ("ca_file", "cert_file", "key_file")} == {Path("/run/kvmesh/tls")}
        assert tls["server_name"] == "kvmesh.internal"
        assert "insecure_skip_verify" not in tls
    assert encrypted == plain


def test_grafana_finds_what_compose_gives_it() -> None:
    volumes = dict(volume.split(":")[:2] for volume in COMPOSE["grafana"]["volumes"])
    (provider,) = settings("grafana/provisioning/dashboards/kvmesh.yml")["providers"]
    assert provider["options"]["path"] == volumes["./observability/grafana/dashboards"]
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert Path(home).name in dashboards()
    sources = {
        source["uid"]: source for source in settings("grafana/provisioning/datasources/kvmesh.yml")["datasources"]
    }
    (link,) = sources["kvmesh-prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert (link["name"], sources[link["datasourceUid"]]["type"]) == ("trace_id", "jaeger")
    for source in sources.values():
        assert re.fullmatch(r"http://([a-z]+):\d+", source["url"])
        assert source["url"].split("//")[1].split(":")[0] in COMPOSE


def test_traces_go_on_from_the_collector() -> None:
    collector = settings("collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(collector[part])
    assert collector["exporters"]["otlphttp"]["endpoint"] == "http://jaeger:4318"
    assert "--enable-feature=exemplar-storage" in COMPOSE["prometheus"]["command"]


# ---- with Prometheus' own tools


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_takes_settings_and_rules() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "--syntax-only", "prometheus-encrypted.yml")


@needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "rules_test.yml")


@needs_prometheus
def test_every_query_is_one(tmp_path: Path) -> None:
    """Panels' queries as recording rules: promtool parses them."""
    rules = [{"record": f"q{place}", "expr": with_values(query)} for place, (_, query) in enumerate(panel_queries())]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "queries.yml"))
