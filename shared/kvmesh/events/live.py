"""What a publisher has told and not taken back, as far as it takes to tell it again.

A block that moves to another tier is told there with its tokens, which the cache does not give with a move. And a
reader that comes late or begins anew hears of everything in one batch, also of what no batch kept for replays says.

Blocks are kept in the runs that they were told in. A run of which less than half is left is copied out, so that a block
that stays does not keep the tokens of the whole sequence that it began.
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


class _Run:
    """Consecutive blocks with their tokens: an event as it was told, or what is left of it."""

    __slots__ = ("event", "first", "live", "origin")

    def __init__(self, event: BlockStored | KeyedBlocksStored, origin: int, first: int) -> None:
        self.event = event
        self.origin = origin
        """Number of the event as it was told."""
        self.first = first
        """Position of the first block in that."""
        self.live = 0
        """Blocks that are in a place here."""

    @property
    def sparse(self) -> bool:
        """Whether most of what it keeps is of no use any more."""
        return 2 * self.live < len(self.event.block_hashes)


class _Place(NamedTuple):
    """Where a block was told, and where it is."""

    run: _Run
    at: int
    """Its position among the run's blocks."""
    media: _Media


class LiveBlocks:
    """For a block some 200 bytes beside its tokens, up to 1000 where those around it are gone; one thread."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        """By hash, in the order of telling: a block comes after the one that it continues."""
        self._told = 0

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
        for stretch in _stretches(self._places.values()):
            for medium in stretch[0].media:
                yield _told(stretch, medium)

    def _moved(self, event: BlockStored) -> Iterator[KvEvent]:
        places = [place for number in event.block_hashes if (place := self._places.get(number)) is not None]
        # A cache moves the ends of sequences first; readers want the beginnings first.
        order: dict[int, int] = {}
        for place in places:
            order.setdefault(place.run.origin, len(order))
        places.sort(key=lambda place: (order[place.run.origin], place.run.first + place.at))
        for stretch in _stretches(place._replace(media=()) for place in places):
            yield _told(stretch, event.medium)
        unknown = [number for number in event.block_hashes if number not in self._places]
        if unknown:
            rest = copy(event)
            rest.block_hashes = unknown
            yield rest

    def _store(self, event: BlockStored | KeyedBlocksStored) -> None:
        places, medium = self._places, event.medium
        run = _Run(_owned(event), self._told, 0)
        self._told += 1
        for at, number in enumerate(event.block_hashes):
            known = places.get(number)
            if known is None:
                places[number] = _Place(run, at, (medium,))
                run.live += 1
            elif medium not in known.media:
                places[number] = known._replace(media=(*known.media, medium))
        if run.live and run.sparse:
            self._copy_out(run)

    def _enter(self, medium: str | None, hashes: Sequence[int]) -> None:
        for number in hashes:
            known = self._places.get(number)
            if known is not None and medium not in known.media:
                self._places[number] = known._replace(media=(*known.media, medium))

    def _leave(self, medium: str | None, hashes: Sequence[int]) -> None:
        shrunk: set[_Run] = set()
        for number in hashes:
            known = self._places.get(number)
            if known is None or medium not in known.media:
                continue
            media = tuple(one for one in known.media if one != medium)
            if media:
                self._places[number] = known._replace(media=media)
            else:
                del self._places[number]
                known.run.live -= 1
                shrunk.add(known.run)
        for run in shrunk:
            if run.live and run.sparse:
                self._copy_out(run)

    def _copy_out(self, run: _Run) -> None:
        """Give what is left of a run runs of its own; the time of it is that of the removals that made it sparse."""
        known = (self._places.get(number) for number in run.event.block_hashes)
        left = [place for at, place in enumerate(known) if place is not None and place[:2] == (run, at)]
        for stretch in _stretches(place._replace(media=()) for place in left):
            begin, part = stretch[0].at, _part(stretch, own=True)
            own = _Run(part, run.origin, run.first + begin)
            own.live = len(stretch)
            for at, number in enumerate(part.block_hashes):
                self._places[number] = _Place(own, at, self._places[number].media)


def _stretches(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Consecutive blocks of one run that are in the same media."""
    stretch: list[_Place] = []
    for place in places:
        if stretch and (
            place.run is not stretch[-1].run or place.at != stretch[-1].at + 1 or place.media != stretch[-1].media
        ):
            yield stretch
            stretch = []
        stretch.append(place)
    if stretch:
        yield stretch


def _told(stretch: Sequence[_Place], medium: str | None) -> BlockStored | KeyedBlocksStored:
    """A stretch as if it were told for the first time."""
    part = _part(stretch)
    part.medium = medium
    return part


def _part(stretch: Sequence[_Place], *, own: bool = False) -> BlockStored | KeyedBlocksStored:
    """An event of these blocks alone.

    Args:
        stretch: consecutive places of one run.
        own: it keeps nothing of the whole event alive.
    """
    event, begin, end = stretch[0].run.event, stretch[0].at, stretch[-1].at + 1
    part = copy(event)
    part.block_hashes = event.block_hashes[begin:end]
    part.parent_block_hash = event.block_hashes[begin - 1] if begin else event.parent_block_hash
    if isinstance(event, BlockStored) and isinstance(part, BlockStored):
        tokens, size = event.token_ids, event.block_size
        if isinstance(tokens, PackedTokens):
            part.token_ids = tokens.part(begin * size, end * size)
            if own:
                part.token_ids = part.token_ids.owned()
        else:
            part.token_ids = tokens[begin * size : end * size]
        if isinstance(event.extra_keys, list):
            keys = event.extra_keys[begin:end]
            part.extra_keys = keys if any(keys) else msgspec.UNSET
    return part


def _owned(event: BlockStored | KeyedBlocksStored) -> BlockStored | KeyedBlocksStored:
    """The event, or a copy where its tokens are a small part of an array that they would keep alive."""
    if isinstance(event, BlockStored) and isinstance(event.token_ids, PackedTokens):
        tokens = event.token_ids.owned()
        if tokens is not event.token_ids:
            event = copy(event)
            event.token_ids = tokens
    return event
