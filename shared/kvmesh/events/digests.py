"""Digests of what a worker has told and not taken back, so that a reader can check what it holds without a dump.

A digest is a count and a sum of mixed hashes. Both sides keep theirs block by block: storing adds, removing subtracts,
the order does not matter. A worker answers ``["", "digest"]`` on its replay endpoint with the sequence number of the
last batch that the digests cover; a reader compares them with its own as of that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import anyio
import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from kvmesh.events.polling import readable, receive
from kvmesh.events.records import LoraKey, Tier
from kvmesh.net.address import choose_family
from kvmesh.net.curve import CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = [
    "DIGEST_REQUEST",
    "Digest",
    "DigestAnswer",
    "DigestError",
    "DigestKey",
    "DigestPoller",
    "DigestPollerStatistics",
    "answer_frames",
    "differences",
    "digest_of",
    "mix",
    "mixed_sum",
    "parse_answer",
]

DIGEST_REQUEST = b"digest"
"""Second frame of the request and of its answer; a replay request has a number of 8 bytes there."""

ANSWER_S = 1.0
"""Who has not answered by then offers no digests, or is too busy now."""

NOT_OFFERED_REST_S = 300.0
"""Until somebody who offers no digests is asked again: another publisher may have taken his place."""

_MASK = 2**64 - 1
_log = get_logger("events.digests")


class DigestError(ValueError):
    """An answer to a digest request that is none."""


class Digest(NamedTuple):
    """Of a set of blocks. Equal sets have equal digests; two that differ agree once in 2**64 times."""

    num_blocks: int = 0
    sum: int = 0
    """Sum of :func:`mix` over the blocks' unsigned 64-bit hashes on the wire, modulo 2**64."""

    def plus(self, other: Digest) -> Digest:
        """Of the union with a set that has no block in common."""
        return Digest(self.num_blocks + other.num_blocks, (self.sum + other.sum) & _MASK)

    def minus(self, other: Digest) -> Digest:
        """Of what is left without a subset."""
        return Digest(self.num_blocks - other.num_blocks, (self.sum - other.sum) & _MASK)


class DigestKey(NamedTuple):
    """Which blocks of a publisher a digest is of; every publisher is one rank of one model."""

    tier: Tier
    lora: LoraKey = None
    salt: str | None = None
    """As it stands in the events."""


class DigestAnswer(NamedTuple):
    """What a publisher says about itself."""

    sequence: int
    """Of the last batch that the digests cover, whether it was sent or dropped; 2**64 - 1 before the first."""
    digests: dict[DigestKey, Digest]
    """Those of nothing are left out."""


def mix(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), a bijection on 64 bits."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def mixed_sum(hashes: NDArray[np.uint64]) -> int:
    """Sum of :func:`mix` over ``[n]`` hashes, modulo 2**64."""
    mixed = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def digest_of(hashes: Iterable[int]) -> Digest:
    """Of a set of hashes, signed or unsigned."""
    sums = [mix(number) for number in hashes]
    return Digest(len(sums), sum(sums) & _MASK)


def answer_frames(sequence: int, digests: Mapping[DigestKey, Digest]) -> list[bytes]:
    """The frames after the client's identity: ``["", "digest", sequence, payload]``.

    The payload is msgpack ``[[tier, lora_id | nil, lora_name | nil, salt | nil, num_blocks, sum], ...]``; tiers are
    numbered 0 device, 1 host, 2 disk, and scopes without blocks are left out.
    """
    rows = []
    for (tier, lora, salt), digest in digests.items():
        if digest.num_blocks or digest.sum:
            by_name = isinstance(lora, str)
            rows.append([int(tier), None if by_name else lora, lora if by_name else None, salt, *digest])
    return [b"", DIGEST_REQUEST, sequence.to_bytes(8, "big"), msgspec.msgpack.encode(rows)]


def parse_answer(frames: list[bytes]) -> DigestAnswer | None:
    """What :func:`answer_frames` made; None for an answer to something else, such as the end of a replay.

    Raises:
        DigestError: it says that it is a digest, and is not.
    """
    if len(frames) != 4 or frames[0] or frames[1] != DIGEST_REQUEST:
        return None
    if len(frames[2]) != 8:
        raise DigestError("the sequence number does not have 8 bytes")
    digests: dict[DigestKey, Digest] = {}
    try:
        for tier, lora_id, lora_name, salt, num_blocks, total in _rows.decode(frames[3]):
            key = DigestKey(Tier(tier), lora_id if lora_name is None else lora_name, salt)
            digests[key] = digests.get(key, Digest()).plus(Digest(num_blocks, total))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DigestError(f"not a list of digests: {error}") from error
    return DigestAnswer(int.from_bytes(frames[2], "big"), digests)


def differences(told: Mapping[DigestKey, Digest], held: Mapping[DigestKey, Digest]) -> dict[DigestKey, int]:
    """Where a reader is wrong: its blocks more (or less, negative) than the publisher's; 0: as many, but others."""
    empty = Digest()
    return {
        key: held.get(key, empty).num_blocks - told.get(key, empty).num_blocks
        for key in told.keys() | held.keys()
        if told.get(key, empty) != held.get(key, empty)
    }


class DigestPollerStatistics(msgspec.Struct):
    """What one poller has been through, in requests."""

    asked_total: int = 0
    answered_total: int = 0
    unanswered_total: int = 0


class DigestPoller:
    """Asks one publisher for its digests, over and over; :meth:`run` it for as long as they are wanted.

    Args:
        context: of the socket.
        endpoint: the publisher's replay endpoint.
        deliver: takes each answer; runs on the event loop and must not block.
        on_ask: called before each request is sent.
        interval_s: seconds between two requests.
        answer_s: longest wait for an answer.
        security: keys, where the publisher asks for some.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        deliver: Callable[[DigestAnswer], None],
        *,
        on_ask: Callable[[], None] = lambda: None,
        interval_s: float = 10.0,
        answer_s: float = ANSWER_S,
        security: CurveSecurity | None = None,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._deliver = deliver
        self._on_ask = on_ask
        self._interval_s = interval_s
        self._answer_s = answer_s
        self._security = security
        self.offered: bool | None = None
        """Whether the publisher offers digests; None: not known yet."""
        self.statistics = DigestPollerStatistics()
        self._connected = False
        """Whether the last request reached a connection."""

    async def run(self) -> None:
        """Ask until cancelled."""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        # Without a connection a request fails at once instead of waiting for a publisher yet to come.
        socket.immediate = True
        try:
            if self._security is not None:
                self._security.apply_client(socket)
            choose_family(socket, self._endpoint)
            socket.connect(self._endpoint)
            while True:
                answer = await self._ask(socket)
                if answer is not None:
                    self.offered = True
                    self.statistics.answered_total += 1
                    self._deliver(answer)
                else:
                    self.statistics.unanswered_total += 1
                await anyio.sleep(NOT_OFFERED_REST_S if self.offered is False else self._interval_s)
        finally:
            socket.close()

    async def _ask(self, socket: zmq.Socket[bytes]) -> DigestAnswer | None:
        self.statistics.asked_total += 1
        while receive(socket) is not None:
            pass  # Late answers: the next one is about now.
        with anyio.move_on_after(self._answer_s) as waiting:
            self._on_ask()
            while not self._sent(socket):
                await readable(socket)
            while (frames := receive(socket)) is None:
                await readable(socket)
            try:
                answer = parse_answer(frames)
            except DigestError as error:
                _log.warning("a digest is unreadable", endpoint=self._endpoint, error=str(error))
                return None
            if answer is None and self.offered is None:
                self.offered = False
            return answer
        if waiting.cancelled_caught and self.offered is None and self._connected:
            self.offered = False
        return None

    def _sent(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether the request could be given to a connection."""
        try:
            socket.send_multipart([b"", DIGEST_REQUEST], zmq.NOBLOCK)
        except zmq.Again:
            self._connected = False
            return False
        self._connected = True
        return True


_rows: msgspec.msgpack.Decoder[list[tuple[int, int | None, str | None, str | None, int, int]]] = (
    msgspec.msgpack.Decoder(list[tuple[int, int | None, str | None, str | None, int, int]])
)
