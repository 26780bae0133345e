"""Where ``kvmesh events`` reads: one publisher, every worker of a mesh, or an indexer's merged stream."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import anyio
import msgspec
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup
from zmq.utils.monitor import parse_monitor_message

from kvmesh.cli.errors import UserError
from kvmesh.cli.events_view import Printer, Stream, printable
from kvmesh.cli.reach import ask_coordinator
from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.net.address import choose_family
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member, MemberEvent, MemberList
from kvmesh.protocol.mesh_events import MeshOrigin
from kvmesh.protocol.ranks import rank_instance_ids

__all__ = ["follow_indexer", "follow_mesh", "follow_one"]

FIND_TIMEOUT_S = 5.0

_ENGINES = ("context", "generation", "both")

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _REFUSED

Frames = Callable[[list[bytes]], None]


async def follow_one(endpoint: str, printer: Printer, security: CurveSecurity | None) -> None:
    """Follow one publisher until the printer is done."""
    async with _until_done(printer) as tasks:
        tasks.start_soon(_follow_worker, endpoint, Stream(endpoint), printer, security)


async def follow_mesh(
    url: str,
    workers: frozenset[str],
    printer: Printer,
    headers: dict[str, str],
    tls: Tls,
    security: CurveSecurity | None,
    *,
    given: bool,
) -> None:
    """Follow the workers that a coordinator knows, or those with these names; ``given``: the user named the URL.

    Raises:
        UserError: no coordinator answers.
    """
    # Asked once by itself: the client below goes on for ever, whatever is at that address.
    async with HttpClient(timeout_s=FIND_TIMEOUT_S, headers=headers, tls=tls, follow_leader=True) as http:
        known = await ask_coordinator(http, url, "/members", MemberList, given=given)
    _tell_absent(workers, [member.instance_id for member in known.members if _publishes(member)])
    client = CoordinatorClient(url, headers=headers, tls=tls)
    async with _until_done(printer) as tasks:
        client.subscribe(_Followers(tasks, workers, printer, security).hear)
        await client.start(tasks)


async def follow_indexer(
    url: str,
    workers: frozenset[str],
    printer: Printer,
    headers: dict[str, str],
    tls: Tls,
    security: CurveSecurity | None,
) -> None:
    """Follow an indexer's merged stream.

    Raises:
        UserError: it does not answer, or has no such stream.
    """
    async with HttpClient(timeout_s=FIND_TIMEOUT_S, headers=headers, tls=tls) as http:
        try:
            found = await http.call("GET", f"{url}/stream", _MergedEndpoints)
            known = await http.call("GET", f"{url}/workers", list[_IndexedWorker])
        except (ApiError, PeerUnreachableError) as error:
            raise UserError(f"no merged stream at {url}: {error}") from error
    _tell_absent(workers, [worker.instance_id for worker in known])

    def take(frames: list[bytes]) -> None:
        sequence = int.from_bytes(frames[1], "big")
        printer.sequence("indexer", sequence)
        try:
            _ts, _events, _rank, origin = _envelope.decode(frames[2])
        except (msgspec.DecodeError, ValueError):
            printer.note("indexer", f"#{sequence} is not of a merged stream")
            return
        if not workers or origin.instance_id in workers:
            name = f"{origin.instance_id}/{origin.dp_rank}" if origin.dp_rank else origin.instance_id
            stream = Stream(name, origin.model, origin.lora, origin.salt, origin.tenant)
            printer.batch(stream, sequence, frames[2])

    async with _until_done(printer) as tasks:
        tasks.start_soon(_subscribe, "indexer", found.endpoint, printer, take, security)


class _IndexedWorker(msgspec.Struct):
    instance_id: str


class _MergedEndpoints(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


_envelope = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, int, MeshOrigin])


@asynccontextmanager
async def _until_done(printer: Printer) -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        await printer.done.wait()
        tasks.cancel_scope.cancel()


def _tell_absent(wanted: frozenset[str], known: Iterable[str]) -> None:
    """Say whose events are waited for: they may come later, and a misspelt name never does."""
    present = sorted(set(known))
    absent = sorted(wanted.difference(present))
    if not absent and present:
        return
    awaited = " and ".join(absent) or "any worker"
    publishing = ", ".join(present) or "none"
    text = f"waiting for events of {awaited}; workers that publish now: {publishing}"
    print(f"kvmesh events: {printable(text)}", file=sys.stderr, flush=True)


def _publishes(member: Member) -> bool:
    return member.role in _ENGINES and member.events_endpoint is not None


class _Followers:
    """One subscription for each rank of each live worker that publishes."""

    def __init__(
        self, tasks: TaskGroup, workers: frozenset[str], printer: Printer, security: CurveSecurity | None
    ) -> None:
        self._security = security
        self._tasks = tasks
        self._workers = workers
        self._printer = printer
        self._scopes: dict[str, anyio.CancelScope] = {}

    def hear(self, event: MemberEvent) -> None:
        """Begin or end a subscription."""
        member = event.member
        name, stream = member.instance_id, member.events_endpoint
        if stream is None or not _publishes(member) or (self._workers and name not in self._workers):
            return
        if event.kind == "joined":
            scope = self._scopes[name] = anyio.CancelScope()
            self._tasks.start_soon(self._follow, member, stream, scope)
        elif event.kind in ("left", "dead") and (ended := self._scopes.pop(name, None)) is not None:
            ended.cancel()
            self._printer.note(name, event.kind)

    async def _follow(self, member: Member, stream: str, scope: anyio.CancelScope) -> None:
        with scope:
            async with anyio.create_task_group() as tasks:
                for rank, name in enumerate(rank_instance_ids(member.instance_id, member.dp_size)):
                    tasks.start_soon(self._follow_rank, Stream(name, member.model), stream, rank)

    async def _follow_rank(self, stream: Stream, endpoint: str, rank: int) -> None:
        try:
            await _follow_worker(rank_endpoint(endpoint, rank), stream, self._printer, self._security)
        except (UserError, EndpointError) as error:
            self._printer.note(stream.name, str(error))  # the others are followed all the same


async def _follow_worker(endpoint: str, stream: Stream, printer: Printer, security: CurveSecurity | None) -> None:
    def take(frames: list[bytes]) -> None:
        sequence = int.from_bytes(frames[1], "big")
        printer.sequence(stream.name, sequence)
        printer.batch(stream, sequence, frames[2])

    await _subscribe(stream.name, endpoint, printer, take, security)


async def _subscribe(name: str, endpoint: str, printer: Printer, take: Frames, security: CurveSecurity | None) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    monitor = socket.get_monitor_socket(_MONITORED)
    socket.linger = 0
    try:
        socket.subscribe(b"")
        if security is not None:
            security.apply_client(socket)
        choose_family(socket, endpoint)
        socket.connect(endpoint)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_connection, name, endpoint, printer, monitor)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3:
                    take(frames)
    except zmq.ZMQError as error:
        raise UserError(
            f"cannot subscribe to {endpoint} ({zmq.strerror(error.errno or 0)}); an endpoint is like tcp://127.0.0.1:5557"
        ) from error
    finally:
        socket.disable_monitor()
        monitor.close()
        socket.close()
        context.term()


async def _tell_connection(name: str, endpoint: str, printer: Printer, monitor: zmq.asyncio.Socket) -> None:
    """Say how the connection stands, whenever that changes."""
    told = ""
    while True:
        event = 0  # for a while nothing at all: something else than a publisher listens there
        with anyio.move_on_after(math.inf if told else FIND_TIMEOUT_S):
            event = int(parse_monitor_message(await monitor.recv_multipart())["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            now = f"following {endpoint}"
        elif event & _REFUSED:
            now = f"{endpoint} refuses the connection, or is no event stream; check the CURVE keys of both sides"
        elif told.startswith("following"):
            now = f"{endpoint} has closed the connection; waiting for it"
        else:
            now = told or f"no publisher answers at {endpoint} yet; waiting"
        if now != told:
            printer.note(name, now)
            told = now
