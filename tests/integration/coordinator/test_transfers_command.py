"""``kvmesh transfers`` over a real coordinator."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager

import anyio.to_thread
import pytest

from kvmesh.cli.main import main
from kvmesh.net.client import HttpClient
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.transfer import LedgerEvent


async def command(*argv: str) -> int:
    """A command runs its own event loop, so it runs in a thread of its own."""
    return await anyio.to_thread.run_sync(main, argv)


@asynccontextmanager
async def filled(coordinator):
    """A coordinator with one finished, one open and one stuck transfer."""
    now_ms = time.time_ns() // 1_000_000
    common = {"instance_id": "context-0", "epoch": 1}
    events = [
        LedgerEvent(transfer_id=1, side="context", state="completed", unix_ms=now_ms, request_id="one", **common),
        LedgerEvent(transfer_id=2, side="context", state="registered", unix_ms=now_ms, num_tokens=77, **common),
        LedgerEvent(
            transfer_id=3,
            side="context",
            state="timed_out",
            unix_ms=now_ms - 9000,
            deadline_unix_ms=now_ms - 1000,
            reason="nobody came",
            **common,
        ),
    ]
    async with coordinator() as url, HttpClient() as http:
        await http.call("POST", f"{url}/transfers", dict, body=events)
        yield url


async def test_all_and_some(coordinator, capsys):
    async with filled(coordinator) as url:
        assert await command("transfers", "--coordinator", url, "--json") == 0
        assert [one["transfer_id"] for one in json.loads(capsys.readouterr().out)["transfers"]] == [2, 1, 3]
        for flags, expected in (
            (("--open",), [2, 3]),
            (("--state", "completed"), [1]),
            (("--instance", "context-9"), []),
            (("--request", "on"), [1]),
            (("--older-than", "5"), [3]),
            (("--limit", "1"), [2]),
        ):
            assert await command("transfers", "--coordinator", url, "--json", *flags) == 0
            assert [one["transfer_id"] for one in json.loads(capsys.readouterr().out)["transfers"]] == expected, flags


async def test_stuck_ones_are_a_status(coordinator, capsys):
    async with filled(coordinator) as url:
        assert await command("transfers", "--coordinator", url, "--stuck") == 1
        out = capsys.readouterr().out
        assert "1 stuck" in out
        assert "timed_out" in out
        assert await command("transfers", "--coordinator", url, "--stuck", "--instance", "x") == 0
        assert "no such transfers" in capsys.readouterr().out


async def test_one(coordinator, capsys):
    async with filled(coordinator) as url:
        assert await command("transfers", "2", "--coordinator", url) == 0
        out = capsys.readouterr().out
        assert "transfer 2: registered" in out
        assert "77" in out
        assert await command("transfers", "9", "--coordinator", url) == 2
        assert "knows no transfer 9" in capsys.readouterr().err


async def test_what_cannot_be_asked(coordinator):
    async with filled(coordinator) as url, HttpClient() as http:
        for query in ("older_than_s=-1", "older_than_s=x", "state=lost", "limit=-2"):
            with pytest.raises(ApiError) as refused:
                await http.call("GET", f"{url}/transfers?{query}", dict)
            assert refused.value.status == 400


async def test_ids_are_whole_in_a_pipe_and_on_a_narrow_terminal_and_a_beginning_is_enough(
    coordinator, capsys, monkeypatch
):
    ids = [3179077918699123456 + number for number in (0, 1, 5_000_000_000)]
    now_ms = time.time_ns() // 1_000_000
    said = [
        LedgerEvent(transfer_id=one, side=side, state="completed", unix_ms=now_ms, instance_id=f"{side}-0", epoch=1)
        for one in ids
        for side in ("context", "generation")
    ]
    async with coordinator() as url, HttpClient() as http:
        await http.call("POST", f"{url}/transfers", dict, body=said)
        monkeypatch.setenv("COLUMNS", "60")
        for environment, cut in ((), False), (("FORCE_COLOR", "1"), True):
            if environment:
                monkeypatch.setenv(*environment)
            assert await command("transfers", "--coordinator", url) == 0
            out = capsys.readouterr().out
            assert all(str(one) in out for one in ids)
            assert ("\N{HORIZONTAL ELLIPSIS}" in out) is cut
        monkeypatch.delenv("FORCE_COLOR")
        assert await command("transfers", str(ids[2])[:12], "--coordinator", url) == 0
        assert f"transfer {ids[2]}: completed" in capsys.readouterr().out
        assert await command("transfers", str(ids[0])[:6], "--coordinator", url) == 2
        assert "knows 3 transfers that begin with" in capsys.readouterr().err
        assert await command("transfers", str(ids[0]), "--coordinator", url) == 0


async def test_of_several_coordinators_one_that_answers_is_asked(coordinator, capsys, free_port):
    nobody = f"http://127.0.0.1:{free_port}"
    async with filled(coordinator) as url:
        assert await command("transfers", "2", "--coordinator", f"{nobody},{url}") == 0
        assert "transfer 2: registered" in capsys.readouterr().out
    assert await command("transfers", "--coordinator", f"{nobody},{nobody}") == 2
    assert f"none of {nobody}, {nobody} answers; check --coordinator" in capsys.readouterr().err
