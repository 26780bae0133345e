"""What a publisher's forgotten batches still say: the blocks that they stored and nothing since has removed.

A publisher keeps its last batches for replays. A batch that leaves this buffer is taken in here, so that the state as
of that batch can be told as one batch, and a reader who comes late, or starts anew, still hears of everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmesh.events.encoding import PackedTokens
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KeyedBlocksStored, KvEvent

__all__ = ["LiveBlocks"]

_Media = tuple[str | None, ...]


class _Place(NamedTuple):
    """Where a block was told, and where it is."""

    event: BlockStored | KeyedBlocksStored
    at: int
    """Its position among the event's blocks."""
    media: _Media


class LiveBlocks:
    """Some 200 bytes for a block beside the tokens of the event that told it; one thread."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        """By hash, in the order of telling: a block comes after the one that it continues."""

    def __len__(self) -> int:
        return len(self._places)

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Take in a batch, in order."""
        for event in events:
            match event:
                case BlockStored() if not event.token_ids:
                    self._enter(event.medium, event.block_hashes)
                case BlockStored() | KeyedBlocksStored():
                    self._store(event)
                case BlockRemoved():
                    self._leave(event.medium, event.block_hashes)
                case AllBlocksCleared():
                    self._places.clear()

    def events(self) -> Iterator[KvEvent]:
        """The state as a batch: everything is cleared, then every block is stored in every medium that it is in."""
        yield AllBlocksCleared()
        run: list[_Place] = []
        for place in self._places.values():
            if run and (place.event is not run[-1].event or place.at != run[-1].at + 1 or place.media != run[-1].media):
                yield from _told(run)
                run = []
            run.append(place)
        if run:
            yield from _told(run)

    def _store(self, event: BlockStored | KeyedBlocksStored) -> None:
        places, medium = self._places, event.medium
        for at, number in enumerate(event.block_hashes):
            known = places.get(number)
            if known is None:
                places[number] = _Place(event, at, (medium,))
            elif medium not in known.media:
                places[number] = known._replace(media=(*known.media, medium))

    def _enter(self, medium: str | None, hashes: Sequence[int]) -> None:
        for number in hashes:
            known = self._places.get(number)
            if known is not None and medium not in known.media:
                self._places[number] = known._replace(media=(*known.media, medium))

    def _leave(self, medium: str | None, hashes: Sequence[int]) -> None:
        for number in hashes:
            known = self._places.get(number)
            if known is None or medium not in known.media:
                continue
            media = tuple(one for one in known.media if one != medium)
            if media:
                self._places[number] = known._replace(media=media)
            else:
                del self._places[number]


def _told(run: Sequence[_Place]) -> Iterator[KvEvent]:
    """Consecutive blocks of one event that are in the same media."""
    event, begin, end = run[0].event, run[0].at, run[-1].at + 1
    hashes = event.block_hashes[begin:end]
    parent = event.block_hashes[begin - 1] if begin else event.parent_block_hash
    first, *others = run[0].media
    if isinstance(event, KeyedBlocksStored):
        yield KeyedBlocksStored(
            key_id=event.key_id,
            block_hashes=hashes,
            parent_block_hash=parent,
            block_size=event.block_size,
            medium=first,
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        )
    else:
        yield _stored(event, hashes, parent, first, begin, end)
    for medium in others:
        yield BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=None,
            token_ids=[],
            block_size=event.block_size,
            medium=medium,
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        )


def _stored(
    event: BlockStored,
    hashes: list[int],
    parent: int | None,
    medium: str | None,
    begin: int,
    end: int,
) -> BlockStored:
    tokens, size = event.token_ids, event.block_size
    told = BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens.part(begin * size, end * size)
        if isinstance(tokens, PackedTokens)
        else tokens[begin * size : end * size],
        block_size=size,
        lora_id=event.lora_id,
        medium=medium,
        lora_name=event.lora_name,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
    )
    if isinstance(event.extra_keys, list) and any(event.extra_keys[begin:end]):
        told.extra_keys = event.extra_keys[begin:end]
    return told
