"""EndpointSlices as recorded from API servers, of both versions, and what changes make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.coordinator.discovery.slices import SliceStore, Status, decode_event, decode_list

RECORDED = Path(__file__).parents[2] / "data" / "kubernetes"


def recorded(version: str) -> bytes:
    return (RECORDED / f"endpointslices-{version}.json").read_bytes()


def test_v1_as_recorded() -> None:
    """Ready, terminating, not ready, IPv6 without conditions, and a slice of nulls."""
    listed = decode_list(recorded("v1"))
    store = SliceStore("http", "https")
    store.replace(listed.items or [])
    assert listed.metadata.resource_version == "41210"
    assert store.urls() == {
        "https://10.244.1.7:8100": True,
        "https://10.244.2.9:8100": False,
        "https://10.244.3.4:8100": False,
        "https://[fd00:10:244:1::7]:8100": True,
    }


def test_v1beta1_as_recorded() -> None:
    """Kubernetes 1.17 to 1.20: topology instead of node and zone, and only the ready condition."""
    store = SliceStore("8100", "http")
    store.replace(decode_list(recorded("v1beta1")).items or [])
    assert store.urls() == {"http://172.17.0.5:8100": True, "http://172.17.0.6:8100": False}


def test_a_port_is_found_by_name_or_number_and_others_are_told() -> None:
    items = decode_list(recorded("v1")).items or []
    for port, url in (("events", "http://10.244.1.7:5557"), ("5557", "http://10.244.1.7:5557")):
        store = SliceStore(port, "http")
        store.replace(items)
        assert url in store.urls()
    store = SliceStore("grpc", "http")
    store.replace(items)
    assert store.urls() == {}
    assert store.ports() == {"events", "http"}


def change(kind: str, name: str, *addresses: str, ready: bool = True) -> bytes:
    endpoints = [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses]
    return json.dumps(
        {
            "type": kind,
            "object": {
                "metadata": {"name": name, "resourceVersion": "7"},
                "addressType": "IPv4",
                "endpoints": endpoints,
                "ports": [{"name": "", "port": 80}],
            },
        }
    ).encode()


def applied(*lines: bytes) -> dict[str, bool]:
    store = SliceStore("80", "http")
    for line in lines:
        kind, changed = decode_event(line)
        assert not isinstance(changed, Status)
        store.apply(kind, changed)
    return store.urls()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((change("ADDED", "a", "1.1.1.1"),), {"1.1.1.1": True}),
        ((change("ADDED", "a", "1.1.1.1"), change("MODIFIED", "a", "1.1.1.2")), {"1.1.1.2": True}),
        ((change("ADDED", "a", "1.1.1.1"), change("DELETED", "a", "1.1.1.1")), {}),
        ((change("DELETED", "never seen", "1.1.1.1"),), {}),
        (
            (change("ADDED", "a", "1.1.1.1", ready=False), change("ADDED", "b", "1.1.1.1")),
            {"1.1.1.1": True},
        ),
        ((change("ADDED", "b", "1.1.1.1"), change("ADDED", "a", "1.1.1.1", ready=False)), {"1.1.1.1": True}),
    ],
    ids=["added", "changed", "deleted", "unknown deleted", "moving, new one ready", "moving, old one ready"],
)
def test_changes(lines: tuple[bytes, ...], found: dict[str, bool]) -> None:
    assert applied(*lines) == {f"http://{address}:80": ready for address, ready in found.items()}


def test_an_error_event_is_a_status() -> None:
    line: dict[str, Any] = {
        "type": "ERROR",
        "object": {"kind": "Status", "status": "Failure", "message": "too old resource version: 7 (9)", "code": 410},
    }
    kind, status = decode_event(json.dumps(line).encode())
    assert kind == "ERROR"
    assert isinstance(status, Status)
    assert status.code == 410


def test_a_service_that_publishes_all_of_its_pods_still_tells_who_serves() -> None:
    """``publishNotReadyAddresses``, which StatefulSets need, has every pod called ready."""
    store = SliceStore("http", "http")
    endpoints = [
        {"addresses": [address], "conditions": {"ready": True, "serving": serving, "terminating": False}}
        for address, serving in (("10.0.0.1", True), ("10.0.0.2", False))
    ]
    listed = {
        "metadata": {},
        "items": [{"metadata": {"name": "a"}, "ports": [{"name": "http", "port": 8100}], "endpoints": endpoints}],
    }
    store.replace(decode_list(json.dumps(listed).encode()).items or [])
    assert store.urls() == {"http://10.0.0.1:8100": True, "http://10.0.0.2:8100": False}
