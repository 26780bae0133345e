#!/usr/bin/env python3
"""Writes the dashboards of ``grafana/dashboards``: panels as a few words each, Grafana's JSON around them.

usage: dashboards.py     (`make reference` runs it; a test compares)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "grafana" / "dashboards"
COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

AT = '{namespace=~"$namespace",instance=~"$instance"}'
"""Which series a panel is about: those of the chosen mesh and instances."""


def at(**labels: str) -> str:
    """``AT`` with further conditions: a value is compared as a regular expression."""
    more = "".join(f',{name}=~"{value}"' for name, value in labels.items())
    return AT[:-1] + more + "}"


def rate(name: str, **labels: str) -> str:
    """How much a counter grows a second."""
    return f"rate({name}{at(**labels)}[$__rate_interval])"


def quantiles(name: str, by: str = "", **labels: str) -> list[Query]:
    """Quantiles of a histogram, over all series or by a label."""
    of = f"{by}, le" if by else "le"
    return [
        Query(
            f"histogram_quantile({quantile}, sum by ({of}) ({rate(name + '_bucket', **labels)}))",
            f"p{quantile * 100:g}" + (f" {{{{{by}}}}}" if by else ""),
            exemplar=quantile == 0.99,
        )
        for quantile in (0.5, 0.95, 0.99)
    ]


class Query(NamedTuple):
    """What a line of a panel shows."""

    expression: str
    legend: str
    exemplar: bool = False
    """Whether traces of single requests are shown as points."""


class Panel(NamedTuple):
    """One figure."""

    title: str
    queries: list[Query]
    unit: str = "short"
    description: str = ""
    stacked: bool = False
    kind: str = "timeseries"
    width: int = 8


class Row(NamedTuple):
    """Panels below one heading."""

    title: str
    panels: list[Panel]


TRAFFIC = [
    Row(
        "Now",
        [
            Panel("Ready routers", [Query(f"sum(kvmesh_router_ready{AT})", "ready")], kind="stat", width=4),
            Panel(
                "Requests/s", [Query(f"sum({rate('kvmesh_router_requests_total')})", "")], "reqps", kind="stat", width=4
            ),
            Panel(
                "Errors (5 min)",
                [Query('max(kvmesh:request_errors:ratio_rate5m{namespace=~"$namespace"}) or vector(0)', "")],
                "percentunit",
                "Of requests that were neither the client's fault nor given up by it.",
                kind="stat",
                width=4,
            ),
            Panel(
                "Late answers (5 min)",
                [Query('max(kvmesh:late_answers:ratio_rate5m{namespace=~"$namespace"}) or vector(0)', "")],
                "percentunit",
                "Answers whose first byte came after more than 2.5 s.",
                kind="stat",
                width=4,
            ),
            Panel(
                "Firing alerts",
                [Query('count(ALERTS{alertname=~"KVMesh.*",alertstate="firing"}) or vector(0)', "")],
                kind="stat",
                width=4,
            ),
            Panel(
                "Targets down",
                [
                    Query(
                        "count(up == 0 and on (job, instance) max_over_time(kvmesh_http_in_flight[1h])) or vector(0)",
                        "",
                    )
                ],
                kind="stat",
                width=4,
            ),
        ],
    ),
    Row(
        "Traffic",
        [
            Panel(
                "Requests by outcome",
                [Query(f"sum by (outcome) ({rate('kvmesh_router_requests_total')})", "{{outcome}}")],
                "reqps",
                stacked=True,
            ),
            Panel(
                "Tokens",
                [
                    Query(f"sum({rate('kvmesh_engine_prompt_tokens_total')})", "prompt"),
                    Query(f"sum({rate('kvmesh_engine_cached_tokens_total')})", "of it from the cache"),
                    Query(f"sum({rate('kvmesh_engine_generated_tokens_total')})", "generated"),
                ],
                "short",
                "Tokens a second. Disaggregated, a prompt counts at both servers.",
            ),
            Panel(
                "Sequences by way",
                [
                    Query(f"sum({rate(f'kvmesh_router_sequences_{way}_total')})", way.replace("_", " "))
                    for way in ("disaggregated", "local", "aggregated", "prefill_only", "generation_first")
                ],
                "reqps",
                "Which servers took part (docs/router.md).",
            ),
            Panel(
                "Prompt length",
                quantiles("kvmesh_prompt_tokens"),
                "short",
            ),
            Panel(
                "Sequences by their end",
                [
                    Query(
                        f"sum by (kind, finish_reason) ({rate('kvmesh_sequences_total')})", "{{kind}} {{finish_reason}}"
                    )
                ],
                "reqps",
            ),
            Panel(
                "HTTP requests by service",
                [Query(f"sum by (job, status) ({rate('kvmesh_http_requests_total')})", "{{job}} {{status}}")],
                "reqps",
            ),
        ],
    ),
    Row(
        "Latency: points are single requests, and lead to their traces",
        [
            Panel("First byte at the router (TTFT)", quantiles("kvmesh_router_first_byte_seconds"), "s"),
            Panel("First token at the servers, by role", quantiles("kvmesh_time_to_first_token_seconds", "job"), "s"),
            Panel("Between tokens (ITL)", quantiles("kvmesh_inter_token_latency_seconds"), "s"),
            Panel(
                "Time per output token (TPOT), mean",
                [
                    Query(
                        f"sum by (instance) ({rate('kvmesh_inter_token_latency_seconds_sum')})"
                        f" / (sum by (instance) ({rate('kvmesh_inter_token_latency_seconds_count')}) > 0)",
                        "{{instance}}",
                    )
                ],
                "s",
            ),
            Panel(
                "Whole requests at the router", quantiles("kvmesh_http_request_seconds", route="/v1/.*completions"), "s"
            ),
            Panel(
                "What the router adds (p95)",
                [
                    Query(
                        f"histogram_quantile(0.95, sum by (stage, le) ({rate('kvmesh_router_stage_seconds_bucket')}))",
                        "{{stage}}",
                    )
                ],
                "s",
            ),
        ],
    ),
    Row(
        "Queue",
        [
            Panel(
                "Router",
                [
                    Query(f"sum(kvmesh_router_inflight_requests{AT})", "admitted"),
                    Query(f"sum(kvmesh_router_queued_requests{AT})", "waiting"),
                    Query(f"sum({rate('kvmesh_router_rejected_requests_total')})", "rejected a second"),
                ],
            ),
            Panel(
                "Engines: sequences that wait",
                [Query(f"sum by (job, instance) (kvmesh_engine_waiting{AT})", "{{job}} {{instance}}")],
            ),
            Panel(
                "Engines: sequences that run",
                [Query(f"sum by (job, instance) (kvmesh_engine_running{AT})", "{{job}} {{instance}}")],
            ),
        ],
    ),
    Row(
        "Breaker and errors",
        [
            Panel(
                "Servers of the routers",
                [
                    Query(f"max(kvmesh_router_{role}_servers{AT})", role)
                    for role in ("context", "generation", "aggregated", "unusable")
                ],
            ),
            Panel(
                "Breaker, retries, hand-offs given up",
                [
                    Query(f"sum({rate('kvmesh_router_breaker_opened_total')})", "servers taken out"),
                    Query(f"sum({rate('kvmesh_router_retries_total')})", "retries"),
                    Query(f"sum({rate('kvmesh_router_aborted_hand_offs_total')})", "hand-offs given up"),
                ],
                "ops",
            ),
            Panel(
                "Errors of the mesh",
                [
                    Query(
                        f"sum by (outcome) ({rate('kvmesh_router_requests_total', outcome='server_error|timeout')})",
                        "{{outcome}}",
                    ),
                    Query(f"sum({rate('kvmesh_engine_starved_total')})", "starved"),
                ],
                "ops",
            ),
            Panel(
                "Keys and clients",
                [
                    Query(f"sum({rate('kvmesh_api_key_refused_total')})", "without an accepted key"),
                    Query(f"sum({rate('kvmesh_router_requests_total', outcome='client_error')})", "client errors"),
                    Query(
                        f"sum({rate('kvmesh_router_requests_total', outcome='cancelled')})", "given up by the client"
                    ),
                ],
                "ops",
            ),
            Panel(
                "Memory of processes",
                [Query(f"sum by (job, instance) (process_resident_memory_bytes{AT})", "{{job}} {{instance}}")],
                "bytes",
            ),
            Panel(
                "Processor time of processes",
                [Query(f"sum by (job, instance) ({rate('process_cpu_seconds_total')})", "{{job}} {{instance}}")],
                "short",
                "Of the HTTP front of a server; its engine is a process of its own.",
            ),
        ],
    ),
]

CACHE = [
    Row(
        "Cache",
        [
            Panel(
                "Prompt tokens from the cache",
                [
                    Query(
                        f"sum by (job) ({rate('kvmesh_engine_cached_tokens_total')})"
                        f" / (sum by (job) ({rate('kvmesh_engine_prompt_tokens_total')}) > 0)",
                        "{{job}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Pages by state",
                [
                    Query(f"sum(kvmesh_engine_pages_{state}{AT})", state)
                    for state in ("free", "evictable", "held", "pinned", "locked", "quarantined")
                ],
                stacked=True,
            ),
            Panel(
                "Blocks found and missed",
                [
                    Query(f"sum by (match) ({rate('kvmesh_cache_reused_blocks_total')})", "found {{match}}"),
                    Query(f"sum({rate('kvmesh_cache_missed_blocks_total')})", "missed"),
                ],
                "ops",
            ),
        ],
    ),
    Row(
        "Cache per tier",
        [
            Panel(
                "Used pages by tier and state",
                [Query(f"sum by (tier, state) (kvmesh_cache_pages{AT})", "{{tier}} {{state}}")],
                stacked=True,
            ),
            Panel(
                "Use of tiers",
                [
                    Query(
                        f"1 - sum by (tier) (kvmesh_cache_free_pages{AT})"
                        f" / (sum by (tier) (kvmesh_cache_capacity_pages{AT}) > 0)",
                        "{{tier}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Usable tiers",
                [Query(f"min by (tier) (kvmesh_cache_tier_usable{AT})", "{{tier}}")],
                description="0: the tier of some server has failed.",
            ),
            Panel(
                "Pages found, by tier",
                [Query(f"sum by (tier) ({rate('kvmesh_cache_tier_reused_full_pages_total')})", "{{tier}}")],
                "ops",
            ),
            Panel(
                "Bytes to colder tiers and back",
                [
                    Query(f"sum by (tier) ({rate('kvmesh_cache_tier_offloaded_bytes_total')})", "to {{tier}}"),
                    Query(f"sum by (tier) ({rate('kvmesh_cache_tier_onboarded_bytes_total')})", "back from {{tier}}"),
                ],
                "Bps",
            ),
            Panel(
                "Evicted, dropped, damaged",
                [
                    Query(f"sum({rate('kvmesh_cache_evicted_pages_total')})", "evicted"),
                    Query(f"sum({rate('kvmesh_cache_dropped_pages_total')})", "dropped"),
                    Query(f"sum({rate('kvmesh_cache_damaged_pages_total')})", "damaged"),
                    Query(f"sum({rate('kvmesh_engine_integrity_failures_total')})", "integrity failures"),
                ],
                "ops",
            ),
            Panel(
                "Preemptions and suspensions",
                [
                    Query(f"sum({rate('kvmesh_engine_preemptions_total')})", "preempted"),
                    Query(f"sum({rate('kvmesh_engine_suspensions_total')})", "suspended"),
                    Query(f"sum({rate('kvmesh_engine_resumptions_total')})", "resumed"),
                    Query(f"sum({rate('kvmesh_engine_recomputations_total')})", "recomputed"),
                ],
                "ops",
            ),
        ],
    ),
    Row(
        "Transfers",
        [
            Panel(
                "In flight",
                [Query(f"sum by (job, instance) (kvmesh_engine_in_transfer{AT})", "{{job}} {{instance}}")],
                description="Prompts being received, and prompts on offer.",
            ),
            Panel(
                "Pinned pages by the transfer's age",
                [Query(f"sum by (age) (kvmesh_cache_pinned_pages{AT})", "{{age}}")],
                description="What is over 60 s is stuck.",
                stacked=True,
            ),
            Panel(
                "Bytes/s",
                [
                    Query(
                        f"sum by (job, instance) ({rate('kvmesh_engine_transfer_bytes_total')})", "{{job}} {{instance}}"
                    )
                ],
                "Bps",
                "Moved by completed transfers; each byte counts at both of its ends.",
            ),
            Panel(
                "Transfers by their end",
                [
                    Query(f"sum({rate(f'kvmesh_engine_transfers_{end}_total')})", end.replace("_", " "))
                    for end in ("completed", "failed", "cancelled", "timed_out", "refused")
                ],
                "ops",
            ),
            Panel("Until the first slice is here", quantiles("kvmesh_transfer_first_slice_seconds"), "s"),
            Panel(
                "Prompts that wait for a reader",
                [
                    Query(f"sum(kvmesh_worker_legs_unread{AT})", "unread"),
                    Query(f"sum({rate('kvmesh_worker_legs_orphaned_total')})", "given up a second"),
                    Query(f"sum(kvmesh_engine_held_back{AT})", "prompts held back until others are read"),
                ],
            ),
            Panel(
                "Ledger of the coordinator",
                [
                    Query(f"sum(kvmesh_coordinator_ledger_open{AT})", "not finished"),
                    Query(f"sum(kvmesh_coordinator_ledger_transfers{AT})", "remembered"),
                ],
            ),
            Panel(
                "Staging and bounce",
                [
                    Query(f"sum(kvmesh_engine_staging_send_used_bytes{AT})", "to send"),
                    Query(f"sum(kvmesh_engine_staging_receive_used_bytes{AT})", "to receive"),
                    Query(f"sum(kvmesh_engine_bounce_orphaned_bytes{AT})", "kept for ended transfers"),
                ],
                "bytes",
            ),
        ],
    ),
]

INDEX = [
    Row(
        "Index",
        [
            Panel(
                "Event streams",
                [
                    Query(f"sum(kvmesh_indexer_feeds{AT})", "followed"),
                    Query(f"sum(kvmesh_indexer_feeds_connected{AT})", "connected"),
                    Query(f"sum(kvmesh_indexer_feeds_approximate{AT})", "without events"),
                ],
            ),
            Panel(
                "Blocks by server",
                [Query(f"sum by (worker) (kvmesh_indexer_worker_blocks{AT})", "{{worker}}")],
            ),
            Panel("Memory", [Query(f"sum by (instance) (kvmesh_indexer_memory_bytes{AT})", "{{instance}}")], "bytes"),
            Panel(
                "Events",
                [
                    Query(f"sum({rate('kvmesh_engine_events_published_total')})", "batches published"),
                    Query(f"sum({rate('kvmesh_indexer_feed_batches_total')})", "batches heard"),
                    Query(f"sum by (dialect) ({rate('kvmesh_indexer_events_total')})", "events, {{dialect}}"),
                ],
                "ops",
            ),
            Panel(
                "Events lost",
                [
                    Query(f"sum({rate('kvmesh_engine_events_dropped_total')})", "dropped by servers"),
                    Query(f"sum({rate('kvmesh_indexer_feed_gaps_total')})", "gaps"),
                    Query(f"sum({rate('kvmesh_indexer_feed_rejected_events_total')})", "rejected"),
                    Query(f"sum({rate('kvmesh_indexer_feed_resets_total')})", "read anew"),
                    Query(f"sum({rate('kvmesh_indexer_feed_disconnections_total')})", "disconnections"),
                ],
                "ops",
            ),
            Panel(
                "Comparisons with servers",
                [
                    Query(f"sum({rate('kvmesh_indexer_drift_checks_total')})", "compared"),
                    Query(f"sum({rate('kvmesh_indexer_drift_total')})", "index was wrong"),
                ],
                "ops",
            ),
            Panel(
                "Blocks stored, removed, forgotten",
                [
                    Query(f"sum({rate(f'kvmesh_indexer_{what}_blocks_total')})", what)
                    for what in ("stored", "removed", "forgotten", "orphan")
                ],
                "ops",
            ),
            Panel(
                "The router's questions",
                [
                    Query(f"sum({rate(f'kvmesh_router_match_{end}_total')})", end.replace("_", " "))
                    for end in ("answered", "timed_out", "unreachable", "resting")
                ],
                "ops",
            ),
            Panel(
                "Share of a prompt that a server held",
                quantiles("kvmesh_router_matched_share"),
                "percentunit",
                "0 throughout means that events and prompts do not fit.",
            ),
        ],
    ),
    Row(
        "Coordinator",
        [
            Panel(
                "Members",
                [
                    Query(f"max(kvmesh_coordinator_members{AT})", "members"),
                    Query(f"max(kvmesh_coordinator_watchers{AT})", "watchers"),
                ],
            ),
            Panel(
                "Changes",
                [
                    Query(f"sum({rate(f'kvmesh_coordinator_members_{what}_total')})", what)
                    for what in ("joined", "left", "dead", "fenced")
                ],
                "ops",
            ),
            Panel(
                "Who reaches it",
                [
                    Query(f"min(kvmesh_router_coordinator_connected{AT})", "every router"),
                    Query(f"min(kvmesh_worker_coordinator_connected{AT})", "every server"),
                ],
            ),
            Panel(
                "Leader and etcd",
                [
                    Query(f"sum(kvmesh_coordinator_leading{AT}) or vector(0)", "leaders"),
                    Query(f"min(kvmesh_coordinator_etcd_connected{AT}) or vector(0)", "etcd connected"),
                ],
                description="Both are 0 in a mesh without etcd.",
            ),
        ],
    ),
    Row(
        "Certificates and ends",
        [
            Panel(
                "Time until certificates end",
                [
                    Query(
                        f"min by (job) (kvmesh_tls_certificate_not_after_seconds{AT} - time()) or vector(0)", "{{job}}"
                    )
                ],
                "s",
                "0 in a mesh without TLS.",
            ),
            Panel(
                "Services that drain",
                [Query(f"sum by (job) (kvmesh_drain_deadline_seconds{AT} > bool 0)", "{{job}}")],
            ),
        ],
    ),
]

DASHBOARDS = {
    "kvmesh-traffic": ("KVMesh: traffic", TRAFFIC),
    "kvmesh-cache": ("KVMesh: cache and transfers", CACHE),
    "kvmesh-index": ("KVMesh: index and coordinator", INDEX),
}


def variable(name: str) -> dict[str, Any]:
    """A choice among the values of a label; "All" also takes series without it."""
    query = f"label_values(kvmesh_http_in_flight, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """Grafana's object of a panel."""
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT if panel.kind == "timeseries" else HEIGHT // 2, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "exemplar": query.exemplar,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def dashboard(uid: str) -> dict[str, Any]:
    """Grafana's object of a dashboard."""
    title, rows = DASHBOARDS[uid]
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": place})
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            made = panel_json(panel, len(panels) + 1, x, y)
            panels.append(made)
            x, tallest = x + panel.width, max(tallest, made["gridPos"]["h"])
        y += tallest
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvmesh"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["kvmesh"], "title": "KVMesh", "asDropdown": False}],
        "templating": {"list": [source, variable("namespace"), variable("instance")]},
        "panels": panels,
    }


def files() -> dict[Path, str]:
    """Each dashboard's file with what it has to hold."""
    return {FOLDER / f"{uid}.json": json.dumps(dashboard(uid), indent=1) + "\n" for uid in DASHBOARDS}


def main() -> None:
    """Write them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
