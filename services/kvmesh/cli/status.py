"""``kvmesh status``: who is in the mesh, how busy and how full they are, and how the transfers fare."""

from __future__ import annotations

import argparse
import time
from urllib.parse import urlsplit

import anyio
import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmesh.cli.errors import UserError
from kvmesh.cli.rundir import RunDir, is_running
from kvmesh.cli.target import coordinator_url
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member, MemberList
from kvmesh.protocol.transfer import TransferList, TransferRecord

__all__ = ["add_arguments", "run"]

SHOWN_TRANSFERS = 5


class _Status(msgspec.Struct):
    """``--json``."""

    coordinator: str
    members: MemberList
    transfers: TransferList
    stuck: TransferList


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """Where to look and how to show it."""
    parser.add_argument("--coordinator", metavar="URL", help="coordinator (default: that of the mesh 'up' started)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--watch", action="store_true", help="show it again every second until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Show the state of the mesh."""
    url = coordinator_url(args)
    console = Console()
    if args.json:
        console.file.write(msgspec.json.encode(anyio.run(_read, url)).decode() + "\n")
    elif args.watch:
        _watch(console, url)
    else:
        console.print(_render(anyio.run(_read, url)))
    return 0


def _watch(console: Console, url: str) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_render(anyio.run(_read, url)), refresh=True)
            time.sleep(1.0)


async def _read(url: str) -> _Status:
    try:
        async with HttpClient(timeout_s=5.0) as http:
            return _Status(
                coordinator=url,
                members=await http.call("GET", f"{url}/members", MemberList),
                transfers=await http.call("GET", f"{url}/transfers?limit={SHOWN_TRANSFERS}", TransferList),
                stuck=await http.call("GET", f"{url}/transfers?stuck=1&limit={SHOWN_TRANSFERS}", TransferList),
            )
    except (PeerUnreachableError, ApiError) as error:
        raise UserError(f"{error}; is the mesh up? 'kvmesh up' starts one") from error


def _render(status: _Status) -> RenderableType:
    parts: list[RenderableType] = [_processes(), _members(status.members.members), _transfers(status.transfers)]
    if status.stuck.transfers:
        parts += [
            Text(f"{status.stuck.stuck} stuck transfers, oldest first:", "bold red"),
            _list(status.stuck.transfers),
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


def _members(members: list[Member]) -> Table:
    table = _plain_table("member", "address", "busy", "moving", "pages free", "cached", "output", left=2)
    for member in sorted(members, key=lambda member: (member.role, member.instance_id)):
        load = member.load
        role = "" if member.instance_id.startswith(member.role) else f" ({member.role})"
        name = Text(member.instance_id + role) + (Text(" draining", "yellow") if member.draining else Text())
        row: list[RenderableType] = [name, urlsplit(member.url).netloc]
        if member.role not in ("router", "indexer"):
            row += [
                f"{load.running}+{load.waiting}",
                str(load.in_transfer),
                _share(load.pages_free + load.pages_evictable, load.pages_total),
                _share(load.cached_tokens_total, load.prompt_tokens_total),
                str(load.generated_tokens_total),
            ]
        table.add_row(*row)
    return table


def _plain_table(*headings: str, left: int) -> Table:
    """Without borders; the first ``left`` columns are names, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="left" if index < left else "right")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part} {part / whole:.0%}" if whole else "-"


def _transfers(listed: TransferList) -> RenderableType:
    if not listed.counts:
        return Text("no transfers yet", "dim")
    counts = ", ".join(f"{count} {state}" for state, count in sorted(listed.counts.items()))
    forgotten = f" ({listed.evicted} older ones forgotten)" if listed.evicted else ""
    return Group(Text(f"transfers: {counts}{forgotten}; the latest:"), _list(listed.transfers))


def _list(records: list[TransferRecord]) -> Table:
    table = _plain_table("transfer", "state", "from", "to", "tokens", "moved", "age", left=4)
    table.add_column("reason")
    for record in records:
        sides = {side.side: side for side in record.sides}
        source, target = sides.get("context"), sides.get("generation")
        moved = max((side.num_bytes for side in record.sides), default=0)
        table.add_row(
            str(record.transfer_id),
            record.state,
            source.instance_id if source else "?",
            target.instance_id if target else "-",
            str(max((side.num_tokens for side in record.sides), default=0)),
            f"{moved / 1e6:.2f} MB" if moved else "-",
            f"{record.age_ms} ms" if record.age_ms < 10_000 else f"{record.age_ms / 1000:.0f} s",
            "; ".join(side.reason for side in record.sides if side.reason),
        )
    return table
