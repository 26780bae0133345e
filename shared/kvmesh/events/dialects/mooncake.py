"""Events as maps with ``event_type``: Mooncake's master and others that follow its proposal for a common format.

They may carry the older names, too (``type``, ``block_hashes``), and tell model and tenant with every event: one stream
may be of several. The master knows objects, not tokens; events without tokens are about blocks that others have told.

Hashes are of tokens alone, equal for everybody who has the same prompt: here each has what the event says of model,
tenant, adapter and salt mixed in (:mod:`kvmesh.events.owners`), so that one owner's block is not taken for another's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmesh.events.dialects import normalise
from kvmesh.events.dialects.base import DecodedEvent
from kvmesh.events.dialects.identity import BlockContent
from kvmesh.events.dialects.normalise import WireHash
from kvmesh.events.dialects.tokens import read_tokens
from kvmesh.events.owners import mark_of
from kvmesh.events.records import Cleared, EventRecord, Owner

__all__ = ["NAME", "decode", "is_mooncake"]

NAME = "mooncake"

_KEY = b"\xaaevent_type"
"""The key as msgpack."""

_NIL = msgspec.Raw(b"\xc0")


class _Event(msgspec.Struct, kw_only=True, gc=False):
    event_type: Literal["stored", "removed", "cleared"]
    seq_hashes: list[WireHash] | None = None
    block_hashes: list[WireHash] | None = None
    parent_hash: WireHash | None = None
    parent_block_hash: WireHash | None = None
    token_ids: msgspec.Raw = _NIL
    block_size: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    additional_salt: str | None = None
    tenant_id: str | None = None
    model_name: str | None = None
    locality: str | None = None

    @property
    def hashes(self) -> list[WireHash]:
        return [self.own(hash_) for hash_ in self.seq_hashes or self.block_hashes or []]

    @property
    def parent(self) -> WireHash | None:
        parent = self.parent_block_hash if self.parent_hash is None else self.parent_hash
        return parent if parent is None or normalise.block_hashes([parent])[0] == 0 else self.own(parent)

    def own(self, hash_: WireHash) -> int:
        """A hash that no block of another model, tenant, adapter or salt has."""
        (value,) = normalise.block_hashes([hash_])
        return value ^ mark_of(self.owner)

    @property
    def owner(self) -> Owner:
        return Owner(self.model_name, self.tenant_id, self.lora_name, self.additional_salt)


_decoder = msgspec.msgpack.Decoder(_Event)


def is_mooncake(event: memoryview) -> bool:
    """Whether a map has the key that tells this dialect, or tokens that look the same."""
    return _KEY in bytes(event)


def decode(event: memoryview) -> DecodedEvent:
    """One event.

    Raises:
        RejectedError: it cannot be used.
        msgspec.DecodeError: it is not in this dialect after all.
    """
    return DecodedEvent(NAME, _record(_decoder.decode(event)))


def _record(raw: _Event) -> EventRecord:
    if raw.event_type == "cleared":
        return Cleared()
    if raw.event_type == "removed":
        removed = normalise.removed(hashes=raw.hashes, medium=raw.medium, group=None, locality=raw.locality)
        return msgspec.structs.replace(removed, owner=raw.owner)
    tokens = read_tokens(raw.token_ids)
    stored = normalise.stored(
        hashes=raw.hashes,
        parent=raw.parent,
        tokens=tokens,
        # Without tokens it does not matter, and is often not known.
        block_size=raw.block_size or (0 if len(tokens.ids) else 1),
        medium=raw.medium,
        lora_id=None,
        lora_name=raw.lora_name or None,
        salt=raw.additional_salt or None,
        content=BlockContent(),
        locality=raw.locality,
        tenant=raw.tenant_id or None,
        model=raw.model_name or None,
    )
    return msgspec.structs.replace(stored, owner=raw.owner)
