"""KV transfers: tickets, the control messages between two transceivers, and the ledger's entries."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmesh.protocol.sampling import TokenLogprob
from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = [
    "FINAL_STATES",
    "Aux",
    "CancelSession",
    "Claim",
    "ControlMessage",
    "Hello",
    "HelloReply",
    "LedgerEvent",
    "Loan",
    "Refused",
    "RequestData",
    "ResultAck",
    "Run",
    "Ticket",
    "TransferList",
    "TransferRecord",
    "TransferResult",
    "TransferSide",
    "TransferState",
]

TransferState = Literal["registered", "transferring", "completed", "failed", "cancelled", "timed_out"]

FINAL_STATES: frozenset[TransferState] = frozenset({"completed", "failed", "cancelled"})
"""Last words of a side; a transfer is finished when every side has said its own."""


class Loan(msgspec.Struct, frozen=True):
    """Few pages that the holder of a ticket may read without asking first, as long as the loan stands."""

    access: bytes
    """Where the loan is, for the owner's plane; taken back before the pages are touched by anybody else."""
    pages: list[bytes]
    """Per layer group of the owner: int32 page ids on the device, one for each block; negative where none is held."""
    checksums: list[bytes] = []
    """Per layer group: uint64 for each of those blocks, 0 where none is held; empty: the owner does not sum."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to read one request's pages once, minted and signed by the page owner."""

    transfer_id: int
    owner_instance_id: str
    owner_epoch: int
    num_tokens: int
    """Tokens whose KV the pages hold (the prompt's length)."""
    prompt_digest: bytes
    """32 bytes that name those tokens and their reuse scope: the pages serve no other prompt."""
    layout_digest: str
    expires_unix_ms: int
    nonce: bytes
    control_endpoint: str = ""
    """Where the owner listens; signed, so that nobody can be made to dial elsewhere."""
    loan: Loan | None = None
    """Signed, so that nobody can be made to read other pages."""
    protocol: int = PROTOCOL_VERSION


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Generation first: the right of one receiver to one prompt that is still to be computed, signed by the receiver.

    It takes the place of a ticket, which its owner could sign only when the prompt is there.
    """

    transfer_id: int
    owner_instance_id: str
    owner_epoch: int
    receiver_instance_id: str
    receiver_epoch: int
    num_tokens: int
    prompt_digest: bytes
    """As in a :class:`Ticket`: the owner serves no other prompt."""
    expires_unix_ms: int
    """By the receiver's clock."""
    lifetime_ms: int
    """How long the owner may keep it, from when it came: measured by the owner's own clock."""
    nonce: bytes
    protocol: int = PROTOCOL_VERSION


class Aux(msgspec.Struct, frozen=True, kw_only=True):
    """Generation first: what a context server says of a finished prompt beside its pages, with the last slice."""

    first_tokens: list[int]
    """Exactly one: there is no beam search."""
    seed: int
    """The resolved sampling seed: the generation server continues the same random stream."""
    prompt_tokens: int
    cached_tokens: int = 0
    first_logprobs: list[TokenLogprob] = []
    """Of the first tokens, where they were asked for."""
    finished: bool = False
    """The first token ended the answer: no pages are sent."""


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """Receiver to sender, once per pair: who I am, what must agree, and how you can reach my memory."""

    instance_id: str
    epoch: int
    layout_digest: str
    layout_summary: str
    """What the digest covers, readable: a refusal names both values."""
    layout: bytes
    """Msgpack of the :class:`~kvmesh.cache.layout.PageLayout`: how ranks share a block, which may differ."""
    backend: str
    agent: bytes = b""
    """Backend-specific descriptor (NIXL agent metadata, pool address...)."""
    process: bytes = b""
    """Who the process is on its host, so that a peer on the same host sees it die at once."""
    auth: bytes = b""
    """HMAC-SHA256 of this message with an empty ``auth``, keyed by the cluster secret."""
    protocol: int = PROTOCOL_VERSION


class HelloReply(msgspec.Struct, tag=True, kw_only=True):
    """Sender to receiver."""

    instance_id: str
    epoch: int
    layout_digest: str
    layout_summary: str
    layout: bytes
    backend: str
    agent: bytes = b""
    process: bytes = b""
    auth: bytes = b""
    refused: str | None = None
    """A sentence when the two cannot pair, else None."""
    protocol: int = PROTOCOL_VERSION


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of a bounce region, which its engine numbers among its pools."""

    pool: int
    offset: int
    nbytes: int


class RequestData(msgspec.Struct, tag=True, kw_only=True):
    """Receiver to sender: these pages of this ticket, or of the prompt that this claim names, into these of mine."""

    transfer_id: int
    session: int
    """The receiver's session number, echoed in every answer: an answer to an older session is dropped."""
    ticket: bytes
    first_block: list[int]
    """Per layer group of the receiver: the index of the first block that is wanted; earlier blocks are held already."""
    dst_pages: list[bytes]
    """Per layer group of the receiver: int32 page ids there, one for each wanted block, in order; negative where none
    is kept."""
    claim: bytes = b""
    """Generation first, instead of a ticket: a signed :class:`Claim`; the prompt may not be computed yet."""
    bounce: Run | None = None
    """Room for all pages in one piece, reserved until the owner is quiet; None: page by page only."""


class TransferResult(msgspec.Struct, tag=True, kw_only=True):
    """Sender to receiver. Pull planes answer ``ready`` with the source pages, push planes ``done`` once written.

    ``checksums`` may follow either: the owner computes them while the receiver copies. Those of a few pages come along
    with ``ready``.
    """

    transfer_id: int
    session: int
    status: Literal["ready", "done", "checksums", "failed", "cancelled"]
    src_pages: list[bytes] = []
    """With ``ready``: per route (:mod:`kvmesh.transceiver.routes`) int32 page ids at the owner of what moves."""
    src_tiers: list[bytes] = []
    """With ``ready`` and ``done``: per route a byte for each of those pages, 0 device and 1 host; empty: device."""
    checked: bool = False
    """With ``ready`` and ``done``: the checksums are in this message, or in one that follows."""
    checksums: list[bytes] = []
    """Per part of the transfer (:mod:`kvmesh.transceiver.parts`): uint64 per piece."""
    access: bytes = b""
    """Pull planes with a data socket: what to present there."""
    bytes_moved: int = 0
    slices_ns: list[int] = []
    """With ``done``: when the slices of the move began and ended, in the owner's Unix time; the first ones."""
    message: str = ""
    bounce: Run | None = None
    """The pages come in one piece: where the receiver is to read it, or where the owner has written it."""
    slice_index: int = 0
    """Pipelined transfers: which slice of the prompt this is about, from 0."""
    slice_blocks: tuple[int, int] = (0, 0)
    """With a slice that is not the last: its blocks, first and behind the last, in layer groups without a window."""
    is_last: bool = True
    """Whether this is about the last slice, or the only one."""
    aux: Aux | None = None
    """Generation first, with the last slice."""


class ResultAck(msgspec.Struct, tag=True, kw_only=True):
    """Receiver to sender: this session reads no more (``done``, ``failed`` or ``cancelled``); pages may be released."""

    transfer_id: int
    session: int
    status: Literal["done", "failed", "cancelled"]


class CancelSession(msgspec.Struct, tag=True, kw_only=True):
    """Either side: this transfer is not wanted any more. Remembered when it arrives before its session."""

    transfer_id: int
    session: int = 0
    ticket: bytes = b""
    """Receiver to sender before the ticket was redeemed: the right to give the pages up."""
    claim: bytes = b""
    """The same, generation first."""


class Refused(msgspec.Struct, tag=True, kw_only=True):
    """Sender to receiver: the request is refused (forged, expired, foreign or replayed ticket: 403)."""

    transfer_id: int
    session: int
    status: int
    code: str
    message: str


ControlMessage = Hello | HelloReply | RequestData | TransferResult | ResultAck | CancelSession | Refused


class LedgerEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One state change of one transfer, as one side saw it."""

    transfer_id: int
    side: Literal["context", "generation"]
    instance_id: str
    epoch: int
    state: TransferState
    unix_ms: int
    peer_instance_id: str | None = None
    request_id: str = ""
    num_tokens: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    deadline_unix_ms: int | None = None
    reason: str = ""


class TransferSide(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one process last said about one transfer."""

    side: Literal["context", "generation"]
    instance_id: str
    epoch: int
    state: TransferState
    unix_ms: int
    num_tokens: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    deadline_unix_ms: int | None = None
    reason: str = ""


class TransferRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``GET /transfers/{id}``: one transfer as the ledger knows it."""

    transfer_id: int
    request_id: str
    state: TransferState
    """Of the whole: the worst of its sides, ``completed`` when every side is."""
    sides: list[TransferSide]
    started_unix_ms: int
    updated_unix_ms: int
    age_ms: int = 0
    """Since the first event, until now or until the last event of a finished transfer."""
    stuck: bool = False
    """Past its deadline and not finished."""

    def age_at(self, unix_ms: int) -> int:
        """Milliseconds from its first event until then."""
        return max(0, unix_ms - self.started_unix_ms)


class TransferList(msgspec.Struct, kw_only=True):
    """``GET /transfers?state=S&stuck=1&limit=N``: newest first; stuck ones oldest first."""

    transfers: list[TransferRecord]
    counts: dict[str, int]
    """Transfers in the ledger by state."""
    stuck: int
    evicted: int
    """Forgotten because the ledger was full."""
