"""Which of several coordinators at one etcd leads, and what the next one takes over.

The leader's key is bound to an etcd lease that the leader keeps alive; everything it writes is guarded by the revision
of that key, so that one that was replaced while it stood still can write nothing more. Without etcd everybody goes on
with what they have: a leader answers from its memory, a follower follows, one that never reached etcd acts alone. But
only who holds the lease by its own clock *leads*, and decides what another leader could decide otherwise.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from kvmesh.coordinator.etcd import EtcdClient, EtcdError, Guard, KeyValue
from kvmesh.coordinator.mirror import DeposedError, Mirror
from kvmesh.coordinator.state import CoordinatorState, Restored
from kvmesh.net.clock import Clock
from kvmesh.net.discovery_link import Backoff
from kvmesh.telemetry import get_logger

__all__ = ["Standing", "Succession"]

KEEP_ALIVES_PER_LEASE = 3
FLUSH_S = 1.0
"""How long an answer waits for what it confirms to be stored."""
CONFIRM_S = 5.0
"""The same for what must not be confirmed before."""
RESIGN_S = 1.0

_log = get_logger("coordinator.succession")


class Standing(Enum):
    """What this coordinator is."""

    STARTING = auto()
    LEADING = auto()
    FOLLOWING = auto()
    ALONE = auto()
    """Without any word from etcd since the start: it answers from an empty memory, and does not lead."""


class _Leader(msgspec.Struct):
    """The value of the leader's key."""

    id: str
    """Of its memory: another one once that is forgotten."""
    url: str
    host: str


class Succession:
    """Campaigns, leads and follows, for as long as :meth:`begin`'s task group lives.

    Args:
        etcd: the cluster.
        clock: waits.
        state: what survives.
        cluster: namespace of all keys; empty is ``default``.
        ttl_s: seconds after which a leader that does not keep its lease alive has lost it.
        on_deposed: called when what is in memory has been given up, because another coordinator leads.
    """

    def __init__(
        self,
        etcd: EtcdClient,
        clock: Clock,
        state: CoordinatorState,
        *,
        cluster: str,
        ttl_s: float,
        on_deposed: Callable[[], None],
    ) -> None:
        root = f"/kvmesh/{cluster or 'default'}/"
        self.standing = Standing.STARTING
        self.leader_url: str | None = None
        """Where the leader is, while this one follows."""
        self._etcd = etcd
        self._clock = clock
        self._state = state
        self._key = f"{root}leader"
        self._last_key = f"{root}last_leader"
        self._prefix = f"{root}state/"
        self._ttl_s = max(1, round(ttl_s))
        self._on_deposed = on_deposed
        self._mirror = Mirror(etcd, self._prefix, state.read)
        self._me = _Leader(secrets.token_hex(8), "", socket.gethostname())
        self._lease = 0
        self._leads_until_s = float("-inf")
        self._silent_since_s: float | None = None
        self._losses = 0
        self._takeovers = 0
        self._backoff = Backoff()
        self._scope: anyio.CancelScope | None = None
        self._settled = anyio.Event()
        self._ended = anyio.Event()

    @property
    def active(self) -> bool:
        """Whether this coordinator answers members."""
        return self.standing in (Standing.LEADING, Standing.ALONE)

    @property
    def has_a_double(self) -> bool:
        """Whether another process leads at this one's own address, where nobody can be sent."""
        return self.standing is Standing.FOLLOWING and self.leader_url == self._me.url

    @property
    def leads(self) -> bool:
        """Whether no other coordinator can lead: the lease lasts, counted from when it was asked for."""
        return self.standing is Standing.LEADING and self._clock.monotonic_s() < self._leads_until_s

    @property
    def can_store(self) -> bool:
        """Whether it leads and etcd answers."""
        return self.leads and self._silent_since_s is None

    @property
    def detail(self) -> str:
        """How it stands, for people; empty when there is nothing to say."""
        if self.standing is Standing.STARTING:
            return "reading what is stored in etcd"
        silence = ""
        if self._silent_since_s is not None:
            silence = f"etcd has not answered for {self._clock.monotonic_s() - self._silent_since_s:.0f} s"
        if self.standing is Standing.FOLLOWING:
            if self.has_a_double:
                return f"another process leads at {self.leader_url}, this one's own address; change advertise_url"
            return f"follows {self.leader_url}" + (f"; {silence}" if silence else "")
        if silence and not self.leads:
            silence += "; another may lead, so nobody is buried and the storage takes no changes"
        return f"{silence}; going on from memory" if silence else ""

    async def begin(self, tasks: TaskGroup, url: str) -> None:
        """Start to campaign in ``tasks`` as the coordinator at ``url``; returns when the standing is known."""
        self._me.url = url
        tasks.start_soon(self._run)
        await self._settled.wait()

    async def stored(self) -> None:
        """Wait until what was done before is stored; not long, and not at all while etcd is away."""
        if self.standing is Standing.LEADING and self._silent_since_s is None:
            with anyio.move_on_after(FLUSH_S):
                await self._mirror.flushed()

    async def confirmed(self) -> bool:
        """Wait until what was done before is stored, and say whether it is, as far as that is known in time."""
        if self.can_store:
            with anyio.move_on_after(CONFIRM_S):
                await self._mirror.flushed()
                return True
        return False

    async def resign(self) -> None:
        """Store what is left and give the lead up, so that another can take it at once; bounded, idempotent."""
        if self._scope is not None:
            await self.stored()
            self._scope.cancel()
            await self._ended.wait()

    def statistics(self) -> dict[str, float]:
        """The standing, and how etcd does."""
        return {
            "leading": float(self.leads),
            "takeovers_total": self._takeovers,
            "etcd_connected": float(self._settled.is_set() and self._silent_since_s is None),
            "etcd_losses_total": self._losses,
            "etcd_keys": self._mirror.stored,
            "etcd_pending": self._mirror.pending,
            "etcd_writes_total": self._mirror.writes_total,
        }

    async def _run(self) -> None:
        self._state.on_touched(self._mirror.touch)
        try:
            async with self._etcd:
                with anyio.CancelScope() as self._scope:
                    while True:
                        await self._turn()
                with anyio.move_on_after(RESIGN_S, shield=True):
                    await self._give_up_lease()
        finally:
            self._ended.set()

    async def _turn(self) -> None:
        try:
            await self._campaign()
        except DeposedError:
            self._leads_until_s = float("-inf")
            _log.warning("the lead was lost")
        except EtcdError as error:
            if self._silent_since_s is None:
                self._silent_since_s = self._clock.monotonic_s()
                self._losses += 1
                _log.warning("etcd does not answer; going on without it", error=str(error))
            if self.standing is Standing.STARTING:
                self._stand(Standing.ALONE)
            await self._clock.sleep(self._backoff.next_s())

    async def _campaign(self) -> None:
        held = await self._etcd.get(self._key)
        if held is not None and not self._is_mine(held):
            await self._follow(held)
            return
        asked_s = self._clock.monotonic_s()
        lease = await self._etcd.grant(self._ttl_s)
        guard = Guard(self._key, 0 if held is None else held.mod_revision)
        revision = await self._etcd.commit(guard, {self._key: msgspec.json.encode(self._me)}, lease=lease)
        if revision is None:
            await self._etcd.revoke(lease)  # another one was faster
            return
        self._lease, self._leads_until_s = lease, asked_s + self._ttl_s
        await self._lead(Guard(self._key, revision))

    def _is_mine(self, held: KeyValue) -> bool:
        """Whether this process holds the lead, or did an earlier one that served where this one does.

        Only a process that is new asks the latter: one that has stood can have met another with the same address.
        """
        leader = _leader(held)
        if self.standing in (Standing.LEADING, Standing.FOLLOWING):
            return leader.id == self._me.id
        return leader.id == self._me.id or (leader.url, leader.host) == (self._me.url, self._me.host)

    async def _follow(self, held: KeyValue) -> None:
        self._answered()
        self.leader_url = _leader(held).url
        if self.standing is not Standing.FOLLOWING:
            self._stand(Standing.FOLLOWING)
            if self.has_a_double:
                _log.error(
                    "another process leads with this coordinator's own address; this one stands still: give each its "
                    "own advertise_url, and each mesh its own cluster_name",
                    url=self.leader_url,
                )
            else:
                _log.info("another coordinator leads", url=self.leader_url)
            self._me.id = secrets.token_hex(8)
            self._state.forget_all(secrets.token_hex(8))
            self._on_deposed()
        await self._etcd.wait_change(self._key, held.read_revision, self._ttl_s)

    async def _lead(self, guard: Guard) -> None:
        failures: list[Exception] = []
        async with anyio.create_task_group() as tasks:

            async def until_failure(work: Awaitable[None]) -> None:
                try:
                    await work
                except (DeposedError, EtcdError) as error:
                    failures.append(error)
                    tasks.cancel_scope.cancel()

            tasks.start_soon(until_failure, self._reign(guard))
            tasks.start_soon(until_failure, self._keep_alive(guard))
        raise failures[0]

    async def _reign(self, guard: Guard) -> None:
        # Whoever led before can write nothing more: what is read is the last word.
        last = await self._etcd.get(self._last_key)
        stored = await self._etcd.get_prefix(self._prefix)
        restored = Restored(0, 0, 0)
        me = self._me.id.encode()
        if last is None or last.value != me:
            restored = await self._restore(stored)
            # Only now: whoever finds its own name here takes its memory for the truth.
            if await self._etcd.commit(guard, {self._last_key: me}) is None:
                raise DeposedError
        # Else nobody has led since this memory did, and it knows better than what it has managed to store.
        self._mirror.begin(stored, self._state.keys())
        self._answered()
        if self.standing is not Standing.LEADING:
            self._takeovers += 1
            self._stand(Standing.LEADING)
            _log.info("leads; what was stored is restored", **restored._asdict())
        await self._mirror.run(guard)

    async def _restore(self, stored: Mapping[str, bytes]) -> Restored:
        """In slices, for the lease is kept alive and members are heard meanwhile."""
        slices = self._state.restoring(stored)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                restored: Restored = end.value
                return restored
            await anyio.lowlevel.checkpoint()

    async def _keep_alive(self, guard: Guard) -> None:
        while True:
            await self._clock.sleep(self._ttl_s / KEEP_ALIVES_PER_LEASE)
            asked_s = self._clock.monotonic_s()
            if not await self._etcd.keep_alive(self._lease):
                raise DeposedError
            held = await self._etcd.get(self._key)
            if held is None or held.mod_revision != guard.mod_revision:
                raise DeposedError  # somebody has removed or taken the key, whatever became of the lease
            self._leads_until_s = asked_s + self._ttl_s

    async def _give_up_lease(self) -> None:
        self._leads_until_s = float("-inf")
        if self._lease:
            try:
                await self._etcd.revoke(self._lease)
            except EtcdError as error:
                _log.info("the lead was not given up; it ends with its lease", error=str(error))

    def _stand(self, standing: Standing) -> None:
        self.standing = standing
        self._settled.set()

    def _answered(self) -> None:
        self._backoff.reset()
        if self._silent_since_s is not None:
            self._silent_since_s = None
            _log.info("etcd is back", endpoint=self._etcd.endpoint)


def _leader(held: KeyValue) -> _Leader:
    try:
        return msgspec.json.decode(held.value, type=_Leader)
    except msgspec.MsgspecError:
        return _Leader("", "", "")  # written by somebody else: whoever it is leads
