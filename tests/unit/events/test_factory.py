"""A worker's event source, from its settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.config import WorkerSettings
from kvmesh.events.endpoints import EndpointError
from kvmesh.events.factory import create_event_source
from kvmesh.events.publisher import NullPublisher, ZmqPublisher
from kvmesh.hashing import ReuseScope

LAYOUT = PageLayout.build(
    CacheRequirements((LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=8, dtype="float32"),)), 4
)
BLOCK = StoredBlocks(ReuseScope(), None, [bytes(32)], np.zeros((1, 4), np.int32), 0, np.zeros(1, np.uint8))


def settings(**events: Any) -> WorkerSettings:
    return WorkerSettings(role="context", model="m", kv_cache_config={"kv_events_config": events})


def test_events_are_off_by_default() -> None:
    source = create_event_source(settings(), LAYOUT, model_name="m")
    assert source.sink is None
    assert isinstance(source.publisher, NullPublisher)
    source.start()
    source.flush()
    source.shutdown()


def test_a_null_publisher_collects_and_sends_nothing() -> None:
    source = create_event_source(settings(enable_kv_cache_events=True, publisher="null"), LAYOUT, model_name="m")
    assert source.sink is not None
    source.sink.on_stored(0, BLOCK)
    source.sink.on_removed(0, BLOCK.keys, 0)
    source.flush()
    assert source.statistics() == {"events_published_total": 0, "events_dropped_total": 0}


def test_ranks_publish_side_by_side() -> None:
    source = create_event_source(
        settings(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"),
        LAYOUT,
        model_name="m",
        rank=1,
        world_size=2,
    )
    assert isinstance(source.publisher, ZmqPublisher)
    source.start()
    assert source.publisher.endpoint != source.publisher.replay_endpoint
    source.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "replay", "says"),
    [
        ("tcp://*:5557", "tcp://*:5558", "overlap"),
        ("tcp://*:65535", None, "above the maximum port 65535"),
        ("tcp://*:5557", "tcp://*:65535", "above the maximum port 65535"),
    ],
)
def test_t12_ports_that_cannot_be_bound_are_refused_before_any_is(endpoint: str, replay: str | None, says: str) -> None:
    events = settings(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay)
    with pytest.raises(EndpointError, match=says):
        create_event_source(events, LAYOUT, model_name="m", world_size=2)
