"""The coordinator's HTTP faces over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import anyio
import msgspec
import pytest

from kvmesh.protocol.members import Heartbeat, Load, Member, MemberList, Registration, RegistrationReply, WatchReply
from kvmesh.protocol.transfer import LedgerEvent, TransferList, TransferRecord


class Http:
    """Status and decoded body of one exchange."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def __call__(self, method: str, path: str, body: object = None, type: object = dict) -> tuple[int, object]:
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request(method, self._url + path, data=data) as response:
            raw = await response.read()
            return response.status, msgspec.json.decode(raw, type=type if response.status < 400 else dict)


@pytest.fixture
def faces(coordinator):
    """``async with faces() as http``: a coordinator and a way to ask it."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Http]:
        async with coordinator(lease_s=30.0) as url, aiohttp.ClientSession() as session:
            yield Http(session, url)

    return start


def member(instance_id: str = "context-0", role: str = "context", **fields: object) -> Member:
    return Member(instance_id=instance_id, role=role, url="http://127.0.0.1:1", **fields)


async def register(http: Http, who: Member) -> RegistrationReply:
    status, reply = await http("POST", "/members", Registration(member=who), RegistrationReply)
    assert status == 200
    return reply


async def test_a_member_s_life(faces):
    async with faces() as http:
        reply = await register(http, member())
        assert reply.epoch > 0
        assert reply.lease_s == 30.0
        path = "/members/context-0"
        load = Load(running=1)
        assert (await http("POST", f"{path}/heartbeat", Heartbeat(epoch=reply.epoch, load=load)))[0] == 200
        status, members = await http("GET", "/members", type=MemberList)
        assert members.members[0].load == load
        newer = await register(http, member())
        status, body = await http("POST", f"{path}/heartbeat", Heartbeat(epoch=reply.epoch, load=load))
        assert (status, body["error"]["code"]) == (409, "fenced")
        assert (await http("DELETE", f"{path}?epoch={reply.epoch}"))[0] == 404
        assert (await http("DELETE", f"{path}?epoch={newer.epoch}"))[0] == 200
        status, body = await http("POST", f"{path}/heartbeat", Heartbeat(epoch=newer.epoch, load=load))
        assert (status, body["error"]["code"]) == (404, "unknown_member")


async def test_a_watch_answers_at_once_late_or_empty(faces):
    async with faces() as http:
        first = await register(http, member())
        watch = f"/members/watch?incarnation={first.incarnation}&revision="
        _, reply = await http("GET", "/members/watch", type=WatchReply)
        assert reply.reset
        assert [m.instance_id for m in reply.members] == ["context-0"]
        _, reply = await http("GET", f"{watch}0&timeout_s=20", type=WatchReply)
        assert [event.kind for event in reply.events] == ["joined"]
        _, reply = await http("GET", f"{watch}{reply.revision}&timeout_s=0.01", type=WatchReply)
        assert (reply.events, reply.reset) == ([], False)
        async with anyio.create_task_group() as tasks:
            late: list[WatchReply] = []

            async def poll() -> None:
                late.append((await http("GET", f"{watch}1&timeout_s=20", type=WatchReply))[1])

            tasks.start_soon(poll)
            while "kvmesh_coordinator_watchers 1.0" not in await metrics(http):  # noqa: ASYNC110
                await anyio.sleep(0.005)
            await register(http, member("context-1"))
        assert [event.member.instance_id for event in late[0].events] == ["context-1"]


async def metrics(http: Http) -> str:
    async with http._session.get(f"{http._url}/metrics") as response:
        return await response.text()


async def test_the_ledger(faces):
    async with faces() as http:
        event = LedgerEvent(
            transfer_id=2**62,
            side="context",
            instance_id="context-0",
            epoch=1,
            state="transferring",
            unix_ms=1,
            deadline_unix_ms=2,
            request_id="r-1",
        )
        assert (await http("POST", "/transfers", [event]))[0] == 200
        _, record = await http("GET", f"/transfers/{2**62}", type=TransferRecord)
        assert (record.state, record.request_id, record.stuck) == ("transferring", "r-1", True)
        _, listed = await http("GET", "/transfers?state=transferring&stuck=1", type=TransferList)
        assert (len(listed.transfers), listed.stuck, listed.counts) == (1, 1, {"transferring": 1})
        _, listed = await http("GET", "/transfers?state=completed", type=TransferList)
        assert listed.transfers == []
        assert (await http("GET", "/transfers/1"))[0] == 404
        assert (await http("GET", "/transfers/x"))[0] == 404


async def test_a_dead_member_s_transfers_are_closed(faces):
    async with faces() as http:
        old = await register(http, member())
        event = LedgerEvent(
            transfer_id=5, side="context", instance_id="context-0", epoch=old.epoch, state="registered", unix_ms=1
        )
        await http("POST", "/transfers", [event])
        await register(http, member())
        _, record = await http("GET", "/transfers/5", type=TransferRecord)
        assert (record.state, record.sides[0].reason) == ("failed", "context-0 died")


async def test_readiness(faces):
    async with faces() as http:
        first = await register(http, member())
        assert not (await http("GET", "/cluster_info"))[1]["is_ready"]
        await http(
            "POST",
            "/set",
            {
                "key": "/trtllm-disagg/c/workers/g",
                "value": '{"worker_id": "g", "host": "h", "port": 1, "role": 1}',
                "ttl": 60,
            },
        )
        _, info = await http("GET", "/cluster_info")
        assert info["is_ready"]
        assert info["minimal_instances"] == {"context_servers": 1, "generation_servers": 1}
        assert info["current_workers"]["context_servers"][0]["worker_id"] == "context-0"
        await http("DELETE", f"/members/context-0?epoch={first.epoch}")
        assert not (await http("GET", "/cluster_info"))[1]["is_ready"]


async def test_storage_answers_result_with_200_or_400(faces):
    async with faces() as http:
        item = {"key": "k", "value": "v", "expire_time": -1, "ttl": -1, "overwrite_if_exists": False}
        assert await http("POST", "/set", item) == (200, {"result": True})
        assert await http("POST", "/set", item) == (400, {"result": False})
        assert await http("POST", "/set", {**item, "value": "w", "overwrite_if_exists": True}) == (
            200,
            {"result": True},
        )
        assert await http("GET", "/get?key=k") == (200, {"result": "w"})
        assert await http("GET", "/get?key=absent") == (400, {"result": None})
        assert await http("GET", "/expire?key=k&ttl=5") == (200, {"result": True})
        assert await http("GET", "/expire?key=absent&ttl=5") == (400, {"result": False})
        assert await http("GET", "/get_prefix?key_prefix=k&keys_only=true") == (200, {"result": {"k": ""}})
        assert await http("GET", "/get_prefix?key_prefix=x") == (400, {"result": {}})
        assert await http("DELETE", "/delete?key=k") == (200, {"result": True})
        assert await http("DELETE", "/delete?key=k") == (400, {"result": False})


async def test_a_stored_key_expires_with_a_delete_event(faces):
    async with faces() as http:
        async with http._session.get(f"{http._url}/watch?key_prefix=/w/") as response:
            await http("POST", "/set", {"key": "/w/1", "value": "v", "ttl": 0.05})
            with anyio.fail_after(10):
                lines = [msgspec.json.decode(await response.content.readline()) for _ in range(2)]
        assert [line["type"] for line in lines] == ["SET", "DELETE"]
        assert lines[1] == {"key": "/w/1", "value": "v", "type": "DELETE"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/members", {"member": {"instance_id": "x"}}),
        ("POST", "/members", Registration(member=member("a/b"))),
        ("POST", "/members", Registration(member=member("a" * 257))),
        ("POST", "/members", Registration(member=member(epoch=2**63))),
        ("POST", "/members", Registration(member=member(epoch=-1))),
        ("POST", "/members", Registration(member=member(load=Load(running=2**64)))),
        ("POST", "/members", {"member": {"instance_id": "x", "role": "both", "url": "http://u", "epoch": 10**23}}),
        ("POST", "/members", {"member": {"instance_id": "x", "role": "both", "url": "http://[u"}}),
        ("POST", "/members", {"member": {"instance_id": "x", "role": "both", "url": "http://u:99999"}}),
        ("POST", "/members", {"member": {"instance_id": "x", "role": "both", "url": "file:///etc/hosts"}}),
        ("POST", "/members/context-0/heartbeat", Heartbeat(epoch=10**23, load=Load())),
        ("POST", "/transfers", {"transfer_id": 1}),
        ("GET", "/transfers?state=lost", None),
        ("GET", "/transfers?limit=-1", None),
        ("GET", "/members/watch?timeout_s=nan", None),
        ("GET", "/members/watch?revision=x", None),
        ("GET", "/get", None),
        ("GET", "/expire?key=k&ttl=soon", None),
    ],
)
async def test_bad_requests_are_told_what_is_wrong(faces, method, path, body):
    async with faces() as http:
        status, reply = await http(method, path, body)
        assert status == 400
        assert reply["error"]["type"] == "invalid_request_error"
        assert reply["error"]["message"].endswith(".")


async def test_no_life_follows_the_highest_epoch(faces):
    async with faces() as http:
        last = await register(http, member(epoch=2**63 - 1))
        assert last.epoch == 2**63 - 1
        status, reply = await http("POST", "/members", Registration(member=member()))
        assert (status, reply["error"]["param"]) == (400, "member.instance_id")
        _, listed = await http("GET", "/members", None, MemberList)
        assert [known.epoch for known in listed.members] == [2**63 - 1]


async def test_a_transfer_id_of_any_length_is_just_unknown(faces):
    async with faces() as http:
        status, _ = await http("GET", f"/transfers/{'9' * 5000}")
        assert status == 404


async def test_health(faces):
    async with faces() as http:
        assert (await http("GET", "/health"))[0] == 200
