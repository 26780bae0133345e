"""Membership from a fixed list of URLs (TensorRT-LLM's ``context_servers`` and ``generation_servers``).

Each server is asked for ``/server_info`` and ``/health`` every few seconds: it joins when it answers and is dead while
it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.discovery_view import MemberCallback, MemberView
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Count, Epoch, Member, MemberEvent, Role, WatchReply
from kvmesh.telemetry import get_logger

__all__ = ["StaticMembership"]

PROBE_INTERVAL_S = 3.0
"""As TensorRT-LLM's router does."""

PROBE_TIMEOUT_S = 2.0

_log = get_logger("discovery")


class _DisaggregatedInfo(msgspec.Struct):
    ctx_info_endpoint: str | list[str] | None = None


class _ServerInfo(msgspec.Struct):
    """``GET /server_info`` of KVMesh and TensorRT-LLM servers; what the latter lack has a default."""

    instance_id: str = ""
    epoch: Epoch = 0
    model: str = ""
    compat_digest: str = ""
    tokens_per_block: Count = 0
    kv_cache_hash_algo: str = ""
    max_batch_size: Count = 0
    dp_size: Count = 1
    max_seq_len: Count = 0
    ctx_addresses: list[str] = []
    transfer_backend: str | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    events_single_group: bool = False
    disaggregated_params: _DisaggregatedInfo | None = None


class StaticMembership:
    """A :class:`kvmesh.net.discovery.Membership` over servers that are named beforehand.

    A server named in both lists is one ``both`` member.

    Args:
        context_urls: base URLs, ``http://`` may be left out.
        generation_urls: base URLs, ``http://`` may be left out.
        clock: waits between probes.
        dialect: of these servers.
        tls: whom to trust behind ``https://`` and what to present.
    """

    def __init__(
        self,
        context_urls: Iterable[str] = (),
        generation_urls: Iterable[str] = (),
        *,
        clock: Clock | None = None,
        dialect: str = "kvmesh",
        tls: Tls | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._dialect = dialect
        self._view = MemberView()
        self._http = HttpClient(timeout_s=PROBE_TIMEOUT_S, tls=tls)
        self._scope: anyio.CancelScope | None = None
        self._alive: dict[str, Member] = {}
        self._revision = 0
        context, generation = ([_base_url(url) for url in urls] for urls in (context_urls, generation_urls))
        self._roles: dict[str, Role] = dict.fromkeys(context, "context")
        for url in generation:
            self._roles[url] = "both" if url in self._roles else "generation"

    def members(self) -> list[Member]:
        """See :meth:`Membership.members`."""
        return self._view.members()

    def by_role(self, role: Role) -> list[Member]:
        """See :meth:`Membership.by_role`."""
        return self._view.by_role(role)

    def subscribe(self, callback: MemberCallback) -> Callable[[], None]:
        """See :meth:`Membership.subscribe`."""
        return self._view.subscribe(callback)

    async def start(self, tasks: TaskGroup) -> None:
        """Begin to probe, in ``tasks``; the first round is over when this returns."""
        await tasks.start(self._run)

    async def stop(self) -> None:
        """End the probes; idempotent."""
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    async def _run(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._scope:
            async with self._http:
                await self._probe_all()
                task_status.started()
                while True:
                    await self._clock.sleep(PROBE_INTERVAL_S)
                    await self._probe_all()

    async def _probe_all(self) -> None:
        async with anyio.create_task_group() as probes:
            for url, role in self._roles.items():
                probes.start_soon(self._probe, url, role)

    async def _probe(self, url: str, role: Role) -> None:
        try:
            async with self._http.open("GET", f"{url}/health"):
                pass
            info = await self._http.call("GET", f"{url}/server_info", _ServerInfo)
        except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
            if (member := self._alive.pop(url, None)) is not None:
                _log.warning("server does not answer", url=url, error=str(error))
                self._tell(MemberEvent(revision=0, kind="dead", member=member))
            return
        if url not in self._alive:
            _log.info("server answers", url=url, role=role)
        member = self._alive[url] = self._member(url, role, info)
        self._tell(MemberEvent(revision=0, kind="joined", member=member))

    def _member(self, url: str, role: Role, info: _ServerInfo) -> Member:
        given = info.disaggregated_params.ctx_info_endpoint if info.disaggregated_params is not None else None
        endpoints = [given] if isinstance(given, str) else given or []
        return Member(
            instance_id=info.instance_id or urlsplit(url).netloc,
            role=role,
            url=url,
            epoch=info.epoch,
            dialect=self._dialect,
            model=info.model,
            compat_digest=info.compat_digest,
            tokens_per_block=info.tokens_per_block,
            kv_cache_hash_algo=info.kv_cache_hash_algo,
            max_batch_size=info.max_batch_size,
            max_seq_len=info.max_seq_len,
            dp_size=info.dp_size,
            ctx_info_endpoint=endpoints[0] if endpoints else None,
            ctx_addresses=info.ctx_addresses,
            transfer_backend=info.transfer_backend,
            events_endpoint=info.events_endpoint,
            replay_endpoint=info.replay_endpoint,
            events_single_group=info.events_single_group,
        )

    def _tell(self, event: MemberEvent) -> None:
        self._revision += 1
        event.revision = self._revision
        self._view.apply(WatchReply(revision=self._revision, events=[event]), self._clock.monotonic_s())


def _base_url(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")
