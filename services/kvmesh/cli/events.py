"""``kvmesh events``: the KV cache event streams of all workers, readable, as they come."""

from __future__ import annotations

import argparse
import time

import anyio
import msgspec
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup
from rich.console import Console
from rich.markup import escape

from kvmesh.cli.errors import UserError
from kvmesh.cli.target import coordinator_url
from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.protocol.ranks import rank_instance_ids

__all__ = ["add_arguments", "describe", "run"]

SHOWN_HASHES = 4
FIND_TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """Whose events."""
    parser.add_argument("--coordinator", metavar="URL", help="coordinator (default: that of the mesh 'up' started)")
    parser.add_argument("--worker", action="append", metavar="ID", help="only this worker; may be repeated")
    parser.add_argument("--endpoint", metavar="ZMQ", help="one publisher, such as tcp://127.0.0.1:5557; no coordinator")
    parser.add_argument("--count", type=int, metavar="N", help="leave after N events")


def run(args: argparse.Namespace) -> int:
    """Follow until Ctrl-C."""
    printer = _Printer(Console(), args.count)
    if args.endpoint:
        anyio.run(_follow_one, args.endpoint, printer)
    else:
        anyio.run(_follow_mesh, coordinator_url(args), frozenset(args.worker or ()), printer)
    return 0


def describe(event: KvEvent) -> str:
    """One event in one line."""
    match event:
        case BlockStored() if not event.token_ids:
            return f"moved    {len(event.block_hashes)} blocks to {event.medium}: {_hashes(event.block_hashes)}"
        case BlockStored():
            parent = "root" if event.parent_block_hash is None else _hash(event.parent_block_hash)
            extra = f" lora {event.lora_id}" if event.lora_id is not None else ""
            return (
                f"stored   {len(event.block_hashes)} blocks, {len(event.token_ids)} tokens, after {parent}, "
                f"{event.medium}{extra}: {_hashes(event.block_hashes)}"
            )
        case BlockRemoved():
            return f"removed  {len(event.block_hashes)} blocks, {event.medium}: {_hashes(event.block_hashes)}"
        case AllBlocksCleared():
            return "cleared  everything"


class _Printer:
    """Prints batches and notices what was missed; ends the process's work after ``count`` events."""

    def __init__(self, console: Console, count: int | None) -> None:
        self._console = console
        self._left = count
        self._last: dict[str, int] = {}
        self.done = anyio.Event()

    def batch(self, worker: str, frames: list[bytes]) -> None:
        """Print one message: topic, sequence, payload."""
        _topic, sequence_bytes, payload = frames
        sequence = int.from_bytes(sequence_bytes, "big")
        last = self._last.get(worker)
        if last is not None and sequence != last + 1:
            self.note(worker, f"missed {sequence - last - 1} batches" if sequence > last else "publisher restarted")
        self._last[worker] = sequence
        try:
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
        except msgspec.DecodeError:
            self.note(worker, f"#{sequence} is in an encoding that this command does not read ({len(payload)} bytes)")
            return
        clock = time.strftime("%H:%M:%S", time.localtime(batch.ts))
        for event in batch.events:
            if self._left == 0:
                return
            line = f"[dim]{clock}[/] [cyan]{escape(worker)}[/] #{sequence} {escape(describe(event))}"
            self._console.print(line, highlight=False, soft_wrap=True)
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    self.done.set()

    def note(self, worker: str, text: str) -> None:
        """Something to know about a stream."""
        self._console.print(f"[cyan]{escape(worker)}[/] [yellow]{escape(text)}[/]", highlight=False, soft_wrap=True)


async def _follow_one(endpoint: str, printer: _Printer) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_subscribe, endpoint, endpoint, printer)
        await printer.done.wait()
        tasks.cancel_scope.cancel()


async def _follow_mesh(url: str, workers: frozenset[str], printer: _Printer) -> None:
    client = CoordinatorClient(url)
    async with anyio.create_task_group() as tasks:
        followers = _Followers(tasks, workers, printer)
        client.subscribe(followers.hear)
        await client.start(tasks)
        with anyio.move_on_after(FIND_TIMEOUT_S) as scope:
            await followers.found.wait()
        if scope.cancelled_caught and not client.connected:
            raise UserError(f"no coordinator answers at {url}; is the mesh up? 'kvmesh up' starts one")
        if scope.cancelled_caught:
            known = ", ".join(member.instance_id for member in client.members() if member.events_endpoint) or "none"
            wanted = " or ".join(sorted(workers)) or "any"
            printer.note("mesh", f"waiting for events of {wanted}; workers that publish now: {known}")
        await printer.done.wait()
        tasks.cancel_scope.cancel()


class _Followers:
    """One subscription for each rank of each live worker that publishes."""

    def __init__(self, tasks: TaskGroup, workers: frozenset[str], printer: _Printer) -> None:
        self._tasks = tasks
        self._workers = workers
        self._printer = printer
        self._scopes: dict[str, anyio.CancelScope] = {}
        self.found = anyio.Event()

    def hear(self, event: MemberEvent) -> None:
        """Begin or end a subscription."""
        member = event.member
        name, stream = member.instance_id, member.events_endpoint
        if stream is None or (self._workers and name not in self._workers):
            return
        if event.kind == "joined":
            self.found.set()
            scope = self._scopes[name] = anyio.CancelScope()
            self._tasks.start_soon(self._follow, member, stream, scope)
        elif event.kind in ("left", "dead") and (ended := self._scopes.pop(name, None)) is not None:
            ended.cancel()
            self._printer.note(name, event.kind)

    async def _follow(self, member: Member, stream: str, scope: anyio.CancelScope) -> None:
        with scope:
            async with anyio.create_task_group() as tasks:
                for rank, name in enumerate(rank_instance_ids(member.instance_id, member.dp_size)):
                    tasks.start_soon(self._follow_rank, name, stream, rank)

    async def _follow_rank(self, name: str, stream: str, rank: int) -> None:
        try:
            await _subscribe(name, rank_endpoint(stream, rank), self._printer)
        except (UserError, EndpointError) as error:
            self._printer.note(name, str(error))  # the others are followed all the same


async def _subscribe(name: str, endpoint: str, printer: _Printer) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    try:
        socket.subscribe(b"")
        socket.connect(endpoint)
        printer.note(name, f"following {endpoint}")
        while True:
            frames = await socket.recv_multipart()
            if len(frames) == 3:
                printer.batch(name, frames)
    except zmq.ZMQError as error:
        raise UserError(
            f"cannot subscribe to {endpoint} ({zmq.strerror(error.errno or 0)}); an endpoint is like tcp://127.0.0.1:5557"
        ) from error
    finally:
        socket.close()
        context.term()


def _hashes(hashes: list[int]) -> str:
    shown = " ".join(map(_hash, hashes[:SHOWN_HASHES]))
    return shown + (f" ... {len(hashes) - SHOWN_HASHES} more" if len(hashes) > SHOWN_HASHES else "")


def _hash(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"
