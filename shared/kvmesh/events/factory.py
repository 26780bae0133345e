"""A worker's event source, from its settings: the sink that the cache fills and the publisher that sends."""

from __future__ import annotations

from kvmesh.cache.layout import PageLayout
from kvmesh.config import WorkerSettings
from kvmesh.config.event_ports import event_port_problems
from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.events.publisher import EventPublisher, NullPublisher, ZmqPublisher
from kvmesh.events.sink import StreamSink
from kvmesh.events.target import target_group

__all__ = ["EventSource", "create_event_source"]


class EventSource:
    """What the executor holds: ``sink`` for the cache manager, :meth:`flush` once a step."""

    def __init__(self, sink: StreamSink | None, publisher: EventPublisher) -> None:
        self.sink = sink
        """None when nothing is published: the cache manager then collects nothing."""
        self.publisher = publisher

    def start(self) -> None:
        """Bind the ports.

        Raises:
            OSError: one of them is taken.
        """
        self.publisher.start()

    def flush(self) -> None:
        """Send what the step changed, if anything."""
        if self.sink is not None:
            self.publisher.publish(self.sink.take())

    def shutdown(self) -> None:
        """Flush and free the ports."""
        self.flush()
        self.publisher.shutdown()

    def statistics(self) -> dict[str, int]:
        """Batches and blocks told so far, for the engine's statistics."""
        sent = self.publisher.statistics()
        return {"events_published_total": sent.published_total, "events_dropped_total": sent.dropped_total}


def create_event_source(
    settings: WorkerSettings, layout: PageLayout, *, model_name: str, rank: int = 0, world_size: int = 1
) -> EventSource:
    """The event source of one rank; binds nothing yet.

    Args:
        settings: the worker's.
        layout: of its cache.
        model_name: as clients call it; part of the topic when ``topic_style`` is ``kv``.
        rank: global attention-DP rank.
        world_size: ranks in all.

    Raises:
        EndpointError: the endpoints cannot work.
        NoTargetGroupError: the model has no layer group whose blocks can be told.
    """
    config = settings.kv_cache_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return EventSource(None, NullPublisher())
    sink = StreamSink(
        layout.tokens_per_block, target_group(layout.groups), signed=settings.events.hash_sign == "signed"
    )
    if config.publisher == "null":
        return EventSource(sink, NullPublisher())
    problems = event_port_problems(
        config.endpoint, config.replay_endpoint, ranks_per_host=world_size, world_size=world_size
    )
    if problems:
        raise EndpointError("; ".join(problems))
    return EventSource(
        sink,
        ZmqPublisher(
            rank_endpoint(config.endpoint, rank),
            None if config.replay_endpoint is None else rank_endpoint(config.replay_endpoint, rank),
            topic=config.topic,
            topic_model=model_name if settings.events.topic_style == "kv" else None,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            buffer_steps=config.buffer_steps,
            data_parallel_rank=rank,
            encoding=settings.events.event_encoding,
        ),
    )
