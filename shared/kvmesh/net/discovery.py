"""How services find each other: through the coordinator, or from a fixed list of URLs.

Both offer :class:`Membership`. A :class:`CoordinatorClient` keeps its process registered, watches the others and
reports transfers; it outlives the coordinator: while that is gone, everyone known stays known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import quote

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from kvmesh.net.auth import ApiKeys
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.discovery_ledger import LedgerReporter
from kvmesh.net.discovery_link import MAX_RETRY_S, Backoff, CoordinatorLink
from kvmesh.net.discovery_static import StaticMembership
from kvmesh.net.discovery_view import MemberCallback, Membership, MemberView
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import (
    Heartbeat,
    HeartbeatReply,
    Life,
    Load,
    Member,
    Registration,
    RegistrationReply,
    Role,
    WatchReply,
)
from kvmesh.protocol.transfer import LedgerEvent
from kvmesh.telemetry import get_logger

__all__ = ["CoordinatorClient", "MemberCallback", "Membership", "StaticMembership"]

HEARTBEATS_PER_LEASE = 3
"""Two may be lost before a member is taken for dead."""

EXCHANGE_TIMEOUT_S = 3.0
"""Bound of one exchange with the coordinator, beside a watch's own time."""

WATCH_S = 30.0
"""Length of one long poll."""

FAREWELL_S = 2.0
"""How long a stopping process tries to say goodbye; its lease does the rest."""

LAST_WORDS_S = 0.5
"""Of that, for what the ledger has not heard yet."""

_log = get_logger("discovery")


class CoordinatorClient:
    """One process's tie to the coordinator. The constructor does no I/O; :meth:`start` begins, :meth:`stop` ends.

    Args:
        url: base URL of the coordinator, or of several, with commas between.
        clock: waits between attempts and heartbeats.
        watch: whether to follow the membership; without it :meth:`members` stays empty.
        headers: sent with every request (credentials).
        tls: whom to trust behind ``https://`` and what to present.
        keys: the API keys of this mesh now.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        watch: bool = True,
        headers: dict[str, str] | None = None,
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._watch = watch
        self._http = HttpClient(timeout_s=EXCHANGE_TIMEOUT_S, headers=headers, tls=tls, keys=keys, follow_leader=True)
        self._link = CoordinatorLink(url)
        self._view = MemberView()
        self._tasks: TaskGroup | None = None
        self._announcement: _Announcement | None = None
        self._ledger = LedgerReporter(self._http, self._link, self._clock)

    @property
    def connected(self) -> bool:
        """Whether the last exchange with the coordinator succeeded."""
        return self._link.connected

    @property
    def epoch(self) -> int:
        """This process's epoch: 0 before the first registration unless the member brought its own."""
        return self._announcement.member.epoch if self._announcement is not None else 0

    def members(self) -> list[Member]:
        """See :meth:`Membership.members`; includes this process once it is registered."""
        return self._view.members()

    def by_role(self, role: Role) -> list[Member]:
        """See :meth:`Membership.by_role`."""
        return self._view.by_role(role)

    def subscribe(self, callback: MemberCallback) -> Callable[[], None]:
        """See :meth:`Membership.subscribe`."""
        return self._view.subscribe(callback)

    async def start(self, tasks: TaskGroup) -> None:
        """Begin to watch and to report, in ``tasks``. Does not wait for the coordinator."""
        await tasks.start(self._run)

    def announce(
        self,
        member: Member,
        load: Callable[[], Load] = Load,
        *,
        on_outlived: Callable[[int], None] | None = None,
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        """Register this process and keep it registered until :meth:`stop`.

        Args:
            member: what the others see. A non-zero ``epoch`` is kept unless an older life of the same id holds it.
            load: asked for at each heartbeat.
            on_outlived: told the epoch of the next life of a member that brought its own, because this one was taken
                for dead. It is not registered any more then; without this it goes on under that epoch.
            on_fenced: told that a newer process has taken this instance id; heartbeats end.

        Raises:
            RuntimeError: not started, or announced already.
        """
        if self._tasks is None:
            raise RuntimeError("CoordinatorClient.announce() needs start() first")
        if self._announcement is not None:
            raise RuntimeError("a process announces one member")
        self._announcement = _Announcement(member, load, on_outlived, on_fenced)
        self._tasks.start_soon(self._stay_registered, self._announcement)

    def set_draining(self) -> None:
        """Tell the others, at once, that this process takes no new work."""
        if self._announcement is not None:
            self._announcement.member = msgspec.structs.replace(self._announcement.member, draining=True)
        self.tell_now()

    def tell_now(self) -> None:
        """Send the next heartbeat at once: the load has changed so that the others should know."""
        if self._announcement is not None:
            self._announcement.hurry.set()

    def report(self, events: Iterable[LedgerEvent]) -> None:
        """Queue transfer states for the ledger; never waits, drops the oldest when the queue is full."""
        self._ledger.report(events)

    async def stop(self) -> None:
        """Say goodbye, if the coordinator answers within :data:`FAREWELL_S`, and end all tasks; idempotent."""
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        with anyio.move_on_after(FAREWELL_S):
            await self._farewell()
        tasks.cancel_scope.cancel()

    def statistics(self) -> dict[str, float]:
        """Whether the coordinator answers, how often it was lost, and the ledger's queue."""
        return {
            "coordinator_connected": float(self._link.connected),
            "coordinator_losses_total": self._link.losses,
            "members": len(self._view.members()),
            **self._ledger.statistics(),
        }

    async def _run(self, *, task_status: TaskStatus[None]) -> None:
        async with self._http, anyio.create_task_group() as tasks:
            self._tasks = tasks
            if self._watch:
                tasks.start_soon(self._watch_members)
            tasks.start_soon(self._ledger.run)
            task_status.started()
            try:
                await anyio.sleep_forever()
            finally:
                # Ended from outside, the HTTP client goes too: stop() has nothing left to do, and no way to do it.
                self._tasks = None

    async def _watch_members(self) -> None:
        backoff = Backoff()
        while True:
            incarnation = self._view.incarnation
            timeout_s, url = WATCH_S, self._link.url
            if (expiry_s := self._view.next_expiry_s) is not None:
                timeout_s = min(WATCH_S, max(0.0, expiry_s - self._clock.monotonic_s()))
            try:
                reply = await self._http.call(
                    "GET",
                    f"{url}/members/watch?incarnation={incarnation}"
                    f"&revision={self._view.revision}&timeout_s={timeout_s:.3f}",
                    WatchReply,
                    timeout_s=timeout_s + EXCHANGE_TIMEOUT_S,
                )
            except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
                self._link.failed(error, url)
                await self._clock.sleep(backoff.next_s())
                continue
            self._link.succeeded()
            now_s = self._clock.monotonic_s()
            self._view.apply(reply, now_s)
            self._view.expire(now_s)
            await self._tell_later_lives()
            if incarnation and reply.incarnation != incarnation and self._announcement is not None:
                self._announcement.hurry.set()  # it does not know us yet
            if not reply.leads and self._link.try_next(url):
                await self._clock.sleep(backoff.next_s())
            else:
                backoff.reset()

    async def _tell_later_lives(self) -> None:
        """A coordinator that lost its memory, or has an old one, learns which lives are over."""
        for instance_id, epoch in self._view.take_outdated().items():
            url = self._link.url
            try:
                path = f"/members/{quote(instance_id, safe='')}/met"
                await self._http.call("POST", url + path, dict, body=Life(epoch=epoch))
            except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
                # It lists that life again after its next change, or its own end, and is told again.
                self._link.failed(error, url)
                return

    async def _stay_registered(self, announcement: _Announcement) -> None:
        try:
            await self._announce(announcement)
        finally:
            announcement.ended.set()

    async def _announce(self, announcement: _Announcement) -> None:
        backoff = Backoff()
        while not announcement.leaving:
            url = self._link.url
            try:
                if announcement.registered:
                    leads = await self._heartbeat(announcement)
                else:
                    leads = await self._register(announcement)
            except ApiError as error:
                if error.status == 404 and announcement.registered:
                    announcement.registered = False  # a restarted coordinator, or our lease ran out
                    continue
                if error.status == 409:
                    _log.error("fenced: a newer process has taken this instance id", error=error.message)
                    if announcement.on_fenced is not None:
                        announcement.on_fenced()
                    return
                self._link.failed(error, url)
                wait_s = backoff.next_s()
            except (PeerUnreachableError, msgspec.DecodeError) as error:
                self._link.failed(error, url)
                wait_s = backoff.next_s()
            else:
                self._link.succeeded()
                if not leads and self._link.try_next(url):
                    wait_s = min(backoff.next_s(), announcement.interval_s)
                else:
                    backoff = Backoff(most_s=min(MAX_RETRY_S, announcement.interval_s))
                    wait_s = announcement.interval_s
            if not announcement.leaving:
                await self._sleep_unless(announcement, wait_s)

    async def _register(self, announcement: _Announcement) -> bool:
        """Register; whether it was with a coordinator that leads."""
        member = msgspec.structs.replace(announcement.member, load=announcement.load())
        reply = await self._http.call(
            "POST", f"{self._link.url}/members", RegistrationReply, body=Registration(member=member)
        )
        announcement.registered = True
        announcement.interval_s = reply.lease_s / HEARTBEATS_PER_LEASE
        if reply.epoch != member.epoch:
            announcement.member = msgspec.structs.replace(announcement.member, epoch=reply.epoch)
            if member.epoch and announcement.on_outlived is not None:
                announcement.leaving = True
                announcement.on_outlived(reply.epoch)
                # Else it would be sent work until its lease runs out, for a life that nobody lives.
                with anyio.move_on_after(FAREWELL_S):
                    await self._withdraw(announcement)
        return reply.leads

    async def _heartbeat(self, announcement: _Announcement) -> bool:
        """Beat; whether a coordinator that leads has heard it."""
        member = announcement.member
        body = Heartbeat(epoch=member.epoch, load=announcement.load(), draining=member.draining)
        return (await self._http.call("POST", f"{self._member_url(member)}/heartbeat", HeartbeatReply, body=body)).leads

    async def _farewell(self) -> None:
        announcement = self._announcement
        if announcement is None:
            return
        # The goodbye is the last word: a heartbeat on its way would find itself unknown, and register again.
        announcement.leaving = True
        announcement.hurry.set()
        await announcement.ended.wait()
        if not announcement.registered:
            return
        # Whatever the ledger has not heard by then, it takes for given up.
        with anyio.move_on_after(LAST_WORDS_S):
            await self._ledger.emptied()
        await self._withdraw(announcement)

    async def _withdraw(self, announcement: _Announcement) -> None:
        announcement.registered = False
        member = announcement.member
        try:
            await self._http.call("DELETE", f"{self._member_url(member)}?epoch={member.epoch}", dict)
        except (PeerUnreachableError, ApiError, msgspec.DecodeError):
            return  # the lease will tell the others

    async def _sleep_unless(self, announcement: _Announcement, seconds: float) -> None:
        """Sleep, but no longer than until someone asks to hurry."""

        async def hurry() -> None:
            await announcement.hurry.wait()
            racers.cancel_scope.cancel()

        async with anyio.create_task_group() as racers:
            racers.start_soon(hurry)
            await self._clock.sleep(seconds)
            racers.cancel_scope.cancel()
        announcement.hurry = anyio.Event()

    def _member_url(self, member: Member) -> str:
        return f"{self._link.url}/members/{quote(member.instance_id, safe='')}"


class _Announcement:
    """What this process says of itself, and whether the coordinator has heard it."""

    def __init__(
        self,
        member: Member,
        load: Callable[[], Load],
        on_outlived: Callable[[int], None] | None,
        on_fenced: Callable[[], None] | None,
    ) -> None:
        self.member = member
        self.load = load
        self.on_outlived = on_outlived
        self.on_fenced = on_fenced
        self.registered = False
        self.interval_s = 1.0
        self.hurry = anyio.Event()
        self.leaving = False
        self.ended = anyio.Event()
        """Nothing more is said of the member."""
