"""Coordinators at a real etcd: what survives them, who leads, and what happens while etcd is away."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import msgspec
import pytest
import structlog
from etcd_server import EtcdServer, etcd_binary, why_no_etcd
from waiting import until

from kvmesh.coordinator.app import CoordinatorService
from kvmesh.coordinator.etcd import EtcdClient, EtcdError, Guard
from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.state import CoordinatorState
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import SystemClock
from kvmesh.net.service import serving
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Heartbeat, HeartbeatReply, Load, Member, MemberList, Registration, RegistrationReply
from kvmesh.protocol.transfer import LedgerEvent, TransferList

pytestmark = pytest.mark.skipif(etcd_binary() is None, reason=why_no_etcd())

LEASE_S = 30.0
ETCD_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def shared_etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def etcd(shared_etcd: EtcdServer) -> EtcdServer:
    if shared_etcd.popen is None:
        shared_etcd.start()
    return shared_etcd


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> str:
    """A namespace that no other test uses."""
    return request.node.name


@pytest.fixture
def coordinator(etcd: EtcdServer, cluster: str) -> Callable[..., Any]:
    """``async with coordinator() as (url, service)``: a new life with an empty memory."""
    clock = SystemClock()
    lives = iter(range(100))

    @asynccontextmanager
    async def start(
        port: int = 0, lease_s: float = LEASE_S, etcd_lease_s: float = 1.0, **options: Any
    ) -> AsyncIterator[tuple[str, CoordinatorService]]:
        service = CoordinatorService(
            clock,
            MemberRegistry(clock, lease_s=lease_s, incarnation=f"life {next(lives)}"),
            TransferLedger(clock),
            MemoryStore(clock),
            etcd=EtcdClient([etcd.url], timeout_s=ETCD_TIMEOUT_S),
            cluster=cluster,
            etcd_lease_s=etcd_lease_s,
            **options,
        )
        async with serving(service, port=port) as url:
            yield url, service

    return start


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    async with HttpClient(follow_leader=True) as client:
        yield client


def member(instance_id: str = "context-0", epoch: int = 5, **fields: Any) -> Member:
    return Member(instance_id=instance_id, role="context", url="http://127.0.0.1:1", epoch=epoch, **fields)


def event(transfer_id: int, state: str = "registered", **fields: Any) -> LedgerEvent:
    return LedgerEvent(
        transfer_id=transfer_id, side="context", instance_id="context-0", epoch=5, state=state, unix_ms=1, **fields
    )


async def register(http: HttpClient, url: str, one: Member) -> RegistrationReply:
    return await http.call("POST", f"{url}/members", RegistrationReply, body=Registration(member=one))


async def epochs(http: HttpClient, url: str) -> dict[str, int]:
    listed = await http.call("GET", f"{url}/members", MemberList)
    return {one.instance_id: one.epoch for one in listed.members}


async def open_transfers(http: HttpClient, url: str) -> dict[int, int]:
    """Pages by transfer."""
    listed = await http.call("GET", f"{url}/transfers?limit=1000", TransferList)
    return {one.transfer_id: one.sides[0].num_pages for one in listed.transfers}


async def crash(service: CoordinatorService) -> None:
    """End as by ``kill -9``: nothing more is written and the lead is not given up."""
    service._succession._lease = 0
    service._succession._scope.cancel()
    await service._succession._ended.wait()


async def test_members_epochs_transfers_and_keys_survive(coordinator, http, free_port):
    async with coordinator(free_port) as (url, service):
        await register(http, url, member(model="m", load=Load(running=3)))
        await register(http, url, member("context-1", 7))
        await http.call("DELETE", f"{url}/members/context-1?epoch=7", dict)
        await http.call("POST", f"{url}/transfers", dict, body=[event(number, num_pages=9) for number in range(250)])
        await http.call("POST", f"{url}/transfers", dict, body=[event(number, "completed") for number in range(200)])
        await http.call("POST", f"{url}/set", dict, body={"key": "k", "value": "v", "ttl": 60})
        await crash(service)
    with structlog.testing.capture_logs() as logs:
        async with coordinator(free_port) as (url, _service):
            assert await epochs(http, url) == {"context-0": 5}
            assert await open_transfers(http, url) == dict.fromkeys(range(200, 250), 9)
            assert await http.call("GET", f"{url}/get?key=k", dict) == {"result": "v"}
            # A heartbeat is enough: nobody has to register again.
            await http.call("POST", f"{url}/members/context-0/heartbeat", dict, body=Heartbeat(epoch=5, load=Load()))
            again = await register(http, url, member("context-1", 7))
            assert again.epoch > 7, "its life is over, also after a restart"
    [restored] = [entry for entry in logs if "restored" in entry["event"]]
    assert (restored["members"], restored["transfers"], restored["stored_keys"]) == (1, 50, 1)


async def test_a_restored_member_that_never_beats_dies_and_its_transfers_are_closed(coordinator, http, free_port):
    async with coordinator(free_port, lease_s=0.6) as (url, service):
        await register(http, url, member())
        await http.call("POST", f"{url}/transfers", dict, body=[event(1)])
        await crash(service)
    async with coordinator(free_port, lease_s=0.6) as (url, service):
        await until(lambda: not service.statistics()["members"])
        assert service.statistics()["ledger_open"] == 0
        await until(lambda: service.statistics()["etcd_pending"] == 0)
        assert service.statistics()["etcd_keys"] == 1, "only the epoch that is over is kept"


async def test_finished_transfers_are_not_kept_in_etcd(coordinator, http, etcd, cluster):
    async with coordinator() as (url, service):
        for state in ("registered", "transferring", "completed"):
            await http.call("POST", f"{url}/transfers", dict, body=[event(number, state) for number in range(500)])
        assert service.statistics()["ledger_transfers"] == 500
        async with EtcdClient([etcd.url]) as client:
            assert await client.get_prefix(f"/kvmesh/{cluster}/state/transfers/") == {}


async def test_an_answer_means_that_it_is_stored(coordinator, http, etcd, cluster):
    async with coordinator() as (url, _service), EtcdClient([etcd.url]) as client:
        for number in range(20):
            await register(http, url, member(f"context-{number}"))
            await http.call("POST", f"{url}/transfers", dict, body=[event(number)])
            stored = await client.get_prefix(f"/kvmesh/{cluster}/state/")
            assert {f"members/context-{number}", f"transfers/{number}"} <= stored.keys()


async def test_what_is_too_long_for_etcd_stays_in_memory_and_holds_nothing_up(coordinator, http, free_port):
    async with coordinator(free_port) as (url, service):
        for key in ("a", "b", "c"):
            await http.call("POST", f"{url}/set", dict, body={"key": key, "value": "x" * 300_000})
        await http.call("POST", f"{url}/set", dict, body={"key": "long", "value": "x" * 700_000})
        await register(http, url, member())
        assert service.statistics()["etcd_losses_total"] == 0
        assert len((await http.call("GET", f"{url}/get?key=long", dict))["result"]) == 700_000
        await crash(service)
    async with coordinator(free_port) as (url, _service):
        assert await epochs(http, url) == {"context-0": 5}
        assert (await http.call("GET", f"{url}/get_prefix?key_prefix=&keys_only=1", dict))["result"].keys() == {
            "a",
            "b",
            "c",
        }


async def test_heartbeats_write_nothing(coordinator, http):
    async with coordinator() as (url, service):
        await register(http, url, member())
        await http.call("POST", f"{url}/transfers", dict, body=[event(1)])
        before = service.statistics()["etcd_writes_total"]
        for running in range(20):
            beat = Heartbeat(epoch=5, load=Load(running=running))
            await http.call("POST", f"{url}/members/context-0/heartbeat", dict, body=beat)
        await http.call("POST", f"{url}/transfers", dict, body=[event(2)])
        assert service.statistics()["etcd_writes_total"] == before + 1


async def test_without_etcd_it_goes_on_from_memory_and_writes_back(coordinator, http, etcd, cluster):
    async with coordinator() as (url, service):
        await register(http, url, member())
        with structlog.testing.capture_logs() as logs:
            etcd.kill()
            await until(lambda: not service.statistics()["etcd_connected"])
            of_another = msgspec.structs.replace(event(1, num_pages=4), instance_id="context-1")
            with anyio.fail_after(2.0):
                await register(http, url, member("context-1"))
                await http.call("POST", f"{url}/transfers", dict, body=[of_another])
                await http.call("DELETE", f"{url}/members/context-0?epoch=5", dict)
            assert await epochs(http, url) == {"context-1": 5}
            health = await http.call("GET", f"{url}/health", dict)
            assert health["status"] == "ok"
            assert "going on from memory" in health["detail"]
            etcd.start()
            await until(lambda: service.statistics()["etcd_connected"])
            await until(lambda: service.statistics()["etcd_pending"] == 0)
        async with EtcdClient([etcd.url]) as client:
            stored = await client.get_prefix(f"/kvmesh/{cluster}/state/")
        assert stored.keys() == {"members/context-1", "epochs/context-0", "transfers/1"}
        assert (await http.call("GET", f"{url}/health", dict))["detail"] == ""
        told = [(entry["log_level"], entry["event"]) for entry in logs if entry["event"].startswith("etcd")]
        assert told == [("warning", "etcd does not answer; going on without it"), ("info", "etcd is back")]


async def test_one_that_starts_without_etcd_acts_alone_and_merges_later(coordinator, http, etcd, free_port):
    async with coordinator(free_port) as (url, service):
        await register(http, url, member("context-0", 5))
        await register(http, url, member("context-1", 5))
        await crash(service)
    etcd.kill()
    async with coordinator(free_port) as (url, service):
        assert await epochs(http, url) == {}
        await register(http, url, member("context-1", 9))
        etcd.start()
        await until(lambda: service.statistics()["etcd_connected"])
        assert await epochs(http, url) == {"context-0": 5, "context-1": 9}, "no earlier life comes back"


async def test_the_second_follows_and_takes_over(coordinator, http):
    async with coordinator() as (first, leader), coordinator() as (second, follower):
        await register(http, first, member())
        await http.call("POST", f"{first}/transfers", dict, body=[event(1)])
        assert (leader.statistics()["leading"], follower.statistics()["leading"]) == (1, 0)
        assert (await http.call("GET", f"{second}/health", dict))["detail"] == f"follows {first}"
        # Whoever asks the follower is sent to the leader, with method and body.
        await register(http, second, member("context-1"))
        assert await epochs(http, first) == await epochs(http, second) == {"context-0": 5, "context-1": 5}
        assert follower.statistics()["members"] == 0
        await crash(leader)
        await until(lambda: follower.statistics()["leading"])
        assert await epochs(http, second) == {"context-0": 5, "context-1": 5}
        assert await open_transfers(http, second) == {1: 0}


async def test_one_that_says_goodbye_is_followed_at_once(coordinator, http):
    async with coordinator(etcd_lease_s=60.0) as (first, leader), coordinator(etcd_lease_s=60.0) as (_, follower):
        await register(http, first, member())
        await leader.stop()
        await until(lambda: follower.statistics()["leading"], timeout_s=3.0)


async def test_one_that_was_replaced_while_it_stood_still_writes_nothing_and_follows(coordinator, http):
    async with coordinator() as (first, old):
        await register(http, first, member("context-0", 5))
        # It stands still: its lease runs out, while its memory believes that it leads.
        lease = old._succession._lease
        async with EtcdClient(old._succession._etcd._endpoints) as client, coordinator() as (second, new):
            old._succession._etcd._endpoints, endpoints = ["http://127.0.0.1:9"], old._succession._etcd._endpoints
            await client.revoke(lease)
            await until(lambda: new.statistics()["leading"])
            await register(http, second, member("context-0", 9))
            await register(http, first, member("context-0", 6))
            old._succession._etcd._endpoints = endpoints
            await until(lambda: not old._is_active())
            assert await epochs(http, second) == {"context-0": 9}
            assert await epochs(http, first) == {"context-0": 9}, "the old one sends to the new one"
            with pytest.raises(ApiError) as refused:
                await register(http, first, member("context-0", 6))
            assert refused.value.status == 409


async def test_a_watcher_of_a_deposed_coordinator_hears_from_the_new_one(coordinator, http, etcd):
    async with coordinator() as (first, old), coordinator() as (second, new):
        reply = await register(http, first, member())
        heard: list[dict[str, Any]] = []

        async def watch() -> None:
            question = f"incarnation={reply.incarnation}&revision={reply.revision}&timeout_s=10"
            heard.append(await http.call("GET", f"{first}/members/watch?{question}", dict, timeout_s=15))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await until(lambda: old.statistics()["watchers"] == 1)
            async with EtcdClient([etcd.url]) as client:
                await client.revoke(old._succession._lease)
            await until(lambda: old.statistics()["leading"] + new.statistics()["leading"] == 1)
            await register(http, second, member("context-1"))
        names = {one["instance_id"] for one in heard[0]["members"]} | {
            one["member"]["instance_id"] for one in heard[0]["events"]
        }
        assert names >= {"context-1"}


async def test_what_cannot_be_read_is_left_out(coordinator, http, etcd, cluster, free_port):
    async with coordinator(free_port) as (url, service):
        await register(http, url, member())
        await crash(service)
    async with EtcdClient([etcd.url]) as client:
        root = f"/kvmesh/{cluster}/state/"
        strange = {f"{root}members/x": b"{}", f"{root}transfers/y": b"no JSON", f"{root}other/z": b"1"}
        assert await client.commit(Guard(f"/kvmesh/{cluster}/nobody", 0), strange)
    with structlog.testing.capture_logs() as logs:
        async with coordinator(free_port) as (url, service):
            assert await epochs(http, url) == {"context-0": 5}
            await until(lambda: service.statistics()["etcd_pending"] == 0)
    assert sorted(entry["key"] for entry in logs if "cannot be read" in entry["event"]) == [
        "members/x",
        "other/z",
        "transfers/y",
    ]


async def test_the_client_speaks_etcd(etcd):
    async with EtcdClient(["http://127.0.0.1:9", etcd.url], timeout_s=2.0) as client:
        assert await client.get("none") is None
        revision = await client.commit(Guard("a", 0), {"a": b"\x00\xff", "a/b": b"2"})
        assert revision
        assert await client.commit(Guard("a", 0), {"a": b"lost"}) is None
        found = await client.get("a")
        assert found is not None
        assert (found.value, found.mod_revision) == (b"\x00\xff", revision)
        assert await client.get_prefix("a/") == {"b": b"2"}
        lease = await client.grant(5)
        assert await client.keep_alive(lease)
        await client.commit(Guard("leased", 0), {"leased": b"1"}, lease=lease)
        assert not await client.wait_change("leased", revision + 1, timeout_s=0.1)
        await client.revoke(lease)
        assert await client.wait_change("leased", revision + 1, timeout_s=5.0)
        assert await client.get("leased") is None
        assert not await client.keep_alive(lease)
        await client.revoke(lease)
        with pytest.raises(EtcdError, match="lease"):
            await client.commit(Guard("x", 0), {"x": b""}, lease=lease)
        many = {f"many/{number:04}": b"v" for number in range(100)}
        for hundred in range(25):
            await client.commit(Guard("x", 0), {f"{key}/{hundred}": value for key, value in many.items()})
        assert len(await client.get_prefix("many/")) == 2500, "more than one answer holds"
    async with EtcdClient(["http://127.0.0.1:9"], timeout_s=0.5) as client:
        with pytest.raises(EtcdError, match="etcd_endpoints: cannot reach"):
            await client.get("a")


@contextmanager
def cut_off(service: CoordinatorService) -> Iterator[None]:
    """Etcd cannot be reached from this coordinator, which everybody else still reaches."""
    etcd = service._succession._etcd
    etcd._endpoints, endpoints = ["http://127.0.0.1:9"], etcd._endpoints
    etcd._current = 0
    try:
        yield
    finally:
        etcd._endpoints = endpoints


async def test_one_that_lost_its_lease_buries_nobody_and_says_so(coordinator, http):
    """Cut off from etcd only: another may lead, at which its silent members beat. Everything else goes on."""
    async with coordinator(lease_s=0.6) as (url, service):
        for number in range(3):
            await register(http, url, member(f"context-{number}"))
        with cut_off(service):
            await until(lambda: not service.statistics()["leading"])
            beat = Heartbeat(epoch=5, load=Load())
            told = await http.call("POST", f"{url}/members/context-0/heartbeat", HeartbeatReply, body=beat)
            assert not told.leads
            assert not (await register(http, url, member("context-3"))).leads
            await http.call("POST", f"{url}/transfers", dict, body=[event(1)])
            service._registry._heard_s = service._registry._swept_s = service._clock.monotonic_s()
            for _ in range(10):
                await http.call("POST", f"{url}/members/context-0/heartbeat", dict, body=beat)
                await anyio.sleep(0.1)
            assert (await epochs(http, url)).keys() == {f"context-{number}" for number in range(4)}
            health = await http.call("GET", f"{url}/health", dict)
            assert "nobody is buried" in health["detail"]
        # Back, with the lead: all have a whole lease from now, and whoever is silent for that long is dead.
        await until(lambda: service.statistics()["leading"])
        assert len(await epochs(http, url)) == 4
        with anyio.fail_after(30):
            while (await epochs(http, url)).keys() != {"context-0"}:
                await http.call("POST", f"{url}/members/context-0/heartbeat", dict, body=beat)
                await anyio.sleep(0.05)


async def test_the_storage_of_one_that_may_not_lead_takes_no_changes_and_loses_no_key(coordinator, http):
    """What it granted, another leader could grant to somebody else; a key may have been renewed there."""
    async with coordinator() as (first, old):
        await http.call("POST", f"{first}/set", dict, body={"key": "held", "value": "1", "ttl": 1.5})
        async with coordinator() as (second, new):
            with cut_off(old):
                await until(lambda: not old.statistics()["leading"] and new.statistics()["leading"])
                for method, path, body in (
                    ("POST", "set", {"key": "claim", "value": "old"}),
                    ("DELETE", "delete?key=held", None),
                    ("GET", "expire?key=held&ttl=60", None),
                ):
                    with pytest.raises(ApiError) as refused:
                        await http.call(method, f"{first}/{path}", dict, body=body)
                    assert (refused.value.status, refused.value.code) == (503, "not_stored")
                await http.call("POST", f"{second}/set", dict, body={"key": "claim", "value": "new"})
                await until(lambda: not new._store._items.get("held"))
                assert (await http.call("GET", f"{first}/get?key=held", dict))["result"] == "1"
            await until(lambda: not old._is_active())
            assert (await http.call("GET", f"{first}/get?key=claim", dict))["result"] == "new"


async def test_members_of_a_coordinator_that_lost_its_lease_move_to_the_one_that_leads(coordinator, client):
    """Nobody is buried by either of the two, though each member began at another one."""
    async with coordinator(lease_s=2.0) as (first, old), coordinator(lease_s=2.0) as (second, new):
        heard: list[str] = []
        async with client(f"{first},{second}") as one, client(f"{second},{first}") as other:
            one.announce(member("context-0"))
            other.announce(member("context-1"))
            one.subscribe(lambda event: heard.append(event.kind))
            await until(lambda: old.statistics()["members"] == 2 and len(one.members()) == 2)
            with cut_off(old):
                await until(lambda: new.statistics()["leading"] and one._link.url == second == other._link.url)
                await anyio.sleep(2.5)  # more than a lease
                assert new.statistics()["members"] == 2
                assert [member.epoch for member in one.members()] == [5, 5]
        assert "dead" not in heard


@pytest.mark.parametrize("how", ["one answer is lost", "etcd is away"])
async def test_what_was_deleted_meanwhile_does_not_come_back(coordinator, http, etcd, how, monkeypatch):
    """Nobody else has led: what etcd still holds is what this one could not write."""
    async with coordinator() as (url, service):
        succession = service._succession
        await http.call("POST", f"{url}/set", dict, body={"key": "k", "value": "v"})
        await register(http, url, member())
        await http.call("POST", f"{url}/transfers", dict, body=[event(1)])
        if how == "etcd is away":
            etcd.kill()
        else:
            commit = succession._etcd.commit

            async def fail_once(*_arguments: Any, **_options: Any) -> None:
                succession._etcd.commit = commit
                raise EtcdError("one lost answer")

            succession._etcd.commit = fail_once
        service._ledger.record([event(1, "completed")])
        service._ledger._finished.clear()  # and it is forgotten for want of room
        assert await service._store.delete("k")
        await until(lambda: succession.statistics()["etcd_losses_total"] == 1)
        if how == "etcd is away":
            etcd.start()
        await until(lambda: service.statistics()["etcd_connected"] and not service.statistics()["etcd_pending"])
        assert await service._store.get("k") is None
        assert service.statistics()["ledger_open"] == 0
        await crash(service)
    async with coordinator() as (url, service):
        await until(lambda: service.statistics()["leading"])
        assert service.statistics()["storage_keys"] == 0
        assert await open_transfers(http, url) == {}


async def test_a_follower_does_not_mind_that_etcd_compacts(coordinator, http, etcd):
    async with coordinator() as (first, leader), coordinator() as (_, follower):
        for number in range(5):
            await register(http, first, member(f"context-{number}"))
        async with EtcdClient([etcd.url]) as client:
            held = await client.get(leader._succession._key)
            await client._call("/v3/kv/compaction", {"revision": held.read_revision}, dict)
            assert await client.wait_change(leader._succession._key, held.mod_revision, timeout_s=5.0), "read it again"
            again = await client.get(leader._succession._key)
            assert not await client.wait_change(leader._succession._key, again.read_revision, timeout_s=0.5)
        await crash(leader)
        await until(lambda: follower.statistics()["leading"])
        assert follower.statistics()["etcd_losses_total"] == 0


async def test_a_follower_outlives_etcd(coordinator, http, etcd):
    """Etcd dies in the middle of an answer: that of the watch on who leads."""
    async with coordinator() as (first, leader), coordinator() as (second, follower):
        await register(http, first, member())
        await anyio.wait_all_tasks_blocked()
        etcd.kill()
        await until(lambda: not follower.statistics()["etcd_connected"])
        assert await epochs(http, second) == {"context-0": 5}
        etcd.start()
        await until(lambda: follower.statistics()["etcd_connected"] and leader.statistics()["etcd_connected"])
        assert leader._is_active() != follower._is_active()
        # Whichever of them leads now, both know what was there.
        assert await epochs(http, second) == await epochs(http, first) == {"context-0": 5}


async def test_one_whose_key_is_gone_does_not_go_on_leading(coordinator, etcd):
    """Its lease may live: what counts is the key, which another coordinator can take."""
    async with coordinator() as (_, old), coordinator() as (_, new), EtcdClient([etcd.url]) as client:
        key = old._succession._key
        held = await client.get(key)
        assert await client.commit(Guard(key, held.mod_revision), {}, [key])
        await until(lambda: old._is_active() + new._is_active() == 1 and new.statistics()["takeovers_total"] == 1)
        assert not old.statistics()["leading"]


async def test_the_lease_is_kept_alive_while_much_is_restored(coordinator, http, cluster, etcd, monkeypatch):
    """Else whoever takes over a large ledger would lose the lead before it has read it, again and again."""
    async with EtcdClient([etcd.url]) as client:
        for hundred in range(10):
            some = {f"/kvmesh/{cluster}/state/storage/{hundred}-{number}": b'["v",null]' for number in range(100)}
            assert await client.commit(Guard(f"/kvmesh/{cluster}/nobody", 0), some)
    restoring = CoordinatorState.restoring

    def slowly(self: CoordinatorState, stored: Any) -> Any:
        slices = restoring(self, stored)
        while True:
            time.sleep(0.01)  # the processor is busy: 5 s in all
            try:
                next(slices)
            except StopIteration as end:
                return end.value
            yield

    monkeypatch.setattr("kvmesh.coordinator.state.SLICE_KEYS", 2)
    monkeypatch.setattr(CoordinatorState, "restoring", slowly)
    with structlog.testing.capture_logs() as logs:
        async with coordinator(etcd_lease_s=2.0) as (_, service):
            await until(lambda: service.statistics()["leading"] and not service.statistics()["etcd_pending"])
            assert (service.statistics()["storage_keys"], service.statistics()["takeovers_total"]) == (1000, 1)
    assert not [entry for entry in logs if entry["event"] == "the lead was lost"]


async def test_an_empty_memory_is_not_taken_for_the_truth_when_an_answer_is_lost(coordinator, http, monkeypatch):
    """The answer to the commit that names it is lost, the commit is not."""
    async with coordinator() as (url, service):
        await register(http, url, member())
        await crash(service)
    commit = EtcdClient.commit

    async def lose_the_answer(self: EtcdClient, guard: Guard, puts: Any, *rest: Any, **options: Any) -> int | None:
        done = await commit(self, guard, puts, *rest, **options)
        if any(key.endswith("/last_leader") for key in puts):
            monkeypatch.setattr(EtcdClient, "commit", commit)
            raise EtcdError("one lost answer")
        return done

    monkeypatch.setattr(EtcdClient, "commit", lose_the_answer)
    async with coordinator() as (url, service):
        await until(lambda: service.statistics()["leading"])
        assert await epochs(http, url) == {"context-0": 5}


async def test_two_at_one_address_do_not_depose_each_other_for_ever(http: HttpClient, coordinator: Any) -> None:
    """A new process takes over where it finds its own address; the one that it replaced, if it lives, stands still."""
    address = "http://coordinator.example:8400"
    async with coordinator(advertise_url=address) as (url, first):
        await register(http, url, member("first"))
        async with coordinator(advertise_url=address) as (other_url, second):
            await until(lambda: first._succession.has_a_double, timeout_s=20)
            with pytest.raises(ApiError) as caught:
                await register(http, url, member("late"))
            assert (caught.value.status, caught.value.code) == (503, "address_taken")
            assert "advertise_url" in first.health().detail
            assert set(await epochs(http, other_url)) == {"first"}
            takeovers = second.statistics()["takeovers_total"]
            await anyio.sleep(2.0)  # two leases: time in which they would have deposed each other
            assert second.statistics()["takeovers_total"] == takeovers
            assert second._succession.leads
            assert not first._succession.leads
        await until(lambda: first._succession.leads, timeout_s=20)
        assert set(await epochs(http, url)) == {"first"}


async def test_two_clusters_behind_one_list_of_endpoints_are_refused(etcd: EtcdServer) -> None:
    """Else each coordinator could lead in the one that it happens to reach."""
    other = EtcdServer()
    try:
        other.start()
        async with EtcdClient([etcd.url, other.url]) as client:
            with pytest.raises(EtcdError, match="different clusters"):
                await client.grant(5)
    finally:
        other.stop()
    same = etcd.url.replace("127.0.0.1", "localhost")
    async with EtcdClient([etcd.url, same]) as client:
        lease = await client.grant(5)
        assert await client.keep_alive(lease)
        assert await client.get("nothing") is None
        await client.revoke(lease)
