"""``kvmesh transfers``: the coordinator's ledger, searched."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from typing import get_args
from urllib.parse import quote, urlencode

import anyio
import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvmesh.cli.console import table_console
from kvmesh.cli.errors import UserError
from kvmesh.cli.reach import ask_coordinator, explained
from kvmesh.cli.target import add_coordinator_flags, client_of, coordinator_url
from kvmesh.cli.transfer_table import plain_table, transfer_table
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.transfer import TransferList, TransferRecord, TransferState

__all__ = ["add_arguments", "run"]

STUCK = 1
"""Exit status with ``--stuck`` when there is any: for scripts that watch."""
WATCH_S = 1.0


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """Which transfers, and how to show them."""
    parser.add_argument("transfer_id", nargs="?", help="one transfer, or the beginning of its id: what each side said")
    parser.add_argument("--state", choices=get_args(TransferState), help="only those in this state")
    parser.add_argument("--open", action="store_true", help="only those that are not finished")
    parser.add_argument(
        "--stuck", action="store_true", help="only those past their deadline; status 1 if there are any"
    )
    parser.add_argument("--instance", metavar="ID", help="only those that this server takes part in")
    parser.add_argument("--request", metavar="ID", help="only those of this request")
    parser.add_argument("--older-than", metavar="S", type=float, help="only those older, or longer, than S seconds")
    parser.add_argument("--limit", metavar="N", type=int, default=20, help="at most so many (default: 20)")
    add_coordinator_flags(parser)
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--watch", action="store_true", help="show them again every second until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Show transfers; see :data:`STUCK` for the status."""
    url, client = coordinator_url(args), client_of(args)
    console = table_console()
    if args.transfer_id is not None:
        record = anyio.run(_one, url, args.transfer_id, bool(args.coordinator), client)
        _put(console, record, _sides(record), as_json=args.json)
        return 0
    if args.watch and not args.json:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_listing(anyio.run(_several, url, args, client)), refresh=True)
                time.sleep(WATCH_S)
    listed = anyio.run(_several, url, args, client)
    _put(console, listed, _listing(listed), as_json=args.json)
    return STUCK if args.stuck and listed.transfers else 0


def _put(console: Console, data: TransferList | TransferRecord, shown: RenderableType, *, as_json: bool) -> None:
    if as_json:
        console.file.write(msgspec.json.encode(data).decode() + "\n")
    else:
        console.print(shown)


async def _one(url: str, transfer_id: str, given: bool, client: HttpClient) -> TransferRecord:
    async with client as http:
        try:
            return await http.call("GET", f"{url}/transfers/{quote(transfer_id, safe='')}", TransferRecord)
        except ApiError as error:
            if error.code in ("not_found", "ambiguous"):
                raise UserError(error.message) from None
            raise await explained(http, error, url, wanted="coordinator", given=given) from error
        except (PeerUnreachableError, msgspec.DecodeError) as error:
            raise await explained(http, error, url, wanted="coordinator", given=given) from error


async def _several(url: str, args: argparse.Namespace, client: HttpClient) -> TransferList:
    asked = {
        "state": args.state,
        "open": "1" if args.open else None,
        "stuck": "1" if args.stuck else None,
        "instance": args.instance,
        "request": args.request,
        "older_than_s": args.older_than,
        "limit": args.limit,
    }
    query = urlencode({key: value for key, value in asked.items() if value is not None})
    async with client as http:
        return await ask_coordinator(http, url, f"/transfers?{query}", TransferList, given=bool(args.coordinator))


def _listing(listed: TransferList) -> RenderableType:
    counts = ", ".join(f"{count} {state}" for state, count in sorted(listed.counts.items())) or "none"
    stuck = f"; {listed.stuck} stuck" if listed.stuck else ""
    heading = Text(f"in the ledger: {counts}{stuck}", "bold red" if listed.stuck else "")
    if not listed.transfers:
        return Group(heading, Text("no such transfers", "dim"))
    return Group(heading, transfer_table(listed.transfers))


def _sides(record: TransferRecord) -> RenderableType:
    """What each side last said."""
    table = plain_table("side", "server", "epoch", "state", "at", "tokens", "pages", "bytes", "reason", left=5)
    for side in record.sides:
        at = datetime.fromtimestamp(side.unix_ms / 1e3, UTC).strftime("%H:%M:%S.%f")[:-3]
        row = [side.side, side.instance_id, str(side.epoch), side.state, at]
        row += [str(number or "-") for number in (side.num_tokens, side.num_pages, side.num_bytes)]
        table.add_row(*row, side.reason)
    request = f" of request {record.request_id}" if record.request_id else ""
    stuck = ", past its deadline" if record.stuck else ""
    return Group(Text(f"transfer {record.transfer_id}{request}: {record.state}{stuck}, {record.age_ms} ms"), table)
