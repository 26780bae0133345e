"""``RouterSettings``: the OpenAI face of the mesh."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvmesh.config.curve import CurveSettings
from kvmesh.config.endpoints import HttpUrl, HttpUrls, Port, ZmqEndpoint
from kvmesh.config.index import RouterIndexSettings
from kvmesh.config.routing import KvCacheAwarePolicy, RoutingPolicy
from kvmesh.config.service import DEFAULT_MODEL, Seconds, TracedSettings

__all__ = ["RouterSettings", "ScheduleStyle"]

ScheduleStyle = Literal["context_first", "generation_first"]


class RouterSettings(TracedSettings):
    """Settings of the router."""

    port: Port = 8000
    """Port of the OpenAI face."""
    model: str = DEFAULT_MODEL
    """Model whose tokenizer and chat template the router uses; must be the workers' own."""
    served_model_name: str | None = None
    """Name that clients use; unset: the model's own name."""
    coordinator_url: HttpUrls | None = None
    """Coordinator that knows the servers, or several with commas between; unset: only the static lists count."""
    context_servers: list[HttpUrl] = Field(default_factory=list)
    """Base URLs of context servers that are always there."""
    generation_servers: list[HttpUrl] = Field(default_factory=list)
    """Base URLs of generation servers that are always there."""
    min_context_servers: Annotated[int, Field(ge=0)] = 1
    """Context servers that must be there for the router to be ready."""
    min_generation_servers: Annotated[int, Field(ge=0)] = 1
    """Generation servers that must be there for the router to be ready."""
    indexer_url: HttpUrl | None = None
    """HTTP face of the KV event indexer."""
    indexer_match_endpoint: ZmqEndpoint | None = None
    """Match service of the indexer; unset: prefixes are not matched."""
    curve: CurveSettings = Field(default_factory=CurveSettings)
    """Encryption of the ZeroMQ sockets: the questions to the indexer."""
    index: RouterIndexSettings = Field(default_factory=RouterIndexSettings)
    """Where the router learns who holds how much of a prompt."""
    match_timeout_ms: Annotated[int, Field(gt=0)] = 50
    """Longest wait in milliseconds for a match; a request then goes on without one."""
    context_router: RoutingPolicy = Field(default_factory=KvCacheAwarePolicy)
    """How a context server is chosen."""
    generation_router: RoutingPolicy = Field(default_factory=KvCacheAwarePolicy)
    """How a generation server is chosen."""
    max_local_prefill_length: Annotated[int, Field(ge=0)] = 0
    """Uncached prompt tokens up to which a generation server that holds part of the prompt prefills it alone."""
    schedule_style: ScheduleStyle = "context_first"
    """Whether the generation leg starts after the context leg or together with it."""
    request_timeout_s: Seconds = 180.0
    """Deadline of one request in seconds."""
    max_inflight: Annotated[int, Field(gt=0)] = 1024
    """Requests served at a time; more are answered 429."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 << 20
    """Largest request body in bytes; larger ones are answered 413."""
    max_retries: Annotated[int, Field(ge=0)] = 1
    """Further servers tried when one cannot be reached before it answered anything."""
    tokenizer_threads: Annotated[int, Field(gt=0)] = 2
    """Threads that tokenize prompts beside the event loop."""
    api_keys: Annotated[list[str], Field(repr=False)] = Field(default_factory=list)
    """Accepted API keys, beside those of ``api_keys_file``. Prefer the file."""
    node_id: Annotated[int, Field(ge=0, le=255)] | None = None
    """Part of transfer ids that tells routers apart; unset: taken from the machine's hardware address."""

    @model_validator(mode="after")
    def require_matches_for_local_prefill(self) -> Self:
        """Serving a prompt by a generation server alone needs to know what that server holds."""
        if self.max_local_prefill_length > 0 and not isinstance(self.generation_router, KvCacheAwarePolicy):
            raise ValueError(
                "conditional disaggregation (max_local_prefill_length) requires generation_router.type kv_cache_aware"
            )
        return self
