"""Membership from a fixed list of URLs (TensorRT-LLM's ``context_servers`` and ``generation_servers``).

Each server is asked for ``/server_info`` and ``/health`` every few seconds: it joins when it answers and is dead while
it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from kvmesh.net.auth import ApiKeys
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.discovery_view import MemberCallback, MemberView
from kvmesh.net.server_info import ServerInfo, member_from_info
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member, MemberEvent, Role, WatchReply
from kvmesh.telemetry import get_logger

__all__ = ["StaticMembership"]

PROBE_INTERVAL_S = 3.0
"""As TensorRT-LLM's router does."""

PROBE_TIMEOUT_S = 2.0

_log = get_logger("discovery")


class StaticMembership:
    """A :class:`kvmesh.net.discovery.Membership` over servers that are named beforehand.

    A server named in both lists is one ``both`` member.

    Args:
        context_urls: base URLs, ``http://`` may be left out.
        generation_urls: base URLs, ``http://`` may be left out.
        clock: waits between probes.
        dialect: of these servers.
        tls: whom to trust behind ``https://`` and what to present.
        keys: the API keys of this mesh now.
    """

    def __init__(
        self,
        context_urls: Iterable[str] = (),
        generation_urls: Iterable[str] = (),
        *,
        clock: Clock | None = None,
        dialect: str = "kvmesh",
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._dialect = dialect
        self._view = MemberView()
        self._http = HttpClient(timeout_s=PROBE_TIMEOUT_S, tls=tls, keys=keys)
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
            info = await self._http.call("GET", f"{url}/server_info", ServerInfo)
        except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
            if (member := self._alive.pop(url, None)) is not None:
                _log.warning("server does not answer", url=url, error=str(error))
                self._tell(MemberEvent(revision=0, kind="dead", member=member))
            return
        if url not in self._alive:
            _log.info("server answers", url=url, role=role)
        member = self._alive[url] = member_from_info(info, url, role=role, dialect=self._dialect)
        self._tell(MemberEvent(revision=0, kind="joined", member=member))

    def _tell(self, event: MemberEvent) -> None:
        self._revision += 1
        event.revision = self._revision
        self._view.apply(WatchReply(revision=self._revision, events=[event]), self._clock.monotonic_s())


def _base_url(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")
