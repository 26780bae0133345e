"""What is built from which configuration, and what is refused before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.net.doorbell import Doorbell
from kvmesh.transceiver import PoolMemory, ServerFacts, TransceiverConfigError, TransceiverStats, create_transceiver
from kvmesh.transceiver.planes.builtin import BuiltinPlane
from kvmesh.transceiver.planes.nixl_agent import prepare_environment
from kvmesh.transceiver.types import PeerKey

LAYOUT = PageLayout.build(
    CacheRequirements((LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=64, dtype="float32"),)), 8
)
PAGE_BYTES = LAYOUT.pools[0].page_bytes


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    device = CpuDevice(1 << 20)
    buffer = device.allocate(8 * PAGE_BYTES)
    yield PoolMemory(address=buffer.address, nbytes=buffer.nbytes, num_pages=8, page_bytes=PAGE_BYTES, fd=buffer.fd)
    device.free(buffer)


def create(memory: PoolMemory, backend: str | None = "DEFAULT", fields: dict[str, Any] | None = None, **changes: Any):  # type: ignore[no-untyped-def]
    arguments = {
        "layout": LAYOUT,
        "pools": [memory],
        "instance_id": "engine",
        "epoch": 1,
        "cluster_secret": b"secret",
        "digest": LAYOUT.digest("m"),
        "summary": LAYOUT.summary(),
        "environment": {},
    }
    config = CacheTransceiverConfig(backend=backend, **(fields or {}))  # type: ignore[arg-type]
    return create_transceiver(config, **{**arguments, **changes})


def test_no_backend_means_no_transceiver(memory: PoolMemory) -> None:
    assert create(memory, None) is None


@pytest.mark.parametrize(
    ("backend", "plane", "warned"), [("NIXL", "memfd", 1), ("NIXL", "auto", 0), ("DEFAULT", "memfd", 0)]
)
def test_a_way_of_the_built_in_plane_has_no_effect_elsewhere(
    memory: PoolMemory, backend: str, plane: str, warned: int
) -> None:
    with structlog.testing.capture_logs() as logs:
        create(memory, backend, plane=plane).shutdown()
    told = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert told == ["transfer_plane has no effect with backend NIXL"] * warned


@pytest.mark.parametrize(
    ("backend", "runtime", "name"),
    [
        ("DEFAULT", "auto", "BUILTIN"),
        ("NIXL", "PYTHON", "NIXL"),
        ("DEFAULT", "CPP", "CPP/BUILTIN"),
        ("DEFAULT", None, "CPP/BUILTIN"),
        ("NIXL", "CPP", "CPP/NIXL"),
    ],
)
def test_the_transceiver_says_what_it_is_and_closes_twice(
    memory: PoolMemory, backend: str, runtime: str | None, name: str
) -> None:
    """§2b: null is CPP."""
    transceiver = create(memory, backend, {"transceiver_runtime": runtime})
    assert transceiver.backend_name == name
    assert transceiver.control_endpoint.startswith("tcp://127.0.0.1:")
    assert not transceiver.has_tracked_transfers
    assert transceiver.check_context_transfer_status(1)[:4] == ([], [], [], [])
    assert transceiver.check_gen_transfer_status(1)[:4] == ([], [], [], [])
    assert transceiver.sweep_timeouts() == []
    assert transceiver.cancel_request(5)
    idle: dict[str, Any] = {**dict.fromkeys(TransceiverStats._fields, 0), "bounce_fallbacks": {}}
    if name.startswith("CPP"):
        idle["staging_capacity_bytes"] = 8 * PAGE_BYTES
    assert transceiver.stats()._asdict() == idle
    transceiver.shutdown()
    transceiver.shutdown()


def test_what_is_lent_is_taken_back_before_a_shutdown_releases_it(memory: PoolMemory) -> None:
    owner = PeerKey("engine", 1)
    transceiver = create(memory, fields={})
    reader = BuiltinPlane([memory], choice="memfd", bind_host="127.0.0.1", bell=Doorbell())
    reader.attach(owner, transceiver._plane.describe(), "receiver")
    stood: list[bool] = []
    lease = SimpleNamespace(
        page_ids=lambda group: np.array([3], dtype=np.int32),
        release=lambda: stood.append(reader.loans.stands(owner, access)),
        quarantine=lambda: None,
    )
    transceiver.respond_and_send(7, "c7", lease, 8, 0, b"p" * 32)
    access: bytes = transceiver._sender.table.open[7].ticket.loan.access
    assert reader.loans.stands(owner, access)
    transceiver.shutdown()
    reader.close()
    assert stood == [False]


@pytest.mark.parametrize(
    ("backend", "fields", "changes", "message"),
    [
        ("DEFAULT", {"transceiver_runtime": "CPP", "max_tokens_in_buffer": 3}, {}, "is 3, less than the 8 tokens"),
        ("DEFAULT", {}, {"cluster_secret": b""}, "cluster secret"),
        ("NIXL", {}, {"facts": ServerFacts(installed=frozenset({"BUILTIN"}))}, "EXTRAS=engine"),
        ("DEFAULT", {}, {"layout": PageLayout.build(
            CacheRequirements((LayerCacheSpec(layer_index=0, num_kv_heads=2, head_dim=64, dtype="float32"),)), 8
        )}, "not those of the layout"),
    ],
)  # fmt: skip
def test_refusals(
    memory: PoolMemory, backend: str, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TransceiverConfigError, match=message):
        create(memory, backend, fields, **changes)


def test_a_plane_that_cannot_work_is_a_configuration_error(memory: PoolMemory) -> None:
    anonymous = PoolMemory(address=memory.address, nbytes=memory.nbytes, num_pages=8, page_bytes=PAGE_BYTES)
    with pytest.raises(TransceiverConfigError, match="needs pools backed by a memfd"):
        create(anonymous, plane="memfd")


def test_an_address_that_is_not_ours_is_an_os_error(memory: PoolMemory) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1|assign"):
        create(memory, bind_host="192.0.2.1")


@pytest.mark.parametrize(
    ("bind_host", "infiniband", "expected"),
    [
        ("127.0.0.1", False, {"UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo"}),
        ("::1", True, {"UCX_NET_DEVICES": "lo"}),
        ("localhost", True, {"UCX_NET_DEVICES": "lo"}),
        ("0.0.0.0", False, {"UCX_MODULES": "^ib"}),
        ("node-1", True, {}),
    ],
)
def test_the_environment_that_nixl_is_loaded_in(bind_host: str, infiniband: bool, expected: dict[str, str]) -> None:
    environment: dict[str, str] = {}
    prepare_environment(environment, bind_host=bind_host, infiniband=infiniband)
    assert environment == {
        "NIXL_LOG_LEVEL": "ERROR",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_ERROR_SIGNALS": "",
        **expected,
    }


def test_what_a_user_has_set_stays() -> None:
    environment = {"UCX_NET_DEVICES": "eth1", "NIXL_LOG_LEVEL": "INFO", "UCX_MODULES": "all"}
    prepare_environment(environment, bind_host="127.0.0.1", infiniband=False)
    assert environment["UCX_NET_DEVICES"] == "eth1"
    assert environment["NIXL_LOG_LEVEL"] == "INFO"
    assert environment["UCX_MODULES"] == "all"
