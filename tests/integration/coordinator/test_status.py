"""``kvmesh status`` and ``kvmesh events`` over a real coordinator."""

from __future__ import annotations

import io
import json

import anyio.to_thread
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from waiting import until

from kvmesh.cli.main import main
from kvmesh.net.client import HttpClient
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, serving
from kvmesh.protocol.cache_report import CacheReport, GroupFlows, GroupReport, TierReport
from kvmesh.protocol.events import AllBlocksCleared, EventBatch
from kvmesh.protocol.members import Load, Member, Registration
from kvmesh.protocol.transfer import LedgerEvent


async def command(*argv: str) -> int:
    """A command runs its own event loop, so it runs in a thread of its own."""
    return await anyio.to_thread.run_sync(main, argv)


CACHE = CacheReport(
    tiers=(
        TierReport(
            level=0,
            tier="gpu",
            total=(200,),
            free=(60,),
            groups=(
                GroupReport(group=0, window=None, locked=40, pinned=8, held=2, evictable=70),
                GroupReport(group=1, window=512, locked=11, pinned=0, held=0, evictable=9),
            ),
        ),
        TierReport(level=1, tier="host", total=(50,), free=(50,), groups=()),
    ),
    flows=(
        GroupFlows(tier="gpu", group=0, reused_full=90, reused_partial=2, dropped=7),
        GroupFlows(tier="gpu", group=1, reused_full=30, reused_partial=1, dropped=8),
        GroupFlows(tier="host", group=0, reused_full=5, offloaded=44, onboarded=6),
        GroupFlows(tier="host", group=1),
    ),
    pinned_pages_by_age=(3, 0, 0, 5),
    counters={"reused_full_blocks": 5, "reused_partial_blocks": 1, "missed_blocks": 6, "offloaded_pages": 4,
              "offloaded_bytes": 2_000_000, "damaged_pages": 1},
)  # fmt: skip


class FakeWorker(Service):
    """Tells the figures of a cache."""

    def __init__(self) -> None:
        super().__init__("context")
        self.app.router.add_get("/stats", self._stats)

    async def _stats(self, _request: web.Request) -> web.Response:
        return json_response({"running": 1, "cache": CACHE})


async def fill(url: str, events_endpoint: str | None = None, worker_url: str = "http://127.0.0.1:1") -> None:
    load = Load(
        running=3, pages_total=100, pages_free=25, pages_evictable=25, prompt_tokens_total=50, cached_tokens_total=20
    )
    worker = Member(instance_id="context-0", role="context", url=worker_url, load=load, events_endpoint=events_endpoint)
    event = LedgerEvent(
        transfer_id=77, side="context", instance_id="context-0", epoch=1, state="transferring", unix_ms=1,
        deadline_unix_ms=2, num_tokens=123, num_bytes=5_000_000,
    )  # fmt: skip
    async with HttpClient() as http:
        await http.call("POST", f"{url}/members", dict, body=Registration(member=worker))
        await http.call("POST", f"{url}/transfers", dict, body=[event])


async def test_status_shows_members_cache_and_transfers(coordinator, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVMESH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    async with coordinator(lease_s=30.0) as url, serving(FakeWorker()) as worker_url:
        await fill(url, worker_url=worker_url)
        assert await command("status", "--coordinator", url) == 0
        text = capsys.readouterr().out
        assert await command("status", "--coordinator", url, "--json") == 0
        report = json.loads(capsys.readouterr().out)
    for part in (
        "context-0",
        "3+0",
        "50 50%",
        "20 40%",
        "1 transferring",
        "77",
        "5.00 MB",
        "1 stuck",
        "group 1, window 512",
        "hits 50% of 12 blocks: 5 full, 1 partial",
        "offloaded 4 pages (2.0 MB)",
        "pinned by transfers: 3 for under 1 s, 5 for over 60 s",
        "1 damaged pages",
    ):
        assert part in text
    (gpu, gpu_since), (host, host_since) = (
        [line.split() for line in text.splitlines() if f" {tier} " in line] for tier in ("gpu", "host")
    )
    assert gpu[2:] == ["51", "8", "2", "79", "60", "200"]
    assert host[2:] == ["0", "0", "0", "0", "50", "50"]
    assert gpu_since[1:] == ["120", "3", "0", "0", "15", "0"]
    assert host_since[1:] == ["5", "0", "44", "6", "0", "0"]
    assert "reason" not in text, "no column without anything in it"
    assert report["members"]["members"][0]["instance_id"] == "context-0"
    assert report["caches"]["context-0"]["counters"]["missed_blocks"] == 6
    assert report["unreachable"] == {}


async def test_status_fails_when_a_member_does_not_answer(coordinator, capsys):
    async with coordinator(lease_s=30.0) as url:
        await fill(url)
        assert await command("status", "--coordinator", url) == 1
        assert "does not answer" in capsys.readouterr().out
        assert await command("status", "--coordinator", url, "--json") == 1
        assert "cannot reach" in json.loads(capsys.readouterr().out)["unreachable"]["context-0"]


async def test_reasons_have_a_column_where_there_are_any(coordinator, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    failed = LedgerEvent(
        transfer_id=78, side="context", instance_id="context-0", epoch=1, state="failed", unix_ms=1, reason="no pages"
    )
    async with coordinator(lease_s=30.0) as url, serving(FakeWorker()) as worker_url:
        await fill(url, worker_url=worker_url)
        async with HttpClient() as http:
            await http.call("POST", f"{url}/transfers", dict, body=[failed])
        assert await command("status", "--coordinator", url) == 0
    text = capsys.readouterr().out
    assert "reason" in text
    assert "no pages" in text
    by_id = {line.split()[0]: line for line in text.splitlines() if line[:3] in ("77 ", "78 ")}
    assert "took 0 ms" in by_id["78"]
    assert "took" not in by_id["77"], "it goes on"


COORDINATORS_COMMANDS = ("status", "transfers", "events")


@pytest.mark.parametrize("name", COORDINATORS_COMMANDS)
async def test_a_coordinator_that_is_not_there_is_one_sentence(name, capfd, monkeypatch, tmp_path):
    assert await command(name, "--coordinator", "http://127.0.0.1:9") == 2
    told = capfd.readouterr()
    assert "check --coordinator" in told.err
    assert "kvmesh up" not in told.err, "whoever names an address has a mesh"
    assert (told.out, told.err.count("\n")) == ("", 1), "and nothing that a service would log"
    monkeypatch.setenv("KVMESH_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("kvmesh.cli.target.DEFAULT_COORDINATOR_URL", "http://127.0.0.1:9")
    assert await command(name) == 2
    assert "'kvmesh up' starts one" in capfd.readouterr().err


@pytest.mark.parametrize("service", ["router", "context", "indexer"])
async def test_another_service_in_the_coordinators_place_is_told(service, capfd):
    """By every command in the same words."""
    article = "an" if service == "indexer" else "a"
    async with serving(Service(service)) as url:
        for name in COORDINATORS_COMMANDS:
            capfd.readouterr()
            assert await command(name, "--coordinator", url) == 2
            assert capfd.readouterr().err == (
                f"kvmesh {name}: {url} is {article} {service} server, not a coordinator; "
                "give the coordinator's address with --coordinator\n"
            )


async def test_bench_and_chat_say_that_they_were_pointed_at_another_service(coordinator, capsys):
    async with coordinator(lease_s=30.0) as url:
        for argv in (("bench", "--url", url), ("chat", "--url", url, "hello")):
            assert await command(*argv) == 2
            assert f"{url} is a coordinator server, not a router; give the router's address with --url" in (
                capsys.readouterr().err
            )


async def test_events_follows_the_members_that_publish(coordinator, capsys):
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.linger = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    payload = msgspec.msgpack.encode(EventBatch(ts=0.0, events=[AllBlocksCleared()], data_parallel_rank=0))
    try:
        async with coordinator(lease_s=30.0) as url, anyio.create_task_group() as tasks:
            await fill(url, f"tcp://127.0.0.1:{port}")
            tasks.start_soon(command, "events", "--coordinator", url, "--worker", "context-0", "--count", "1")
            with anyio.fail_after(20):
                await publisher.recv()  # the subscription
                await publisher.send_multipart([b"", bytes(8), payload])
    finally:
        publisher.close()
        context.term()
    text = capsys.readouterr().out
    assert f"context-0 following tcp://127.0.0.1:{port}" in text
    assert "context-0 #0 cleared  everything" in text


@pytest.mark.parametrize(
    ("wanted", "context_endpoint", "says"),
    [
        (("late", "context-0"), "tcp://127.0.0.1:9", "late; workers that publish now: context-0"),
        ((), None, "any worker; workers that publish now: none"),
    ],
)
async def test_events_of_who_is_not_there_are_waited_for_and_that_is_said(
    coordinator, capsys, monkeypatch, wanted, context_endpoint, says
):
    """On stderr, once: a worker may come later, and a misspelt name never does."""
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.linger = 0
    endpoint = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
    payload = msgspec.msgpack.encode(EventBatch(ts=0.0, events=[AllBlocksCleared()], data_parallel_rank=0))
    told = io.StringIO()
    monkeypatch.setattr("sys.stderr", told)
    try:
        async with coordinator(lease_s=30.0) as url, anyio.create_task_group() as tasks:
            await fill(url, context_endpoint)
            flags = [f"--worker={name}" for name in wanted]
            tasks.start_soon(command, "events", "--coordinator", url, "--count", "1", *flags)
            await until(lambda: "\n" in told.getvalue())
            late = Member(instance_id="late", role="context", url="http://127.0.0.1:1", events_endpoint=endpoint)
            async with HttpClient() as http:
                await http.call("POST", f"{url}/members", dict, body=Registration(member=late))
            with anyio.fail_after(60):
                await publisher.recv()  # the subscription
                await publisher.send_multipart([b"", bytes(8), payload])
    finally:
        publisher.close()
        context.term()
    assert told.getvalue() == f"kvmesh events: waiting for events of {says}\n"
    assert "late #0 cleared  everything" in capsys.readouterr().out
