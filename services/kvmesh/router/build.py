"""Wires the router's parts together from its settings; opens nothing."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.config import RouterSettings
from kvmesh.config.errors import ConfigError
from kvmesh.config.routing import KvCacheAwarePolicy
from kvmesh.events.keyed import KeyRing
from kvmesh.net.clock import Clock
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.members import Member
from kvmesh.router.admission import Admission
from kvmesh.router.attempt import Attempts
from kvmesh.router.cluster import Cluster
from kvmesh.router.dialects.base import Dialect
from kvmesh.router.dialects.kvmesh import KvMeshDialect
from kvmesh.router.dispatch import Dispatcher
from kvmesh.router.explain import Explainer
from kvmesh.router.hand_off import Abort
from kvmesh.router.ids import TransferIds
from kvmesh.router.legs import Legs
from kvmesh.router.loads import Loads
from kvmesh.router.match import Matcher, NoMatcher
from kvmesh.router.match_client import MatchClient
from kvmesh.router.match_in_process import InProcessMatcher
from kvmesh.router.perf import PerfRecords
from kvmesh.router.plan import Planner
from kvmesh.router.policy import make_policy
from kvmesh.router.recent import RecentRoutes
from kvmesh.router.upstream import Upstream
from kvmesh.telemetry import get_logger

__all__ = ["Parts", "build_parts", "custom_tokenizer"]

_log = get_logger("router")


class Parts(NamedTuple):
    """What a router is made of, apart from its HTTP face and the tokenizer."""

    cluster: Cluster
    matcher: Matcher
    dispatcher: Dispatcher
    planner: Planner
    admission: Admission
    explainer: Explainer
    perf: PerfRecords
    recent: RecentRoutes | None

    def statistics(self) -> dict[str, float]:
        """The parts' statistics in one mapping."""
        return {
            **self.cluster.statistics(),
            **self.matcher.statistics(),
            **self.dispatcher.statistics(),
            **self.admission.statistics(),
            **({} if self.recent is None else self.recent.statistics()),
        }


def build_parts(settings: RouterSettings, upstream: Upstream, abort: Abort, clock: Clock) -> Parts:
    """Everything between the pipeline and the workers.

    Args:
        settings: of the router.
        upstream: connections to workers.
        abort: sends an abort in the background.
        clock: of deadlines, breakers and ids.
    """
    dialects: dict[str, Dialect] = {dialect.name: dialect for dialect in (KvMeshDialect(),)}
    tokens_per_block = _tokens_per_block(settings)
    loads = Loads()
    cluster = Cluster(
        clock,
        loads,
        dialects=dialects,
        tokens_per_block=tokens_per_block,
        min_context_servers=settings.min_context_servers,
        min_generation_servers=settings.min_generation_servers,
        on_gone=lambda instance_id: gone(instance_id),
        on_problem=_warn,
    )
    planner = Planner(
        cluster,
        loads,
        context_policy=make_policy(settings.context_router),
        generation_policy=make_policy(settings.generation_router),
        max_local_prefill_length=settings.max_local_prefill_length,
        tokens_per_block=tokens_per_block,
    )
    matcher = _matcher(settings, clock)
    predicting = planner.needs_matches and not isinstance(matcher, NoMatcher)
    recent = RecentRoutes(matcher, clock, settings.index.predicted_ttl_s) if predicting else None

    def gone(instance_id: str) -> None:
        planner.forget(instance_id)
        if recent is not None:
            recent.forget(instance_id)

    ids = TransferIds(clock, node_id=settings.node_id)
    attempts = Attempts(
        planner,
        Legs(upstream, loads),
        dialects,
        ids,
        abort=abort,
        recent=recent,
        generation_first=settings.schedule_style == "generation_first",
    )
    return Parts(
        cluster=cluster,
        matcher=matcher,
        dispatcher=Dispatcher(attempts, max_retries=settings.max_retries),
        planner=planner,
        admission=Admission(settings.max_inflight, clock),
        explainer=Explainer(),
        perf=PerfRecords(),
        recent=recent,
    )


def _matcher(settings: RouterSettings, clock: Clock) -> Matcher:
    index = settings.index
    if index.kind == "in_process":
        if settings.coordinator_url is None:
            raise ConfigError("index.kind in_process needs coordinator_url: workers' event endpoints come from there")
        return InProcessMatcher(
            clock,
            max_memory_bytes=index.max_memory_bytes,
            predicted_ttl_s=index.predicted_ttl_s,
            approximate_ttl_s=index.approximate_ttl_s,
            anti_entropy_interval_s=index.anti_entropy_interval_s,
            security=CurveSecurity.load(settings.curve),
            keys=KeyRing.load(index.event_key_file, "index.event_key_file"),
        )
    if index.kind == "none" or settings.indexer_match_endpoint is None:
        return NoMatcher()
    return MatchClient(
        settings.indexer_match_endpoint,
        timeout_s=settings.match_timeout_ms / 1000,
        clock=clock,
        predicted_ttl_s=index.predicted_ttl_s,
        security=CurveSecurity.load(settings.curve),
    )


def custom_tokenizer(settings: RouterSettings) -> str | None:
    """The tokenizer that a cache-aware policy names instead of the model's."""
    return next(filter(None, (policy.custom_tokenizer for policy in _cache_aware(settings))), None)


def _tokens_per_block(settings: RouterSettings) -> int | None:
    """The block size that the cache-aware policies were configured for, if they were."""
    return next(filter(None, (policy.tokens_per_block for policy in _cache_aware(settings))), None)


def _cache_aware(settings: RouterSettings) -> list[KvCacheAwarePolicy]:
    policies = (settings.context_router, settings.generation_router)
    return [policy for policy in policies if isinstance(policy, KvCacheAwarePolicy)]


def _warn(member: Member, problem: str) -> None:
    _log.warning("server is not used fully", server=member.instance_id, url=member.url, problem=problem)
