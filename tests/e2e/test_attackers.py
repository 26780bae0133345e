"""Tickets that are not good and peers that are none, against real servers: 403 and a counter, and nobody is harmed.

Every row of the table in docs/transfers.md, over HTTP and over the control connection; then what no peer would send.
"""

from __future__ import annotations

import base64
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import pytest
from meshes.by_hand import SECRET, Mesh
from meshes.process import Process, until

from kvmesh.models.store import DEFAULT_MODEL
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.transfer import ControlMessage, Hello, HelloReply, Refused, RequestData, ResultAck
from kvmesh.transceiver.tickets import Signer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OUTSIDER = "another secret"
GREETING = b"KVC1"
ANSWER_S = 20.0
ids = itertools.count(1000)


@pytest.fixture(scope="module")
def mesh(make_mesh: Callable[..., Mesh]) -> Mesh:
    return make_mesh({"context": {}, "generation": {}})


@pytest.fixture(autouse=True)
def _nobody_is_harmed(mesh: Mesh) -> Iterator[None]:
    """Whatever a test sends: the same processes serve on, and every page is back."""
    engines = {worker.name: worker.engine().pid for worker in mesh.workers()}
    yield
    body = {"model": DEFAULT_MODEL, "prompt": "Are you still there?", "max_tokens": 4}
    status, answer = mesh["router"].post("/v1/completions", body)
    assert status == 200, answer
    mesh.wait_idle()
    assert {worker.name: worker.engine().pid for worker in mesh.workers()} == engines


def refused(process: Process) -> int:
    """Its counter of tickets that were not accepted."""
    return int(process.metrics()["kvmesh_engine_transfers_refused_total"])


class Leg:
    """A hand-off of the context server."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.transfer_id = next(ids)
        body = {
            "model": DEFAULT_MODEL,
            "prompt": f"Prompt number {self.transfer_id} of somebody with bad intentions.",
            "ignore_eos": True,
            "max_tokens": 3,
            "disaggregated_params": {"request_type": "context_only", "disagg_request_id": self.transfer_id},
        }
        status, answer = mesh["context"].post("/v1/completions", body)
        assert status == 200, answer
        [choice] = answer["choices"]
        self.prompt = choice["prompt_token_ids"]
        self.params = choice["disaggregated_params"]
        self.handoff = msgspec.msgpack.decode(base64.b64decode(self.params["encoded_opaque_state"]), type=HandOff)
        self.ticket = Signer(SECRET.encode(), "ticket").open_ticket(self.handoff.ticket)

    def minted(self, secret: str = SECRET, **changes: Any) -> bytes:
        """A ticket of one's own making."""
        return Signer(secret.encode(), "ticket").sign_ticket(msgspec.structs.replace(self.ticket, **changes))

    def fetch(self, token: bytes | None = None, **params: Any) -> tuple[int, Any]:
        """The second leg, with a ticket of one's own."""
        handoff = self.handoff if token is None else msgspec.structs.replace(self.handoff, ticket=token)
        state = base64.b64encode(msgspec.msgpack.encode(handoff)).decode()
        given = {**self.params, "request_type": "generation_only", "encoded_opaque_state": state, **params}
        body = {
            "model": DEFAULT_MODEL,
            "prompt": self.prompt,
            "max_tokens": 3,
            "ignore_eos": True,
            "disaggregated_params": given,
        }
        return self.mesh["generation"].post("/v1/completions", body)

    def give_up(self) -> None:
        assert self.mesh["context"].post("/abort", {"disagg_request_id": self.transfer_id}) == (200, {"aborted": True})


HTTP_ROWS: dict[str, tuple[str, Callable[[Leg], bytes]]] = {
    "forged": ("ticket_forged", lambda leg: leg.minted(OUTSIDER)),
    "damaged": ("ticket_forged", lambda leg: leg.handoff.ticket[:-1] + bytes([leg.handoff.ticket[-1] ^ 1])),
    "none": ("ticket_forged", lambda _: b"no ticket at all"),
    "expired": ("ticket_expired", lambda leg: leg.minted(expires_unix_ms=1)),
    "of another transfer": ("ticket_mismatch", lambda leg: leg.minted(transfer_id=leg.transfer_id + 10_000)),
    "of another engine": ("ticket_mismatch", lambda leg: leg.minted(owner_instance_id="context-9")),
    "of another life": ("ticket_mismatch", lambda leg: leg.minted(owner_epoch=1)),
    "for another address": ("ticket_mismatch", lambda leg: leg.minted(control_endpoint="tcp://127.0.0.1:9")),
    "of another version": ("ticket_protocol", lambda leg: leg.minted(protocol=99)),
}


@pytest.mark.parametrize("row", HTTP_ROWS)
def test_over_http(mesh: Mesh, row: str) -> None:
    code, make = HTTP_ROWS[row]
    leg = Leg(mesh)
    status, answer = leg.fetch(make(leg))
    assert (status, answer["error"]["code"]) == (403, code), answer
    # The good one is still good.
    status, answer = leg.fetch()
    assert status == 200, answer


def test_replayed_over_http(mesh: Mesh) -> None:
    leg = Leg(mesh)
    assert leg.fetch()[0] == 200
    until(lambda: mesh["generation"].settled_stats()["running"] == 0, "the first is over")
    before = refused(mesh["context"])
    status, answer = leg.fetch()
    assert (status, answer["error"]["code"]) == (403, "ticket_replayed"), answer
    until(lambda: refused(mesh["context"]) == before + 1, "it is counted")


class Peer:
    """A control connection to the context server, by hand."""

    def __init__(self, mesh: Mesh, name: bytes = b"attacker") -> None:
        endpoint = mesh["context"].get("/server_info")["disaggregated_params"]["ctx_info_endpoint"][0]
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), ANSWER_S)
        self.identity = name + os.urandom(8)
        """The introduction is signed for it and for the owner."""
        self.owner = mesh["context"].name

    def frame(self, data: bytes) -> None:
        self.socket.sendall(struct.pack("<I", len(data)) + data)

    def greet(self) -> None:
        self.frame(GREETING + self.identity)

    def send(self, message: ControlMessage) -> None:
        self.frame(msgspec.msgpack.encode(message))

    def receive(self) -> Any:
        (length,) = struct.unpack("<I", self._exactly(4))
        return msgspec.msgpack.decode(self._exactly(length), type=ControlMessage)

    def is_hung_up(self) -> bool:
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionError:
            pass
        return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            assert piece, "hung up"
            data += piece
        return data

    def introduce(self, secret: str = SECRET) -> HelloReply:
        """Greet, learn what the owner is, and say the same of oneself."""
        self.greet()
        hello = Hello(
            instance_id="attacker", epoch=1, layout_digest="?", layout_summary="?", layout=b"", backend="BUILTIN"
        )
        self.send(self._signed(hello, secret))
        answer = self.receive()
        assert isinstance(answer, HelloReply)
        assert answer.refused
        same = msgspec.structs.replace(
            hello, layout_digest=answer.layout_digest, layout=answer.layout, backend=answer.backend
        )
        self.send(self._signed(same, secret))
        reply = self.receive()
        assert isinstance(reply, HelloReply)
        return reply

    def _signed(self, hello: Hello, secret: str) -> Hello:
        payload = msgspec.msgpack.encode(msgspec.structs.replace(hello, auth=b""))
        bond = msgspec.msgpack.encode((self.owner, self.identity))
        return msgspec.structs.replace(hello, auth=Signer(secret.encode(), "hello").mac(payload + bond))

    def ask(self, transfer_id: int, token: bytes) -> Any:
        self.send(RequestData(transfer_id=transfer_id, session=7, ticket=token, first_block=[0], dst_pages=[b""]))
        return self.receive()


@contextmanager
def peer(mesh: Mesh) -> Iterator[Peer]:
    one = Peer(mesh)
    try:
        yield one
    finally:
        one.socket.close()


CONTROL_ROWS: dict[str, tuple[str, Callable[[Leg], bytes]]] = {
    **{row: HTTP_ROWS[row] for row in ("forged", "damaged", "none", "expired", "of another version")},
    "of another transfer": ("ticket_mismatch", lambda leg: leg.minted(transfer_id=leg.transfer_id + 10_000)),
    "of another engine": ("ticket_foreign", lambda leg: leg.minted(owner_instance_id="context-9")),
    "of another life": ("ticket_stale_epoch", lambda leg: leg.minted(owner_epoch=1)),
    "of a later life": ("ticket_stale_epoch", lambda leg: leg.minted(owner_epoch=leg.ticket.owner_epoch + 1)),
}


@pytest.mark.parametrize("row", CONTROL_ROWS)
def test_over_the_control_connection(mesh: Mesh, row: str) -> None:
    """Somebody who has the cluster secret, and a ticket that is not good."""
    code, make = CONTROL_ROWS[row]
    leg = Leg(mesh)
    before = refused(mesh["context"])
    with peer(mesh) as insider:
        assert insider.introduce().refused is None
        answer = insider.ask(leg.transfer_id, make(leg))
        assert isinstance(answer, Refused), answer
        assert (answer.status, answer.code) == (403, code)
    until(lambda: refused(mesh["context"]) == before + 1, "it is counted")
    assert leg.fetch()[0] == 200, "the good one is still good"


def test_replayed_over_the_control_connection(mesh: Mesh) -> None:
    leg = Leg(mesh)
    assert leg.fetch()[0] == 200
    before = refused(mesh["context"])
    with peer(mesh) as insider:
        assert insider.introduce().refused is None
        for _ in range(3):
            answer = insider.ask(leg.transfer_id, leg.handoff.ticket)
            assert (answer.status, answer.code) == (403, "ticket_replayed")
    until(lambda: refused(mesh["context"]) == before + 3, "each is counted")


def test_without_an_introduction(mesh: Mesh) -> None:
    """Even a good ticket opens nothing to who has not said who he is, or cannot prove it."""
    leg = Leg(mesh)
    before = refused(mesh["context"])
    with peer(mesh) as stranger:
        stranger.greet()
        answer = stranger.ask(leg.transfer_id, leg.handoff.ticket)
        assert (answer.status, answer.code) == (403, "hello_required")
    with peer(mesh) as outsider:
        reply = outsider.introduce(OUTSIDER)
        assert reply.refused is not None
        assert "not signed with the cluster secret" in reply.refused
        assert reply.agent == b"", "no way to its memory"
        answer = outsider.ask(leg.transfer_id, leg.handoff.ticket)
        assert (answer.status, answer.code) == (403, "hello_required")
        # What belongs to somebody else cannot be ended either.
        outsider.send(ResultAck(transfer_id=leg.transfer_id, session=1, status="done"))
    until(lambda: refused(mesh["context"]) == before + 2, "both are counted")
    assert leg.fetch()[0] == 200, "the ticket was not spent"


def test_what_no_peer_would_send(mesh: Mesh) -> None:
    """Noise, frames that are never whole, messages without sense, and lengths that nobody can mean."""
    engine = psutil.Process(mesh["context"].engine().pid)
    rss = engine.memory_info().rss
    greeted = GREETING + b"noise"
    too_long = struct.pack("<I", 0xFFFFFFFF)
    no_greeting = [os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", too_long, struct.pack("<I", 4) + b"KVC0"]
    for noise in no_greeting:
        with peer(mesh) as one:
            one.socket.sendall(noise)
            assert one.is_hung_up()
    with peer(mesh) as one:
        one.frame(greeted)
        one.socket.sendall(too_long)
        assert one.is_hung_up(), "a frame of 4 GiB"
    with peer(mesh) as one:
        one.frame(greeted)
        for _ in range(200):
            one.frame(os.urandom(300))
        # It is not hung up on, and still answered.
        answer = one.ask(1, b"x" * 100_000)
        assert (answer.status, answer.code) == (403, "hello_required")
    halves = [Peer(mesh, b"half") for _ in range(50)]
    for one in halves:
        one.socket.sendall(struct.pack("<I", 60 << 20) + b"only the beginning")
    for one in halves:
        one.socket.close()
    state = base64.b64encode(b"\xc1" * 1000).decode()
    for params in (
        {"encoded_opaque_state": state},
        {"encoded_opaque_state": "no base64"},
        {"first_gen_tokens": [-1]},
        {"ctx_request_id": 2**63},
    ):
        leg = Leg(mesh)
        status, answer = leg.fetch(**params)
        assert status == 400, answer
        leg.give_up()
    time.sleep(0.1)
    assert engine.memory_info().rss - rss < 64 << 20, "nothing was allocated for what never came"
