"""What a publisher has told and not taken back, as far as it takes to tell it again.

A block that moves to another tier is told there with its tokens, which the cache does not give with a move. And a
reader that comes late or begins anew hears of everything in one batch, also of what no batch kept for replays says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

import msgspec

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
    """Some 200 bytes for a block, beside its tokens; one thread."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        """By hash, in the order of telling: a block comes after the one that it continues."""

    def __len__(self) -> int:
        return len(self._places)

    def take_in(self, events: Sequence[KvEvent]) -> list[KvEvent]:
        """Take in a batch, in order, and give it back with the tokens of blocks that are told in another medium."""
        told: list[KvEvent] = []
        for event in events:
            match event:
                case BlockStored() if not event.token_ids:
                    told += self._moved(event)
                    self._enter(event.medium, event.block_hashes)
                    continue
                case BlockStored() | KeyedBlocksStored():
                    self._store(event)
                case BlockRemoved():
                    self._leave(event.medium, event.block_hashes)
                case AllBlocksCleared():
                    self._places.clear()
            told.append(event)
        return told

    def events(self) -> Iterator[KvEvent]:
        """The state as a batch: everything is cleared, then every block is stored in every medium that it is in."""
        yield AllBlocksCleared()
        for run in _runs(self._places.values()):
            for medium in run[0].media:
                yield _told(run, medium)

    def _moved(self, event: BlockStored) -> Iterator[KvEvent]:
        places = [place for number in event.block_hashes if (place := self._places.get(number)) is not None]
        # A cache moves the ends of sequences first; readers want the beginnings first.
        order: dict[int, int] = {}
        for place in places:
            order.setdefault(id(place.event), len(order))
        places.sort(key=lambda place: (order[id(place.event)], place.at))
        for run in _runs(place._replace(media=()) for place in places):
            yield _told(run, event.medium)
        unknown = [number for number in event.block_hashes if number not in self._places]
        if unknown:
            rest = copy(event)
            rest.block_hashes = unknown
            yield rest

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


def _runs(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Consecutive blocks of one event that are in the same media."""
    run: list[_Place] = []
    for place in places:
        if run and (place.event is not run[-1].event or place.at != run[-1].at + 1 or place.media != run[-1].media):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _told(run: Sequence[_Place], medium: str | None) -> BlockStored | KeyedBlocksStored:
    """A run as if it were told for the first time."""
    event, begin, end = run[0].event, run[0].at, run[-1].at + 1
    part = copy(event)
    part.block_hashes = event.block_hashes[begin:end]
    part.parent_block_hash = event.block_hashes[begin - 1] if begin else event.parent_block_hash
    part.medium = medium
    if isinstance(event, BlockStored) and isinstance(part, BlockStored):
        tokens, size = event.token_ids, event.block_size
        if isinstance(tokens, PackedTokens):
            part.token_ids = tokens.part(begin * size, end * size)
        else:
            part.token_ids = tokens[begin * size : end * size]
        if isinstance(event.extra_keys, list):
            keys = event.extra_keys[begin:end]
            part.extra_keys = keys if any(keys) else msgspec.UNSET
    return part
