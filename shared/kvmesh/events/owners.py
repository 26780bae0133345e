"""Whose block a hash is, where hashes are of tokens alone and one stream tells of several models, tenants and salts.

Each owner has a mark that is mixed into the hashes, so that one's block is not taken for another's. A removal need not
name everything that its block was stored with; it then takes the block from everyone that it may mean. An index that
claims less than there is costs a prefill that was not needed; one that claims more is wrong for ever.

An event without tokens moves blocks that others have told, perhaps the engine in its own dialect: those have no mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import msgspec

from kvmesh.events.records import Cleared, EventRecord, Owner, RecordBatch, Removed, Stored

__all__ = ["MAX_OWNERS", "MAX_REMOVED", "Owners", "mark_of"]

MAX_OWNERS = 1024
"""Remembered of one publisher, the latest."""

MAX_REMOVED = 1 << 20
"""Hashes that one removal may become."""

MAX_NAME_CHARS = 1024
"""Of an owner's names together, to be remembered."""

_DIALECT = "mooncake"
_SPELT_OUT = ("model", "tenant")
_NOBODY = Owner("", "", "", "")


def mark_of(owner: Owner) -> int:
    """64 bits that differ between owners; 0 where nothing is named."""
    return (_short_mark if _chars(owner) <= MAX_NAME_CHARS else _mark)(owner)


def _mark(owner: Owner) -> int:
    named = tuple(part or "" for part in owner)
    if not any(named):
        return 0
    return int.from_bytes(blake2b(msgspec.msgpack.encode(named), digest_size=8).digest(), "little")


_short_mark = lru_cache(4 * MAX_OWNERS)(_mark)


def _chars(owner: Owner) -> int:
    return sum(len(part or "") for part in owner)


class Owners:
    """Who has blocks at one publisher, as its events say.

    Args:
        own: of blocks that name nobody.
        unsure: it may have told of others before, whose blocks are held.
    """

    def __init__(self, own: Owner = _NOBODY, *, unsure: bool = False) -> None:
        self._own = own
        self._unsure = unsure
        self._nobody = unsure
        """Whether blocks without an owner may be held; another dialect's have none."""
        self._known: dict[Owner, None] = {}

    def clear(self) -> None:
        """Nothing is held any more."""
        self._unsure = self._nobody = False
        self._known.clear()

    def resolve(self, batch: RecordBatch) -> RecordBatch:
        """The batch with removals that take back what they may mean; what they cannot be resolved to is everything."""
        if _DIALECT not in batch.dialects:
            self._nobody = self._nobody or bool(batch.dialects)
            return batch
        self._nobody = self._nobody or len(batch.dialects) > 1
        records: list[EventRecord] = []
        for record in batch.records:
            match record:
                case Stored(owner=owner) if owner is not None:
                    records.append(self._stored(record, owner))
                    continue
                case Removed(owner=owner) if owner is not None:
                    records.append(self._removal(record, owner))
                    continue
                case Cleared():
                    self.clear()
            records.append(record)
        return msgspec.structs.replace(batch, records=records)

    def _stored(self, record: Stored, owner: Owner) -> Stored:
        named = Owner(*(name or "" for name in owner))
        if len(record.token_ids):
            self._note(named)
            return record
        marked = named in self._known or self._unsure or not self._nobody
        if marked or any(name not in ("", of) for name, of in zip(named, self._own, strict=True)):
            return record
        mark = mark_of(named)
        return msgspec.structs.replace(record, hashes=[number ^ mark for number in record.hashes])

    def _note(self, owner: Owner) -> None:
        if owner == _NOBODY:
            self._nobody = True
            return
        if _chars(owner) > MAX_NAME_CHARS:
            self._unsure = True
            return
        self._known.pop(owner, None)
        self._known[owner] = None
        if len(self._known) > MAX_OWNERS:
            del self._known[next(iter(self._known))]
            self._unsure = True

    def _removal(self, record: Removed, owner: Owner) -> EventRecord:
        named = mark_of(owner)
        changes = dict.fromkeys(named ^ mark_of(one) for one in self._meant(owner))
        changes[0] = None
        if (self._unsure and None in owner) or len(changes) * len(record.hashes) > MAX_REMOVED:
            self.clear()
            return Cleared()
        hashes = [number ^ change for change in changes for number in record.hashes]
        return Removed(hashes=list(dict.fromkeys(hashes)), tier=record.tier, group=record.group)

    def _meant(self, owner: Owner) -> Iterator[Owner]:
        if self._nobody:
            yield _NOBODY
        for known in self._known:
            if all(
                # A model or tenant that is not named is the publisher's own, which a removal may spell out.
                name in (None, of) or (field in _SPELT_OUT and not of)
                for field, name, of in zip(Owner._fields, owner, known, strict=True)
            ):
                yield known
