"""From addresses to members: asks whoever is there, admits who passes, and renews their leases by asking again.

A member that was found has a lease like any other, so that one that does not answer is dead after ``lease_s``. One
whose address its sources no longer name has left. One that registers itself is its own business from then on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from kvmesh.coordinator.discovery.asking import Answer, SilentError, ask
from kvmesh.coordinator.discovery.source import Expected, Source, may_have_key
from kvmesh.coordinator.registry import EpochsUsedUpError, FencedError, MemberRegistry
from kvmesh.net.auth import ApiKeys
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import Clock
from kvmesh.net.server_info import info_problem, member_from_info
from kvmesh.net.tls import Tls
from kvmesh.protocol.members import Member, Role
from kvmesh.telemetry import get_logger

__all__ = ["Finder", "Place", "odd_layout"]

ASK_TIMEOUT_S = 2.0
"""Bound of one exchange with a server."""

RENEWALS_PER_LEASE = 3
"""Two may be lost before a member is taken for dead, as with heartbeats."""

RETRY_S = 1.0
"""How soon an address is asked again where nobody answers, or who does is not ready."""

REJECTED_RETRY_S = 5.0
"""How soon one is asked again that cannot be taken in: only a restart changes that."""

MOST_AT_A_TIME = 64
"""Servers that are asked at the same time."""

AFTER_DEFECT_S = 5.0

_log = get_logger("coordinator.discovery")


def odd_layout(member: Member, members: Iterable[Member]) -> str | None:
    """Whether none of the servers that could be paired with ``member`` has its page layout; None when one has.

    Servers of one model pair only with equal layout digests, a context with a generation server.
    """
    partner = {"context": "generation", "generation": "context"}.get(member.role)
    others = [
        other
        for other in members
        if other.role == partner and other.model == member.model and other.compat_digest and member.compat_digest
    ]
    if not others or any(other.compat_digest == member.compat_digest for other in others):
        return None
    other = others[0]
    return (
        f"its page layout ({member.compat_digest[:12]}) is that of no {partner} server: "
        f"{other.instance_id} has {other.compat_digest[:12]}"
    )


class Place:
    """One address, and what is known of who is there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.source = ""
        self.expected = Expected()
        self.takes_work = True
        """What its sources say: a pod that terminates takes no new work."""
        self.instance_id = ""
        """Of the member that was admitted here; empty: none is."""
        self.state = "not asked yet"
        self.next_s = 0.0
        self.being_asked = False


class Finder:
    """Keeps a registry's members in step with what sources find.

    Args:
        registry: gets the members.
        sources: say where servers are.
        clock: of the intervals.
        tls: whom to trust behind ``https://`` and what to present.
        keys: the API keys of this mesh now; see :func:`may_have_key`.
        admits: whether this coordinator answers for the mesh, so that it may admit and renew.
        buries: whether no other one can contradict it, so that it may let members go.
        asking: asks one server.
    """

    def __init__(
        self,
        registry: MemberRegistry,
        sources: Sequence[Source],
        clock: Clock,
        *,
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
        admits: Callable[[], bool] = lambda: True,
        buries: Callable[[], bool] = lambda: True,
        asking: Callable[[HttpClient, str, str], Awaitable[Answer]] = ask,
    ) -> None:
        self._registry = registry
        self._sources = sources
        self._clock = clock
        self._http = HttpClient(timeout_s=ASK_TIMEOUT_S, tls=tls)
        self._http_with_key = HttpClient(timeout_s=ASK_TIMEOUT_S, tls=tls, keys=keys)
        self._verifies = tls is not None and tls.settings.ca_file is not None
        self._admits = admits
        self._buries = buries
        self._asking = asking
        self._reported: list[Mapping[str, bool]] = [{} for _ in sources]
        self._places: dict[str, Place] = {}
        self._gone: dict[str, str] = {}
        """URL -> instance id of members whose address is named no more."""
        self._counts = {"asked": 0, "silent": 0, "rejected": 0, "found": 0, "left": 0, "defects": 0}
        self._wake = anyio.Event()

    async def run(self) -> None:
        """Follow the sources and ask, until cancelled."""
        limiter = anyio.CapacityLimiter(MOST_AT_A_TIME)
        async with self._http, self._http_with_key, anyio.create_task_group() as tasks:
            for index, source in enumerate(self._sources):
                tasks.start_soon(self._follow, source, partial(self._report, index))
            while True:
                self._let_go()
                next_s = self._start_asking(tasks, limiter)
                await self._sleep_until(next_s)

    def places(self) -> list[dict[str, Any]]:
        """Every address and what came of it, for people."""
        return [
            {
                "url": place.url,
                "source": place.source,
                "instance_id": place.instance_id or None,
                "takes_work": place.takes_work,
                "state": place.state,
            }
            for place in self._places.values()
        ]

    def statistics(self) -> dict[str, float]:
        """Addresses and members of theirs now, and what came of asking since the start."""
        return {
            "addresses": len(self._places),
            "members": sum(bool(place.instance_id) for place in self._places.values()),
            "source_errors_total": sum(source.statistics()["errors_total"] for source in self._sources),
            **{f"{name}_total": count for name, count in self._counts.items()},
        }

    async def _follow(self, source: Source, report: Callable[[Mapping[str, bool]], None]) -> None:
        while True:
            try:
                await source.run(report)
            except Exception:
                # One source's defect must not take the coordinator, or another source, along.
                self._counts["defects"] += 1
                _log.exception("a source of servers failed", source=source.name)
            await self._clock.sleep(AFTER_DEFECT_S)

    def _report(self, index: int, urls: Mapping[str, bool]) -> None:
        if urls == self._reported[index]:
            return
        self._reported[index] = dict(urls)
        named = dict.fromkeys(url for reported in self._reported for url in reported)
        for url in [url for url in self._places if url not in named]:
            place = self._places.pop(url)
            if place.instance_id:
                self._gone[url] = place.instance_id
        for url in named:
            place = self._places.get(url) or self._add(url)
            takes_work = any(reported.get(url, False) for reported in self._reported)
            if place.takes_work != takes_work:
                place.takes_work, place.next_s = takes_work, 0.0
        self._wake.set()

    def _add(self, url: str) -> Place:
        place = self._places[url] = Place(url)
        source = next(s for s, reported in zip(self._sources, self._reported, strict=True) if url in reported)
        place.source, place.expected = source.name, source.expected
        place.instance_id = self._gone.pop(url, "")
        return place

    def _let_go(self) -> None:
        """Members whose address is named no more have left."""
        if not self._gone or not self._buries():
            return
        for url, instance_id in self._gone.items():
            member = self._registry.member(instance_id)
            if member is not None and member.source and member.url == url:
                self._registry.deregister(instance_id, member.epoch)
                self._counts["left"] += 1
                _log.info("server is named no more", url=url, instance_id=instance_id, source=member.source)
        self._gone.clear()

    def _start_asking(self, tasks: TaskGroup, limiter: anyio.CapacityLimiter) -> float:
        """Ask whom it is time to ask; gives the monotonic time of the next."""
        now_s = self._clock.monotonic_s()
        next_s = now_s + RETRY_S
        for place in self._places.values():
            if place.being_asked:
                continue
            if place.next_s <= now_s and self._admits():
                place.being_asked = True
                tasks.start_soon(self._ask, place, limiter)
            elif place.next_s > now_s:
                next_s = min(next_s, place.next_s)
        return next_s

    async def _sleep_until(self, next_s: float) -> None:
        """Sleep, but no longer than until something is reported."""

        async def woken() -> None:
            await self._wake.wait()
            racers.cancel_scope.cancel()

        async with anyio.create_task_group() as racers:
            racers.start_soon(woken)
            await self._clock.sleep(max(0.0, next_s - self._clock.monotonic_s()))
            racers.cancel_scope.cancel()
        self._wake = anyio.Event()

    async def _ask(self, place: Place, limiter: anyio.CapacityLimiter) -> None:
        try:
            async with limiter:
                self._counts["asked"] += 1
                answer = await self._asking(self._client(place), place.url, place.expected.dialect)
        except SilentError as error:
            self._counts["silent"] += 1
            self._say(place, f"does not answer: {error}")
            if self._registry.member(place.instance_id) is None:
                place.instance_id = ""  # its lease has run out
            wait_s = RETRY_S
        else:
            known = self._places.get(place.url) is place and self._admits()
            wait_s = self._take(place, answer) if known else RETRY_S
        finally:
            place.being_asked = False
        place.next_s = self._clock.monotonic_s() + wait_s
        self._wake.set()  # whoever sleeps did not know when this one is next

    def _client(self, place: Place) -> HttpClient:
        return self._http_with_key if may_have_key(place.url, place.expected, self._verifies) else self._http

    def _take(self, place: Place, answer: Answer) -> float:
        """Admit or renew, or say why not; gives the seconds until it is asked again."""
        problem = info_problem(answer.info, place.expected.role)
        if problem is not None:
            self._counts["rejected"] += place.state != problem
            if place.state != problem:
                _log.warning("server is not taken in", url=place.url, source=place.source, problem=problem)
            place.state = problem
            return REJECTED_RETRY_S
        member = self._member(place, answer)
        known = self._registry.member(member.instance_id)
        if known is not None and not known.source:
            place.instance_id = ""
            self._say(place, f"has registered itself as {member.instance_id}")
            return self._registry.lease_s / RENEWALS_PER_LEASE
        if known is not None and known.url != place.url and known.url in self._places:
            self._say(place, f"is a member by its other address {known.url}")
            return self._registry.lease_s / RENEWALS_PER_LEASE
        if known is None and not (answer.ready and place.takes_work):
            self._say(place, "is not ready")
            return RETRY_S
        if known is not None and member.epoch <= known.epoch:
            # The same life: one that was dead for a while has got an epoch that it does not know.
            member.epoch = known.epoch
            member.started_unix_ms = known.started_unix_ms
        try:
            self._registry.register(member)
        except (FencedError, EpochsUsedUpError):
            self._say(place, f"is an earlier life of {member.instance_id}")
            return REJECTED_RETRY_S
        if place.instance_id != member.instance_id:
            self._counts["found"] += 1
            _log.info(
                "server found", url=place.url, instance_id=member.instance_id, role=member.role, source=place.source
            )
        place.instance_id = member.instance_id
        state = "draining" if member.draining else "a member"
        odd = odd_layout(member, self._registry.members().members)
        if odd is not None:
            state = f"{state}, but {odd}"
            if place.state != state:
                _log.warning("server will not be paired", url=place.url, instance_id=member.instance_id, problem=odd)
        place.state = state
        return self._registry.lease_s / RENEWALS_PER_LEASE

    def _member(self, place: Place, answer: Answer) -> Member:
        role: Role = place.expected.role or answer.info.role  # type: ignore[assignment]  # info_problem has looked
        member = member_from_info(
            answer.info, place.url, role=role, dialect=answer.info.dialect or place.expected.dialect
        )
        return msgspec.structs.replace(
            member,
            source=place.source,
            draining=answer.draining or not place.takes_work,
            load=answer.load,
            started_unix_ms=self._clock.unix_ns() // 1_000_000,
        )

    def _say(self, place: Place, state: str) -> None:
        if place.state != state:
            _log.debug("server", url=place.url, source=place.source, state=state)
        place.state = state
