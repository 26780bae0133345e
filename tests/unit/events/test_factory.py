"""A worker's event source, from its settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.events.endpoints import EndpointError
from kvmesh.events.factory import EventOrigin, create_event_source
from kvmesh.events.keyed import generate_key
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.sink import StreamSink
from kvmesh.events.source import BufferedSource, EventSource, EventStatistics, StreamSource
from kvmesh.net.clock import ManualClock
from kvmesh.net.curve import create_key_pair
from kvmesh.protocol.events import KeyedBlocksStored

MakeBlocks = Callable[..., StoredBlocks]

STREAMED = {"enable_kv_cache_events": True, "publisher": "null"}
LOOPBACK = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


def layout(*windows: int | None) -> PageLayout:
    layers = tuple(
        LayerCacheSpec(layer_index=i, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
        for i, window in enumerate(windows)
    )
    return PageLayout.build(CacheRequirements(layers), 1)


def source_of(
    cache: dict[str, Any],
    *windows: int | None,
    clock: ManualClock | None = None,
    tier_moves: str = "publish",
    events: dict[str, Any] | None = None,
    curve: dict[str, Any] | None = None,
    **origin: Any,
) -> EventSource:
    settings = WorkerSettings.model_validate(
        {
            "role": "context",
            "model": "m",
            "kv_cache_config": cache,
            "events": {"tier_moves": tier_moves} | (events or {}),
            "curve": curve or {},
        }
    )
    facts = {"model_name": "m", "layout": layout(*windows or (None,)), "manager_v2": True, "max_seq_len": 512}
    return create_event_source(settings, EventOrigin(**facts | origin), clock or ManualClock())  # type: ignore[arg-type]


def test_events_are_off_by_default() -> None:
    source = source_of({})
    assert source.sink is None
    assert (source.endpoint, source.replay_endpoint, source.due_in_s()) == (None, None, None)
    source.start()
    source.flush()
    assert source.fetch(0).events == []
    assert source.statistics() == EventStatistics()
    source.shutdown()


@pytest.mark.parametrize(
    ("setting", "v2", "advertised"),
    [("auto", True, "v2_sha256"), ("auto", False, "v1_block_key"), ("v2_sha256_64", True, "v2_sha256_64")],
)
@pytest.mark.parametrize("path", [{}, {"event_buffer_max_size": 4}, {"kv_events_config": STREAMED}])
def test_the_effective_hash_algorithm_is_advertised(path: Any, setting: str, v2: bool, advertised: str) -> None:
    """decisions.md 6: on the wire it makes no difference."""
    assert source_of(path | {"kv_cache_event_hash_algo": setting}, manager_v2=v2).hash_algo == advertised


def test_v1_warns_of_an_algorithm_that_it_does_not_have() -> None:
    with capture_logs() as logs:
        source = source_of({"kv_cache_event_hash_algo": "v2_sha256"}, manager_v2=False)
    assert source.hash_algo == "v1_block_key"
    assert len(logs) == 1


@pytest.mark.parametrize("v2", [True, False])
def test_a_null_publisher_collects_and_sends_nothing(make_blocks: MakeBlocks, v2: bool) -> None:
    """With both managers, although TensorRT-LLM streams with V2 only (§2 kv_events_config)."""
    source = source_of({"kv_events_config": STREAMED}, manager_v2=v2)
    assert source.sink is not None
    source.sink.on_stored(0, make_blocks([1]))
    source.sink.on_removed(0, make_blocks([1]).keys, 0)
    source.flush()
    assert source.statistics() == EventStatistics(blocks_stored_total=1, blocks_removed_total=1)


def test_the_group_with_the_largest_window_is_streamed(make_blocks: MakeBlocks) -> None:
    source = source_of({"kv_events_config": STREAMED}, 64, None)
    assert source.sink is not None
    source.sink.on_stored(0, make_blocks([1, 2]))
    source.sink.on_stored(1, make_blocks([1, 2]))
    assert source.statistics() == EventStatistics(blocks_stored_total=2, blocks_non_target_total=2)


@pytest.mark.parametrize(("tier_moves", "moved"), [("publish", 1), ("device_only", 0)])
def test_tier_moves_are_a_setting(make_blocks: MakeBlocks, tier_moves: str, moved: int) -> None:
    source = source_of({"kv_events_config": STREAMED}, tier_moves=tier_moves)
    assert source.sink is not None
    source.sink.on_created(("gpu", "host"), [(1, 1)])
    source.sink.on_stored(0, make_blocks([1]))
    source.sink.on_moved(0, make_blocks([1]).keys, 0, 1)
    assert source.statistics().blocks_moved_total == moved


def test_2_2_buffered_events_are_fetched(make_blocks: MakeBlocks) -> None:
    source = source_of({"event_buffer_max_size": 2}, None, 64)
    assert isinstance(source, BufferedSource)
    sink = source.sink
    sink.on_created(("gpu",), [(4,), (4,)])
    sink.on_stored(1, make_blocks([1]))
    assert source.fetch(0).events == []
    source.flush()
    position, events = source.fetch(0)
    assert [(event.event_id, event.window_size, event.layer_group_id) for event in events] == [(1, 64, 1), (2, 64, 1)]
    assert {event.hash_algo for event in events} == {"v2_sha256"}
    assert {event.attention_dp_rank for event in events} == {None}
    assert source.statistics() == EventStatistics(
        blocks_stored_total=1, buffered=2, buffered_total=3, buffer_dropped_total=1
    )
    assert source.fetch(position).events == []
    assert source.statistics().buffered == 0


def test_2_2_when_both_paths_are_on_streaming_wins_with_a_warning(make_blocks: MakeBlocks) -> None:
    with capture_logs() as logs:
        source = source_of({"event_buffer_max_size": 2, "kv_events_config": STREAMED})
    assert isinstance(source, StreamSource)
    assert len(logs) == 1
    assert "event_buffer_max_size has no effect" in logs[0]["event"]
    source.sink.on_stored(0, make_blocks([1]))
    source.flush()
    assert source.fetch(0).events == []


def test_2_2_the_events_of_two_ranks_say_which_is_whose(make_blocks: MakeBlocks) -> None:
    for rank in (0, 1):
        source = source_of({"event_buffer_max_size": 1}, rank=rank, world_size=2)
        assert source.sink is not None
        source.sink.on_stored(0, make_blocks([1]))
        source.flush()
        assert [event.attention_dp_rank for event in source.fetch(0).events] == [rank]


def test_2_the_gathering_period_is_v1s(make_blocks: MakeBlocks) -> None:
    for manager_v2, expected in ((True, None), (False, pytest.approx(0.25))):
        clock = ManualClock()
        source = source_of(
            {"event_buffer_max_size": 4, "attention_dp_events_gather_period_ms": 250},
            clock=clock,
            manager_v2=manager_v2,
        )
        source.flush()
        assert source.sink is not None
        source.sink.on_stored(0, make_blocks([(1).to_bytes(8, "big")]))
        source.flush()
        assert source.due_in_s() == expected
        assert len(source.fetch(0).events) == (1 if manager_v2 else 0)
        clock.advance(0.25)
        source.flush()
        assert len(source.fetch(0).events) == 1


def test_ranks_publish_side_by_side() -> None:
    source = source_of({"kv_events_config": {"enable_kv_cache_events": True} | LOOPBACK}, rank=1, world_size=2)
    source.start()
    assert source.endpoint is not None
    assert source.endpoint != source.replay_endpoint
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
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    with pytest.raises(EndpointError, match=says):
        source_of({"kv_events_config": events}, world_size=2)


def test_keys_that_cannot_be_used_are_refused_before_anything_is_bound(tmp_path: Path) -> None:
    streamed = {"kv_events_config": {"enable_kv_cache_events": True} | LOOPBACK}
    _, secret = create_key_pair(tmp_path)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        source_of(streamed, curve={"key_file": str(secret)})
    keys = tmp_path / "keys"
    keys.write_text(generate_key())
    keys.chmod(0o600)
    with pytest.raises(ConfigError, match="use_kv_cache_manager_v2"):
        source_of(streamed, manager_v2=False, events={"key_file": str(keys)})


def test_a_source_with_a_key_tells_names(make_blocks: MakeBlocks, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(generate_key())
    keys.chmod(0o600)
    source = source_of({"kv_events_config": STREAMED}, events={"key_file": str(keys)})
    assert isinstance(source, StreamSource)
    sink = source.sink
    assert isinstance(sink, StreamSink)
    sink.on_stored(0, make_blocks([1]))
    [event] = sink.take()
    assert isinstance(event, KeyedBlocksStored)


@pytest.mark.parametrize(
    ("enabled", "publisher", "streams"), [(False, None, False), (False, "zmq", False), (True, None, True)]
)
def test_an_explicit_publisher_does_not_turn_events_on(enabled: bool, publisher: str | None, streams: bool) -> None:
    """§2c: events disabled with publisher zmq keep the value and publish nothing."""
    config = {"enable_kv_cache_events": enabled, "publisher": publisher} | LOOPBACK
    source = source_of({"kv_events_config": config})
    assert isinstance(source, StreamSource) is streams
    source.start()
    assert (source.endpoint is not None) is streams
    source.shutdown()


def test_every_field_reaches_the_publisher(make_blocks: MakeBlocks) -> None:
    """§2c, field by field: endpoint, replay_endpoint, buffer_steps, topic, the rank in the batch, the dialect."""
    config = {"enable_kv_cache_events": True, "topic": "t", "buffer_steps": 1, "hwm": 5, "max_queue_size": 3} | LOOPBACK
    source = source_of(
        {"kv_events_config": config}, rank=1, world_size=2, events={"event_encoding": "array", "hash_sign": "signed"}
    )
    assert isinstance(source, StreamSource)
    source.start()
    try:
        assert source.endpoint is not None
        assert source.replay_endpoint is not None
        for number in (1, 2**64 - 1):
            source.sink.on_stored(0, make_blocks([number], [[7]]))
            source.flush()
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger, socket.rcvtimeo = 0, 5000
            socket.connect(source.replay_endpoint)
            frames: list[bytes] = []
            while not frames or frames[2] != (1).to_bytes(8, "big"):  # the last step, once it has been sent
                socket.send_multipart([b"", bytes(8)])
                frames = socket.recv_multipart()
                end = frames if not frames[3] else socket.recv_multipart()
                assert end == [b"", b"", b"\xff" * 8, b""], "one step is kept"
    finally:
        source.shutdown()
    assert frames[1] == b"t"
    _, [event], rank = msgspec.msgpack.decode(frames[3])
    assert rank == 1
    assert event[:6] == ["BlockStored", [-1], None, [7], 1, None]


def test_the_topic_of_style_kv_names_address_and_model() -> None:
    """decisions.md 6: only with topic_style kv, and the configured topic always wins."""
    for topic, style, expected in (("", "kv", "kv@127.0.0.1:{port}@m"), ("x", "kv", "x"), ("", "plain", "")):
        config = {"enable_kv_cache_events": True, "topic": topic} | LOOPBACK
        source = source_of({"kv_events_config": config}, events={"topic_style": style})
        assert isinstance(source, StreamSource)
        source.start()
        try:
            assert source.endpoint is not None
            publisher = source._publisher
            assert isinstance(publisher, ZmqPublisher)
            assert publisher.topic == expected.format(port=source.endpoint.rpartition(":")[2])
        finally:
            source.shutdown()
