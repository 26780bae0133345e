"""``kvmesh status``: who is in the mesh, how busy and how full they are, and how the transfers fare."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import urlsplit

import anyio
import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmesh.cli.console import table_console
from kvmesh.cli.reach import ask_coordinator
from kvmesh.cli.rundir import RunDir, is_running
from kvmesh.cli.status_cache import cache_block
from kvmesh.cli.target import add_coordinator_flags, client_of, coordinator_url, tls_of
from kvmesh.cli.transfer_table import plain_table, transfer_table
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.tls import Tls
from kvmesh.protocol.cache_report import CacheReport
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member, MemberList
from kvmesh.protocol.ranks import rank_instance_ids
from kvmesh.protocol.transfer import TransferList

__all__ = ["add_arguments", "run"]

SHOWN_TRANSFERS = 5
MEMBER_TIMEOUT_S = 2.0
"""A member that has not answered by then is shown without its figures."""
WORKER_ROLES = frozenset({"context", "generation", "both"})
WORKER_DIALECT = "kvmesh"
FAILED = 1


class _WorkerStats(msgspec.Struct):
    """What is read of a worker's ``/stats``; one of another version may lack it."""

    cache: CacheReport = msgspec.field(default_factory=CacheReport)
    attention_dp_ranks: list[_WorkerStats] = []
    """Of each rank, where there are several."""


class _Status(msgspec.Struct):
    """``--json``."""

    coordinator: str
    members: MemberList
    transfers: TransferList
    stuck: TransferList
    caches: dict[str, CacheReport]
    """By engine: a worker, or each attention data-parallel rank of one."""
    unreachable: dict[str, str]
    """Members that do not answer, and why."""
    draining: dict[str, str]
    """Members that leave, and what they still wait for."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """Where to look and how to show it."""
    add_coordinator_flags(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--watch", action="store_true", help="show it again every second until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Show the state of the mesh; 1 when one of its members does not answer."""
    url, given, client = coordinator_url(args), bool(args.coordinator), client_of(args)
    tls = tls_of(args)
    console = table_console()
    if args.watch and not args.json:
        _watch(console, url, given, client, tls)
    status = anyio.run(_read, url, given, client, tls)
    if args.json:
        console.file.write(msgspec.json.encode(status).decode() + "\n")
    else:
        console.print(_render(status))
    return FAILED if status.unreachable else 0


def _watch(console: Console, url: str, given: bool, client: HttpClient, tls: Tls) -> NoReturn:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_render(anyio.run(_read, url, given, client, tls)), refresh=True)
            time.sleep(1.0)


async def _read(url: str, given: bool, client: HttpClient, tls: Tls) -> _Status:
    async with client as http:
        latest = f"/transfers?limit={SHOWN_TRANSFERS}"
        stuck = f"/transfers?stuck=1&limit={SHOWN_TRANSFERS}"
        status = _Status(
            coordinator=url,
            members=await ask_coordinator(http, url, "/members", MemberList, given=given),
            transfers=await ask_coordinator(http, url, latest, TransferList, given=given),
            stuck=await ask_coordinator(http, url, stuck, TransferList, given=given),
            caches={},
            unreachable={},
            draining={},
        )
    # What is asked of members needs no API key, and their addresses are what somebody has registered.
    async with HttpClient(tls=tls) as http, anyio.create_task_group() as tasks:
        for member in status.members.members:
            tasks.start_soon(_ask, http, member, status)
    return status


async def _ask(http: HttpClient, member: Member, status: _Status) -> None:
    """Add a worker's cache, or why a member does not answer."""
    try:
        if member.role in WORKER_ROLES and member.dialect == WORKER_DIALECT:
            stats = await http.call("GET", f"{member.url}/stats", _WorkerStats, timeout_s=MEMBER_TIMEOUT_S)
            engines = stats.attention_dp_ranks or [stats]
            for name, engine in zip(rank_instance_ids(member.instance_id, len(engines)), engines, strict=True):
                status.caches[name] = engine.cache
        else:
            async with http.open("GET", f"{member.url}/health", timeout_s=MEMBER_TIMEOUT_S):
                pass
        if member.draining:
            status.draining[member.instance_id] = await _drain_detail(http, member)
    except PeerUnreachableError as error:
        status.unreachable[member.instance_id] = str(error)
    except (ApiError, msgspec.DecodeError):
        pass  # it answers; loading, draining or of another version


async def _drain_detail(http: HttpClient, member: Member) -> str:
    """What a member that leaves waits for, in its own words."""
    try:
        async with http.open("GET", f"{member.url}/health", timeout_s=MEMBER_TIMEOUT_S):
            return ""
    except ApiError as error:
        return error.message.partition(": ")[2]


def _render(status: _Status) -> RenderableType:
    members = sorted(status.members.members, key=lambda member: (member.role, member.instance_id))
    parts: list[RenderableType] = [_processes(), _members(members, status.unreachable)]
    parts += [Text(f"{name}: {detail}", "yellow") for name, detail in sorted(status.draining.items()) if detail]
    for member in members:
        for name in rank_instance_ids(member.instance_id, member.dp_size):
            if (report := status.caches.get(name)) is not None:
                parts += [Text(), cache_block(name, urlsplit(member.url).netloc, report)]
    parts += [Text(), _transfers(status.transfers)]
    if status.stuck.transfers:
        parts += [
            Text(f"{status.stuck.stuck} stuck transfers, oldest first:", "bold red"),
            transfer_table(status.stuck.transfers),
        ]
    return Group(*parts)


def _processes() -> RenderableType:
    state = RunDir.from_environment().read()
    if state is None or not is_running(state.supervisor):
        return Text()
    restarts = ", ".join(f"{child.name} x{child.restarts}" for child in state.children if child.restarts)
    return Text(
        f"{state.url}  {state.phase}  {len(state.children)} processes under pid {state.supervisor.pid}"
        + (f"  restarted: {restarts}" if restarts else "")
    )


def _members(members: list[Member], unreachable: Mapping[str, str]) -> Table:
    table = plain_table("member", "address", "busy", "moving", "pages free", "cached", "output", left=2)
    for member in members:
        load = member.load
        role = "" if member.instance_id.startswith(member.role) else f" ({member.role})"
        name = Text(member.instance_id + role)
        for kind, size in (("tp", member.tp_size), ("pp", member.pp_size)):
            if size > 1:
                name += Text(f" {kind}{size}", "dim")
        if member.draining:
            name += Text(" draining", "yellow")
        if member.instance_id in unreachable:
            name += Text(" does not answer", "bold red")
        row: list[RenderableType] = [name, urlsplit(member.url).netloc]
        if member.role in WORKER_ROLES:
            row += [
                f"{load.running}+{load.waiting}",
                str(load.in_transfer),
                _share(load.pages_free + load.pages_evictable, load.pages_total),
                _share(load.cached_tokens_total, load.prompt_tokens_total),
                str(load.generated_tokens_total),
            ]
        table.add_row(*row)
    return table


def _share(part: int, whole: int) -> str:
    return f"{part} {part / whole:.0%}" if whole else "-"


def _transfers(listed: TransferList) -> RenderableType:
    if not listed.counts:
        return Text("no transfers yet", "dim")
    counts = ", ".join(f"{count} {state}" for state, count in sorted(listed.counts.items()))
    forgotten = f" ({listed.evicted} older ones forgotten)" if listed.evicted else ""
    return Group(Text(f"transfers: {counts}{forgotten}; the latest:"), transfer_table(listed.transfers))
