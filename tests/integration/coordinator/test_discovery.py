"""Clients of a coordinator that lives, dies and comes back; real sockets, short leases."""

from __future__ import annotations

import anyio
import msgspec
import pytest
import structlog
from aiohttp import web
from waiting import until

from kvmesh.net.client import HttpClient
from kvmesh.net.discovery import CoordinatorClient, StaticMembership
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, serving
from kvmesh.protocol.members import HeartbeatReply, Load, Member, MemberEvent, RegistrationReply
from kvmesh.protocol.transfer import LedgerEvent, TransferList

TOO_EARLY_S = 0.2
"""In which what must not come early would have come."""


def member(instance_id: str = "context-0", role: str = "context", **fields: object) -> Member:
    return Member(instance_id=instance_id, role=role, url="http://127.0.0.1:1", **fields)


def ids(client) -> set[str]:
    return {m.instance_id for m in client.members()}


def ledger_event(transfer_id: int) -> LedgerEvent:
    return LedgerEvent(
        transfer_id=transfer_id, side="context", instance_id="context-0", epoch=1, state="completed", unix_ms=1
    )


async def test_members_find_each_other_and_say_goodbye(coordinator, client):
    async with coordinator() as url, client(url) as watcher:
        heard: list[MemberEvent] = []
        watcher.subscribe(heard.append)
        async with client(url) as worker:
            worker.announce(member(), lambda: Load(running=3))
            await until(lambda: ids(watcher) == {"context-0"})
            assert watcher.members()[0].load.running == 3
            assert worker.epoch == watcher.members()[0].epoch > 0
            worker.set_draining()
            await until(lambda: watcher.members()[0].draining)
        await until(lambda: ids(watcher) == set())
        assert [event.kind for event in heard] == ["joined", "updated", "left"]


async def test_a_silent_member_dies(coordinator, client):
    async with coordinator() as url, client(url) as watcher:
        heard: list[MemberEvent] = []
        watcher.subscribe(heard.append)
        async with anyio.create_task_group() as tasks, client(url) as worker:
            worker.announce(member())
            await until(lambda: ids(watcher) == {"context-0"})
            worker._announcement.registered = False  # no goodbye
            tasks.cancel_scope.cancel()
        await until(lambda: [event.kind for event in heard] == ["joined", "dead"])


async def test_a_member_that_was_taken_for_dead_registers_again_as_a_new_life(coordinator, client):
    """A worker that stood still longer than its lease: its next heartbeat fails, it comes back under a new epoch."""
    async with coordinator(lease_s=1.5) as url, client(url) as watcher, client(url) as worker, HttpClient() as http:
        heard: list[MemberEvent] = []
        watcher.subscribe(heard.append)
        worker.announce(member(epoch=5))
        await until(lambda: ids(watcher) == {"context-0"})
        await http.call("DELETE", f"{url}/members/context-0?epoch=5", dict)
        await until(lambda: len(heard) == 3)
        assert [(event.kind, event.member.epoch) for event in heard] == [
            ("joined", 5),
            ("left", 5),
            ("joined", worker.epoch),
        ]
        assert worker.epoch > 5


async def test_a_life_that_cannot_go_on_under_another_epoch_is_no_member(coordinator, client):
    """A worker's engine speaks for its own epoch only: nobody is to be sent to the next one before it lives."""
    async with coordinator(lease_s=1.5) as url, client(url) as watcher, client(url) as worker, HttpClient() as http:
        heard: list[MemberEvent] = []
        outlived: list[int] = []
        watcher.subscribe(heard.append)
        worker.announce(member(epoch=5), on_outlived=outlived.append)
        await until(lambda: ids(watcher) == {"context-0"})
        await http.call("DELETE", f"{url}/members/context-0?epoch=5", dict)
        await until(lambda: len(heard) == 4)
        assert [(event.kind, event.member.epoch) for event in heard] == [
            ("joined", 5),
            ("left", 5),
            ("joined", worker.epoch),
            ("left", worker.epoch),
        ]
        assert outlived == [worker.epoch]


async def test_a_second_process_with_the_same_id_fences_the_first(coordinator, client):
    async with coordinator() as url, client(url) as first, client(url) as second:
        fenced: list[bool] = []
        heard: list[MemberEvent] = []
        first.subscribe(heard.append)
        first.announce(member(epoch=5), on_fenced=lambda: fenced.append(True))
        await until(lambda: ids(first) == {"context-0"})
        with structlog.testing.capture_logs() as logs:
            second.announce(member())
            await until(lambda: bool(fenced))
        assert [entry["log_level"] for entry in logs if "fenced" in entry["event"]] == ["error"]
        await until(lambda: len(heard) == 3)
        assert [(event.kind, event.member.epoch) for event in heard] == [
            ("joined", 5),
            ("dead", 5),
            ("joined", second.epoch),
        ]


async def test_nobody_is_announced_dead_when_the_coordinator_comes_back_empty(coordinator, client, free_port):
    """Watchers keep everyone through the outage and the grace period; only who stays away is given up."""
    url = f"http://127.0.0.1:{free_port}"
    async with client(url) as watcher, client(url) as worker:
        heard: list[MemberEvent] = []
        async with coordinator("one", free_port):
            watcher.subscribe(heard.append)
            worker.announce(member())
            async with client(url) as lost:
                lost.announce(member("context-1"))
                await until(lambda: ids(watcher) == {"context-0", "context-1"})
                lost._announcement.registered = False  # dies during the outage, without a goodbye
                epoch = worker.epoch
        with structlog.testing.capture_logs() as logs:
            await until(lambda: not watcher.connected and not worker.connected)
            assert ids(watcher) == {"context-0", "context-1"}
            async with coordinator("two", free_port):
                await until(lambda: watcher.connected and worker.connected)
                await until(lambda: ids(watcher) == {"context-0"})
                assert worker.epoch == epoch
        changes = [(event.kind, event.member.instance_id) for event in heard if event.kind != "updated"]
        assert sorted(changes[:2]) == [("joined", "context-0"), ("joined", "context-1")]
        assert changes[2:] == [("dead", "context-1")]
        told = [entry["event"] for entry in logs]
        assert told.count("coordinator is back") == 2, "each client says once that it is back"


async def test_a_client_may_start_before_the_coordinator(coordinator, client, free_port):
    url = f"http://127.0.0.1:{free_port}"
    with structlog.testing.capture_logs() as logs:
        async with client(url) as worker:
            worker.announce(member())
            worker.report([ledger_event(1)])
            await until(lambda: worker.statistics()["coordinator_losses_total"] == 1)
            assert not worker.connected
            async with coordinator("one", free_port):
                await until(lambda: ids(worker) == {"context-0"})
                told = [entry["log_level"] for entry in logs if entry["event"].startswith("coordinator")]
                assert told == ["warning", "info"]


async def test_ledger_events_survive_an_outage_in_order(coordinator, client, free_port):
    url = f"http://127.0.0.1:{free_port}"
    async with client(url, watch=False) as worker, HttpClient() as http:
        worker.report(ledger_event(number) for number in range(1200))
        await until(lambda: worker.statistics()["coordinator_losses_total"] == 1)
        async with coordinator("one", free_port):
            await until(lambda: worker.statistics()["ledger_queued"] == 0)
            with anyio.fail_after(10):
                while True:
                    listed = await http.call("GET", f"{url}/transfers?limit=1000", TransferList)
                    if listed.counts == {"completed": 1200}:
                        break
                    await anyio.sleep(0.01)
    assert worker.statistics()["ledger_dropped_total"] == 0


async def test_what_a_member_leaves_behind_is_closed_but_its_last_words_count(coordinator, client):
    async with coordinator() as url:
        async with client(url) as worker:
            worker.announce(member())
            await until(lambda: worker.epoch > 0)
            unread = msgspec.structs.replace(ledger_event(7), state="registered", epoch=worker.epoch)
            worker.report([unread, msgspec.structs.replace(unread, transfer_id=8)])
            await until(lambda: worker.statistics()["ledger_queued"] == 0)
            worker.report([msgspec.structs.replace(ledger_event(8), epoch=worker.epoch)])
        async with HttpClient() as http:
            listed = await http.call("GET", f"{url}/transfers", TransferList)
    assert {r.transfer_id: (r.state, r.sides[0].reason) for r in listed.transfers} == {
        7: ("cancelled", "context-0 left"),
        8: ("completed", ""),
    }


async def test_the_ledger_queue_is_bounded(client, free_port):
    async with client(f"http://127.0.0.1:{free_port}", watch=False) as worker:
        worker.report(ledger_event(number) for number in range(10_500))
        statistics = worker.statistics()
        assert statistics["ledger_queued"] == 10_000
        assert statistics["ledger_dropped_total"] == 500


async def test_announcing_needs_a_started_client_and_happens_once(coordinator, client):
    async with coordinator() as url:
        async with client(url) as worker:
            worker.announce(member())
            with pytest.raises(RuntimeError):
                worker.announce(member())
        with pytest.raises(RuntimeError):
            worker.announce(member())


async def test_a_client_whose_tasks_were_ended_from_outside_stops_in_silence(coordinator):
    async with coordinator() as url:
        client = CoordinatorClient(url)
        async with anyio.create_task_group() as tasks:
            await client.start(tasks)
            client.announce(member())
            await until(lambda: ids(client) == {"context-0"})
            tasks.cancel_scope.cancel()
        await client.stop()


class _SlowCoordinator(Service):
    """Thinks about a heartbeat until it is told to answer."""

    def __init__(self) -> None:
        super().__init__("coordinator")
        self.heard: list[str] = []
        self.answers, self.left = anyio.Event(), anyio.Event()
        self.app.router.add_post("/members", self._register)
        self.app.router.add_post("/members/context-0/heartbeat", self._heartbeat)
        self.app.router.add_delete("/members/context-0", self._leave)

    async def _register(self, _request: web.Request) -> web.Response:
        self.heard.append("register")
        return json_response(msgspec.to_builtins(RegistrationReply(epoch=1, lease_s=60.0, revision=1)))

    async def _heartbeat(self, _request: web.Request) -> web.Response:
        self.heard.append("heartbeat")
        await self.answers.wait()
        self.heard.append("answer")
        return json_response(msgspec.to_builtins(HeartbeatReply()))

    async def _leave(self, _request: web.Request) -> web.Response:
        self.heard.append("leave")
        self.left.set()
        return json_response({})


async def test_a_goodbye_is_the_last_word():
    """It waits for the heartbeat that is on its way, which would find itself unknown and register again."""
    slow = _SlowCoordinator()
    async with serving(slow) as url, anyio.create_task_group() as tasks:
        client = CoordinatorClient(url, watch=False)
        await client.start(tasks)
        client.announce(member())
        await until(lambda: slow.heard == ["register"])
        client.set_draining()
        await until(lambda: slow.heard == ["register", "heartbeat"])
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(client.stop)
            with anyio.move_on_after(TOO_EARLY_S):
                await slow.left.wait()
            slow.answers.set()
        assert slow.heard == ["register", "heartbeat", "answer", "leave"]


class _Worker(Service):
    def __init__(self) -> None:
        super().__init__("context")
        self.app.router.add_get("/server_info", self._info)

    async def _info(self, _request: web.Request) -> web.Response:
        return json_response(
            {
                "disaggregated_params": {"ctx_info_endpoint": ["tcp://127.0.0.1:1"], "ctx_dp_rank": 0},
                "max_batch_size": 8,
                "tokens_per_block": 32,
                "kv_cache_hash_algo": "v2_sha256",
            }
        )


async def test_static_lists_are_probed(monkeypatch):
    monkeypatch.setattr("kvmesh.net.discovery_static.PROBE_INTERVAL_S", 0.02)
    heard: list[MemberEvent] = []
    async with anyio.create_task_group() as tasks:
        async with serving(_Worker()) as url:
            membership = StaticMembership([url], [url.removeprefix("http://")])
            membership.subscribe(heard.append)
            await membership.start(tasks)
            found = membership.members()[0]
            assert msgspec.structs.asdict(found) | {
                "role": "both",
                "url": url,
                "tokens_per_block": 32,
                "ctx_info_endpoint": "tcp://127.0.0.1:1",
            } == msgspec.structs.asdict(found)
        await until(lambda: [event.kind for event in heard] == ["joined", "dead"])
        assert membership.members() == []
        await membership.stop()
        await membership.stop()
