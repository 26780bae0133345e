"""``CacheTransceiverConfig`` and ``KVEventsConfig``: defaults and constraints (semantics §2b, §2c, §7 T1)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvmesh.config import CacheTransceiverConfig, KVEventsConfig


def test_transceiver_defaults_are_the_seeds() -> None:
    """§2b."""
    assert CacheTransceiverConfig().model_dump() == {
        "backend": None,
        "transceiver_runtime": "auto",
        "max_tokens_in_buffer": None,
        "kv_transfer_timeout_ms": 60000,
        "kv_transfer_sender_future_timeout_ms": 1000,
        "kv_transfer_poll_interval_ms": 5000,
        "kv_cache_bounce_size_mb": 0,
        "enable_pipelined_transfer": False,
    }


@pytest.mark.parametrize(
    "field",
    [
        "max_tokens_in_buffer",
        "kv_transfer_timeout_ms",
        "kv_transfer_sender_future_timeout_ms",
        "kv_transfer_poll_interval_ms",
    ],
)
def test_whole_numbers_are_positive_or_none(field: str) -> None:
    """§2b CHECKs."""
    for wrong in (0, -1):
        with pytest.raises(ValidationError, match=field):
            CacheTransceiverConfig(**{field: wrong})
    assert getattr(CacheTransceiverConfig(**{field: None}), field) is None
    assert getattr(CacheTransceiverConfig(**{field: 1}), field) == 1


def test_bounce_size_may_be_zero() -> None:
    """§2b CHECKs."""
    CacheTransceiverConfig(kv_cache_bounce_size_mb=0)
    with pytest.raises(ValidationError, match="kv_cache_bounce_size_mb"):
        CacheTransceiverConfig(kv_cache_bounce_size_mb=-1)


@pytest.mark.parametrize("backend", [None, "DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"])
@pytest.mark.parametrize("runtime", [None, "CPP", "PYTHON", "auto"])
def test_every_backend_and_runtime_is_accepted_by_the_class(backend: Any, runtime: Any) -> None:
    """§2b: combinations are judged at start, not at construction."""
    config = CacheTransceiverConfig(backend=backend, transceiver_runtime=runtime)
    assert (config.backend, config.transceiver_runtime) == (backend, runtime)


@pytest.mark.parametrize("wrong", [{"backend": "nixl"}, {"transceiver_runtime": "AUTO"}, {"timeout_ms": 5}])
def test_unknown_names_are_rejected(wrong: dict[str, Any]) -> None:
    """§2b."""
    with pytest.raises(ValidationError):
        CacheTransceiverConfig.model_validate(wrong)


def test_events_defaults_are_the_seeds() -> None:
    """§2c."""
    assert KVEventsConfig().model_dump() == {
        "enable_kv_cache_events": False,
        "publisher": "null",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "",
    }


@pytest.mark.parametrize(
    ("given", "publisher"),
    [
        ({}, "null"),
        ({"enable_kv_cache_events": True}, "zmq"),
        ({"enable_kv_cache_events": True, "publisher": "null"}, "null"),
        ({"enable_kv_cache_events": False, "publisher": "zmq"}, "zmq"),
        ({"enable_kv_cache_events": True, "publisher": None}, "zmq"),
    ],
)
def test_default_publisher(given: dict[str, Any], publisher: str) -> None:
    """§7 T1: the matrix of enable and publisher."""
    assert KVEventsConfig(**given).publisher == publisher


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": ""},
        {"replay_endpoint": ""},
        {"hwm": 0},
        {"max_queue_size": 0},
        {"buffer_steps": 0},
        {"publisher": "nats"},
        {"topics": "kv"},
    ],
)
def test_events_rejects(wrong: dict[str, Any]) -> None:
    """§2c CHECKs."""
    with pytest.raises(ValidationError):
        KVEventsConfig.model_validate(wrong)
