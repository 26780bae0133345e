"""A worker's event source, from its settings: the sink that the cache fills, and where what it collects goes."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.cache.layout import PageLayout
from kvmesh.config import ConfigError, KvCacheConfig, KVEventsConfig, WorkerSettings
from kvmesh.config.event_ports import event_port_problems
from kvmesh.events.buffer import EventBuffer
from kvmesh.events.buffered import BufferedSink, Envelope
from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.events.gather import EventGatherer
from kvmesh.events.keyed import KeyRing
from kvmesh.events.names import EventHashAlgo, block_names, effective_event_algo
from kvmesh.events.published import PublishedSet
from kvmesh.events.publisher import NullPublisher, ZmqPublisher
from kvmesh.events.sink import StreamSink
from kvmesh.events.source import BufferedSource, EventSource, StreamSource
from kvmesh.events.target import target_group
from kvmesh.net.clock import Clock
from kvmesh.net.curve import CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = ["EventOrigin", "create_event_source"]

_log = get_logger("events")


class EventOrigin(NamedTuple):
    """Whose events they are."""

    model_name: str
    """As clients call it; part of the topic when ``topic_style`` is ``kv``."""
    layout: PageLayout
    """Of the cache."""
    manager_v2: bool
    """Whether it has V2's block keys."""
    max_seq_len: int
    """Longest sequence in tokens: what full attention's window is called."""
    vocab_size: int | None = None
    """Token ids from here on are not text."""
    rank: int = 0
    """Attention data-parallel rank."""
    world_size: int = 1
    """Attention data-parallel ranks of the server."""


def create_event_source(settings: WorkerSettings, origin: EventOrigin, clock: Clock) -> EventSource:
    """The event source of one rank; binds nothing yet.

    Args:
        settings: the worker's.
        origin: whose events they are.
        clock: paces the gathering of buffered events.

    Raises:
        EndpointError: the endpoints cannot work.
        ConfigError: a key of the sockets or of the stream cannot be used.
        NoTargetGroupError: the model has no layer group whose blocks can be streamed.
    """
    cache = settings.kv_cache_config
    streaming = cache.kv_events_config
    algo, warning = effective_event_algo(cache.kv_cache_event_hash_algo, manager_v2=origin.manager_v2)
    if warning is not None:
        _log.warning(warning)
    if streaming is not None and streaming.enable_kv_cache_events:
        if cache.event_buffer_max_size > 0:
            _log.warning(
                "event_buffer_max_size has no effect: kv_events_config streams the events instead; "
                "set kv_events_config.enable_kv_cache_events to false to buffer them"
            )
        return _stream(settings, streaming, origin, algo)
    if cache.event_buffer_max_size > 0:
        return _buffered(cache, origin, algo, clock)
    return EventSource(algo)


def _stream(settings: WorkerSettings, config: KVEventsConfig, origin: EventOrigin, algo: EventHashAlgo) -> EventSource:
    keys = KeyRing.load(settings.events.key_file, "events.key_file")
    key = None if keys is None else keys.first
    if key is not None and not origin.manager_v2:
        raise ConfigError(
            "events.key_file needs the block keys of KV cache manager V2; set kv_cache_config.use_kv_cache_manager_v2 "
            "to true, or leave the file out"
        )
    common = (None, None) if key is None else (None, key.salt)
    published = None if config.publisher == "null" else PublishedSet(common)
    sink = StreamSink(
        origin.layout.tokens_per_block,
        target_group(origin.layout.groups),
        signed=settings.events.hash_sign == "signed",
        tier_moves=settings.events.tier_moves,
        published=published,
        key=key,
    )
    if published is None:
        return StreamSource(algo, sink, NullPublisher())
    problems = event_port_problems(
        config.endpoint, config.replay_endpoint, ranks_per_host=origin.world_size, world_size=origin.world_size
    )
    if problems:
        raise EndpointError("; ".join(problems))
    publisher = ZmqPublisher(
        rank_endpoint(config.endpoint, origin.rank),
        None if config.replay_endpoint is None else rank_endpoint(config.replay_endpoint, origin.rank),
        topic=config.topic,
        topic_model=origin.model_name if settings.events.topic_style == "kv" else None,
        hwm=config.hwm,
        max_queue_size=config.max_queue_size,
        buffer_steps=config.buffer_steps,
        data_parallel_rank=origin.rank,
        encoding=settings.events.event_encoding,
        published=published,
        security=CurveSecurity.load(settings.curve),
    )
    return StreamSource(algo, sink, publisher)


def _buffered(config: KvCacheConfig, origin: EventOrigin, algo: EventHashAlgo, clock: Clock) -> EventSource:
    layout, capacity = origin.layout, config.event_buffer_max_size
    envelope = Envelope(
        hash_algo=algo,
        windows=[origin.max_seq_len if group.window is None else group.window for group in layout.groups],
        with_group_ids=origin.manager_v2,
        attention_dp_rank=origin.rank if origin.world_size > 1 else None,
    )
    names = block_names(
        algo,
        manager_v2=origin.manager_v2,
        tokens_per_block=layout.tokens_per_block,
        vocab_size=origin.vocab_size,
    )
    buffer = EventBuffer(capacity)
    gatherer = EventGatherer(
        buffer,
        capacity,
        # V2 gathers with every iteration, V1 in a rhythm of its own (semantics 2).
        period_s=0.0 if origin.manager_v2 else config.attention_dp_events_gather_period_ms / 1000,
        clock=clock,
    )
    return BufferedSource(algo, BufferedSink(layout.tokens_per_block, names, envelope), gatherer, buffer)
