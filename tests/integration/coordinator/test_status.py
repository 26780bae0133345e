"""``kvmesh status`` and ``kvmesh events`` over a real coordinator."""

from __future__ import annotations

import json

import anyio.to_thread
import msgspec
import zmq
import zmq.asyncio

from kvmesh.cli.main import main
from kvmesh.net.client import HttpClient
from kvmesh.protocol.events import AllBlocksCleared, EventBatch
from kvmesh.protocol.members import Load, Member, Registration
from kvmesh.protocol.transfer import LedgerEvent


async def command(*argv: str) -> int:
    """A command runs its own event loop, so it runs in a thread of its own."""
    return await anyio.to_thread.run_sync(main, argv)


async def fill(url: str, events_endpoint: str | None = None) -> None:
    load = Load(
        running=3, pages_total=100, pages_free=25, pages_evictable=25, prompt_tokens_total=50, cached_tokens_total=20
    )
    worker = Member(
        instance_id="context-0", role="context", url="http://127.0.0.1:1", load=load, events_endpoint=events_endpoint
    )
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
    async with coordinator(lease_s=30.0) as url:
        await fill(url)
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
    ):
        assert part in text
    assert report["members"]["members"][0]["instance_id"] == "context-0"


async def test_status_says_when_nobody_is_there(capsys):
    assert await command("status", "--coordinator", "http://127.0.0.1:9") == 2
    assert "kvmesh up" in capsys.readouterr().err


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
