"""The coordinator as a service: members and their watch over HTTP, beside the faces of ledger and storage."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import anyio
import msgspec
from aiohttp import web
from anyio.abc import TaskGroup

from kvmesh.coordinator.cluster import WORKERS_PREFIX, MinimalInstances, cluster_info
from kvmesh.coordinator.discovery import Finder
from kvmesh.coordinator.discovery.source import Source
from kvmesh.coordinator.etcd import EtcdClient
from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.ledger_faces import LedgerFaces
from kvmesh.coordinator.metric_texts import TEXTS
from kvmesh.coordinator.queries import float_query, int_query
from kvmesh.coordinator.registry import EpochsUsedUpError, FencedError, MemberRegistry, UnknownMemberError
from kvmesh.coordinator.state import CoordinatorState
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.coordinator.storage_faces import StorageFaces
from kvmesh.coordinator.succession import Standing, Succession
from kvmesh.net.auth import ApiKeys, KeyMetrics
from kvmesh.net.clock import Clock
from kvmesh.net.http import OPEN_PATHS, Handler, api_key_middleware, json_response, read_json
from kvmesh.net.service import Health, Service
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError, bad_request, unavailable
from kvmesh.protocol.members import Heartbeat, HeartbeatReply, Life, MemberEvent, Registration, WatchReply
from kvmesh.telemetry import get_logger

__all__ = ["CoordinatorService"]

MAX_WATCH_S = 60.0
"""Bound of one long poll."""

UNLED_WATCH_FRACTION = 0.2
"""Of a lease: bound of a poll while another coordinator may lead, so that watchers look for it."""

SWEEP_FRACTION = 0.1
"""Of a lease: how late, at most, a death is noticed."""

MAX_SWEEP_S = 1.0
"""Stored keys expire with this resolution (TensorRT-LLM sweeps once a second)."""

_log = get_logger("coordinator")


class _MovedError(Exception):
    """Another coordinator answers for this one; the argument is its URL."""


class CoordinatorService(Service):
    """Membership, ledger and storage behind HTTP.

    Args:
        clock: time of leases, deadlines and sweeps.
        registry: who is in the mesh.
        ledger: what became of the transfers.
        store: TensorRT-LLM's cluster storage.
        minimal: what makes ``/cluster_info`` say ready.
        drain_s: what requests that have begun get when the service stops.
        etcd: where the state is kept beside this process; None keeps it in memory only.
        cluster: namespace of the keys in etcd.
        etcd_lease_s: seconds after which another coordinator at the same etcd takes over from a silent one.
        advertise_url: where others send members to while this one leads; None: where it serves.
        tls: certificates of its HTTP face, and what servers that it finds are asked with.
        keys: the API keys of this mesh; they guard its HTTP face, and servers that it finds are given one.
        sources: where it looks for servers that do not register themselves.
    """

    def __init__(
        self,
        clock: Clock,
        registry: MemberRegistry,
        ledger: TransferLedger,
        store: MemoryStore,
        *,
        minimal: MinimalInstances | None = None,
        drain_s: float = 1.0,
        etcd: EtcdClient | None = None,
        cluster: str = "",
        etcd_lease_s: float = 5.0,
        advertise_url: str | None = None,
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        keys = keys or ApiKeys()
        guards = [api_key_middleware(keys), self._only_leading]
        super().__init__("coordinator", middleware=guards, drain_s=drain_s, tls=tls)
        self._clock = clock
        self._registry = registry
        self._ledger = ledger
        self._store = store
        self._minimal = minimal or MinimalInstances()
        self._changed = anyio.Event()
        self._watchers = 0
        self._advertise_url = advertise_url
        self._led = True
        self._succession: Succession | None = None
        if etcd is not None:
            state = CoordinatorState(registry, ledger, store)
            self._succession = Succession(
                etcd, clock, state, cluster=cluster, ttl_s=etcd_lease_s, on_deposed=self._wake
            )
        self._finder = (
            Finder(registry, sources, clock, tls=tls, keys=keys, admits=self._is_active, buries=self._leads)
            if sources
            else None
        )
        registry.on_event = self._heard
        self.app.router.add_post("/members", self._register)
        self.app.router.add_get("/members", self._members)
        self.app.router.add_get("/members/watch", self._watch)
        self.app.router.add_post("/members/{instance_id}/heartbeat", self._heartbeat)
        self.app.router.add_post("/members/{instance_id}/met", self._met)
        self.app.router.add_delete("/members/{instance_id}", self._deregister)
        self.app.router.add_get("/cluster_info", self._cluster_info)
        self.app.router.add_get("/discovery", self._discovery)
        LedgerFaces(ledger, stored=self._stored).add_routes(self.app.router)
        StorageFaces(store, active=self._is_active, check=self._check_storing, stored=self._confirmed).add_routes(
            self.app.router
        )
        self.metrics.collect_statistics("kvmesh_coordinator", self.statistics, TEXTS)
        self.metrics.collect(KeyMetrics(keys))

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Take over what is stored, and begin to sweep."""
        if self._succession is not None:
            await self._succession.begin(tasks, self._advertise_url or url)
        tasks.start_soon(self._sweep_forever)
        if self._finder is not None:
            tasks.start_soon(self._finder.run)

    async def stop(self) -> None:
        """Let another coordinator lead."""
        if self._succession is not None:
            await self._succession.resign()

    def health(self) -> Health:
        """Healthy also without etcd, which the detail says."""
        if self._succession is None:
            return Health(True)
        return Health(self._succession.standing is not Standing.STARTING, self._succession.detail)

    async def drain(self) -> None:
        """Answer the watchers, so that none of them holds up the end."""
        self.draining = True
        self._wake()
        await super().drain()

    def statistics(self) -> dict[str, float]:
        """Members, watchers, transfers and stored keys."""
        ledger: Mapping[str, float] = self._ledger.statistics()._asdict()
        found = {} if self._finder is None else self._finder.statistics()
        return {
            **self._registry.statistics(),
            **{f"discovery_{name}": value for name, value in found.items()},
            **{f"ledger_{name}": value for name, value in ledger.items()},
            **{f"storage_{name}": value for name, value in self._store.statistics().items()},
            "watchers": self._watchers,
            **(self._succession.statistics() if self._succession is not None else {}),
        }

    def _is_active(self) -> bool:
        return self._succession is None or self._succession.active

    def _leads(self) -> bool:
        """Whether no other coordinator can contradict what this one decides; acts on the change when there is one."""
        leads = self._succession is None or self._succession.leads
        if leads != self._led:
            self._led = leads
            if leads:
                self._registry.begin_again(secrets.token_hex(8))
                self._store.go_on()
            else:
                self._store.hold()
            self._wake()
        return leads

    async def _only_leading(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send members to the coordinator that leads."""
        self._leads()
        try:
            if request.path not in OPEN_PATHS:
                self._check_leading()
            return await handler(request)
        except _MovedError as moved:
            return json_response({}, 307, {"Location": f"{moved}{request.path_qs}"})

    def _check_leading(self) -> None:
        succession = self._succession
        if succession is None or succession.active:
            return
        if succession.has_a_double:
            raise unavailable(f"Not in service: {succession.detail}.", code="address_taken")
        if succession.standing is Standing.FOLLOWING and succession.leader_url:
            raise _MovedError(succession.leader_url)
        raise unavailable("This coordinator does not know yet who leads; try again.", code="starting")

    async def _stored(self) -> None:
        """Before an answer: what it confirms survives this process, unless etcd is away."""
        if self._succession is not None:
            await self._succession.stored()
            self._check_leading()

    def _check_storing(self) -> None:
        """Nobody may be told of a key's change that another leader does not know of."""
        if self._succession is not None and not self._succession.can_store:
            raise _not_stored("etcd does not answer, and another coordinator may lead")

    async def _confirmed(self) -> None:
        if self._succession is not None and not await self._succession.confirmed():
            self._check_leading()
            raise _not_stored("it is not known whether the change was stored")

    async def _register(self, request: web.Request) -> web.Response:
        member = msgspec.structs.replace((await read_json(request, Registration)).member, source="")
        if not member.instance_id or "/" in member.instance_id:
            raise bad_request("instance_id must be a non-empty string without '/'.", param="member.instance_id")
        if not _is_http(member.url):
            raise bad_request("url must be http://HOST:PORT.", param="member.url")
        try:
            reply = self._registry.register(member)
        except EpochsUsedUpError:
            raise bad_request(
                f"No epoch is left above that of {member.instance_id}; use another instance_id.",
                param="member.instance_id",
            ) from None
        except FencedError:
            raise _fenced(member.instance_id, member.epoch) from None
        _log.info("member registered", instance_id=member.instance_id, role=member.role, epoch=reply.epoch)
        await self._stored()
        reply.leads = self._leads()
        return json_response(reply)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        instance_id = request.match_info["instance_id"]
        heartbeat = await read_json(request, Heartbeat)
        try:
            self._registry.heartbeat(instance_id, heartbeat)
        except UnknownMemberError:
            raise ApiError(
                404, f"No member {instance_id} is registered here; register again.", code="unknown_member"
            ) from None
        except FencedError:
            raise _fenced(instance_id, heartbeat.epoch) from None
        return json_response(HeartbeatReply(leads=self._leads()))

    async def _met(self, request: web.Request) -> web.Response:
        instance_id = request.match_info["instance_id"]
        epoch = (await read_json(request, Life)).epoch
        if self._registry.met(instance_id, epoch):
            _log.warning("a later life of a member is known elsewhere", instance_id=instance_id, epoch=epoch)
        await self._stored()
        return json_response({})

    async def _deregister(self, request: web.Request) -> web.Response:
        instance_id = request.match_info["instance_id"]
        if not self._registry.deregister(instance_id, int_query(request, "epoch", 0)):
            raise ApiError(404, f"No member {instance_id} with this epoch.", code="unknown_member")
        _log.info("member left", instance_id=instance_id)
        await self._stored()
        return json_response({})

    async def _members(self, _request: web.Request) -> web.Response:
        return json_response(self._registry.members())

    async def _discovery(self, _request: web.Request) -> web.Response:
        return json_response({"places": [] if self._finder is None else self._finder.places()})

    async def _watch(self, request: web.Request) -> web.Response:
        incarnation = request.query.get("incarnation", "")
        revision = int_query(request, "revision", 0)
        timeout_s = min(float_query(request, "timeout_s", MAX_WATCH_S), MAX_WATCH_S)
        self._watchers += 1
        try:
            reply = self._changes(incarnation, revision)
            if not (led := reply.leads):
                timeout_s = min(timeout_s, self._registry.lease_s * UNLED_WATCH_FRACTION)
            with anyio.move_on_after(timeout_s):
                while not (reply.events or reply.reset or self.draining) and reply.leads == led:
                    await self._changed.wait()
                    self._check_leading()
                    reply = self._changes(incarnation, revision)
        finally:
            self._watchers -= 1
        return json_response(reply)

    def _changes(self, incarnation: str, revision: int) -> WatchReply:
        reply = self._registry.changes(incarnation, revision)
        reply.leads = self._leads()
        return reply

    async def _cluster_info(self, _request: web.Request) -> web.Response:
        records = await self._store.get_prefix(WORKERS_PREFIX)
        return json_response(cluster_info(self._registry.members().members, records, self._minimal))

    async def _sweep_forever(self) -> None:
        interval_s = min(MAX_SWEEP_S, self._registry.lease_s * SWEEP_FRACTION)
        while True:
            await self._clock.sleep(interval_s)
            if not self._leads():
                continue
            for member in self._registry.sweep():
                _log.warning("member died: its lease expired", instance_id=member.instance_id, epoch=member.epoch)
            await self._store.sweep()

    def _heard(self, event: MemberEvent) -> None:
        """The membership has changed: tell the watchers, and close the transfers of whoever is gone."""
        if event.kind == "dead" or event.kind == "left":
            self._ledger.member_gone(event.member.instance_id, event.member.epoch, event.kind)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _fenced(instance_id: str, epoch: int) -> ApiError:
    return ApiError(
        409, f"A newer life of {instance_id} has registered; this one (epoch {epoch}) must stop.", code="fenced"
    )


def _not_stored(why: str) -> ApiError:
    return unavailable(f"The storage takes no changes now: {why}; try again.", code="not_stored")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, or a port that is none
        return False
