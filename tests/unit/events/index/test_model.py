"""The index against a naive model of its definition, under anything that engines, losses and operators may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.events.digests import Digest, digest_of
from kvmesh.events.index import PrefixIndex, Scope, Source
from kvmesh.events.records import Cleared, EventRecord, LoraKey, Removed, Stored, Tier
from kvmesh.net.clock import ManualClock

SOURCES = [Source("a"), Source("b"), Source("b", 1)]
BLOCK_SIZES = {SOURCES[0]: 2, SOURCES[1]: 2, SOURCES[2]: 3}
LORAS = [None, "x"]
PREDICTED_S = 10.0

Chain = tuple[int, ...]
"""One number a block, from the start of a sequence."""


class Place(NamedTuple):
    """A block: the scope's adapter, and the chain that ends with it."""

    lora: LoraKey
    chain: Chain


class NaiveWorker:
    """What one worker holds: per tier, the engine's hash to the place that ends there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: dict[Tier, dict[int, Place]] = {tier: {} for tier in Tier}
        self.predicted: dict[Place, float] = {}
        self.orphans: list[tuple[Stored, set[int]]] = []
        self.doubtful: set[int] = set()
        """Hashes that stood for one block and then for another: nobody knows which of them is meant."""

    def find(self, hash_: int) -> Place | None:
        places = {held[hash_] for held in self.held.values() if hash_ in held}
        return places.pop() if len(places) == 1 and hash_ not in self.doubtful else None

    def apply(self, record: EventRecord) -> None:
        if isinstance(record, Removed):
            self.remove(record)
        elif isinstance(record, Stored) and len(record.token_ids):
            self.store(record)
        elif isinstance(record, Stored):
            for hash_ in record.hashes:
                if (place := self.find(hash_)) is not None:
                    self.held[record.tier].setdefault(hash_, place)
                    self.really_there(record.tier, place)

    def store(self, record: Stored) -> None:
        parent = Place(record.lora, ()) if record.parent is None else self.find(record.parent)
        if parent is None:
            self.orphans.append((record, set()))
            return
        if record.lora not in (None, parent.lora):
            return  # it names another adapter than its parent
        blocks = record.token_ids[:: self.block_size].tolist()
        for depth, hash_ in enumerate(record.hashes, start=1):
            place = Place(parent.lora, (*parent.chain, *blocks[:depth]))
            if self.held[record.tier].setdefault(hash_, place) != place:
                self.doubtful.add(hash_)
                self.held[record.tier][hash_] = place
            self.really_there(record.tier, place)
        for hash_ in record.hashes:
            if self.find(hash_) is None:
                continue
            for orphan in [item for item in self.orphans if item[0].parent == hash_]:
                self.orphans.remove(orphan)
                self.store(orphan[0])
                self.remove(Removed(hashes=sorted(orphan[1]), tier=orphan[0].tier))

    def really_there(self, tier: Tier, place: Place) -> None:
        if tier == Tier.DEVICE:
            self.predicted.pop(place, None)

    def remove(self, record: Removed) -> None:
        for hash_ in record.hashes:
            if self.held[record.tier].pop(hash_, None) is None:
                for orphan, gone in self.orphans:
                    if orphan.tier == record.tier and hash_ in orphan.hashes:
                        gone.add(hash_)

    def predict(self, lora: str | None, chain: Chain, until_s: float) -> None:
        real = set(self.held[Tier.DEVICE].values())
        for depth in range(1, len(chain) + 1):
            place = Place(lora, chain[:depth])
            if place not in real:
                self.predicted[place] = max(until_s, self.predicted.get(place, 0.0))

    def places(self, now_s: float) -> list[set[Place]]:
        """What is held in each tier or a warmer one."""
        expected = {place for place, until_s in self.predicted.items() if until_s > now_s}
        return [
            {place for tier in Tier if tier <= coldest for place in self.held[tier].values()} | expected
            for coldest in Tier
        ]

    def digests(self) -> dict[tuple[Tier, LoraKey], Digest]:
        """Of what was told and not taken back, by tier and adapter."""
        told: dict[tuple[Tier, LoraKey], set[int]] = {}
        for tier, held in self.held.items():
            for hash_, place in held.items():
                told.setdefault((tier, place.lora), set()).add(hash_)
        for orphan, gone in self.orphans:
            waiting = set(orphan.hashes) - gone - self.held[orphan.tier].keys()
            if waiting:
                told.setdefault((orphan.tier, orphan.lora), set()).update(waiting)
        return {key: digest_of(hashes) for key, hashes in told.items()}


class IndexMachine(RuleBasedStateMachine):
    """Random records of three sources; after each step every prompt must get the model's answer."""

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.index = PrefixIndex(clock=self.clock)
        self.naive = {source: NaiveWorker(BLOCK_SIZES[source]) for source in SOURCES}
        self.hidden: set[Source] = set()
        self.prompts: set[Chain] = {(0, 1, 0, 1)}
        self.last_hash = 0
        self.held_back: list[tuple[Source, EventRecord]] = []
        for source in SOURCES:
            self.index.add(source, model="m")

    def apply(self, source: Source, record: EventRecord) -> None:
        self.index.apply(source, [record])
        self.naive[source].apply(record)

    def hashes_of(self, source: Source) -> list[int]:
        return sorted({hash_ for held in self.naive[source].held.values() for hash_ in held})

    def stored(self, source: Source, hashes: list[int], blocks: Iterable[int], **fields: Any) -> Stored:
        size = BLOCK_SIZES[source]
        return Stored(hashes=hashes, token_ids=np.repeat(np.array(blocks, np.int32), size), block_size=size, **fields)

    @rule(
        source=st.sampled_from(SOURCES),
        blocks=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        parent=st.integers(0, 40),
        tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK]),
        lora=st.sampled_from(LORAS),
        late=st.booleans(),
    )
    def store(
        self, source: Source, blocks: list[int], parent: int, tier: Tier, lora: str | None, *, late: bool
    ) -> None:
        """A run at the start of a sequence, below a block that is held, or below one that is not known."""
        known = self.hashes_of(source)
        below = None
        if parent % 4:
            below = known[parent % len(known)] if known and parent % 8 < 7 else self.last_hash + 5 + parent % 3
        hashes = list(range(self.last_hash + 1, self.last_hash + 1 + len(blocks)))
        self.last_hash = hashes[-1]
        record = self.stored(source, hashes, blocks, parent=below, tier=tier, lora=lora)
        if late:
            self.held_back.append((source, record))
            return
        self.apply(source, record)
        place = self.naive[source].find(hashes[-1])
        if place is not None:
            self.prompts.add((*place.chain, 1))

    @precondition(lambda self: self.held_back)
    @rule(pick=st.integers(0, 100), how=st.sampled_from(["late", "twice", "lost"]))
    def deliver_late(self, pick: int, how: str) -> None:
        """A record that was overtaken by others, comes twice, or never."""
        source, record = self.held_back.pop(pick % len(self.held_back))
        for _ in range({"late": 1, "twice": 2, "lost": 0}[how]):
            self.apply(source, record)

    @rule(
        source=st.sampled_from(SOURCES),
        picks=st.lists(st.integers(0, 100), min_size=1, max_size=6),
        tier=st.sampled_from(Tier),
    )
    def remove(self, source: Source, picks: list[int], tier: Tier) -> None:
        """Blocks from anywhere in a chain, orphans, and hashes that nobody knows."""
        orphans = [hash_ for orphan, _ in self.naive[source].orphans for hash_ in orphan.hashes]
        known = [*self.hashes_of(source), *orphans, 10**9]
        self.apply(source, Removed(hashes=[known[pick % len(known)] for pick in picks], tier=tier))

    @rule(source=st.sampled_from(SOURCES), pick=st.integers(0, 100), tier=st.sampled_from(Tier))
    def move(self, source: Source, pick: int, tier: Tier) -> None:
        """A stored event without tokens."""
        known = [*self.hashes_of(source), 10**9]
        self.apply(source, self.stored(source, [known[pick % len(known)]], [], parent=None, tier=tier))

    @rule(source=st.sampled_from(SOURCES), pick=st.integers(0, 100))
    def store_again(self, source: Source, pick: int) -> None:
        """The same block again under the same hash (a replay), or under another one (another life's)."""
        known = {hash_: place for hash_, place in self.naive[source].held[Tier.DEVICE].items() if len(place.chain) == 1}
        if not known:
            return
        hash_ = sorted(known)[pick % len(known)]
        hashes = [hash_ if pick % 2 else self.last_hash + 1]
        self.last_hash += 1
        self.apply(source, self.stored(source, hashes, known[hash_].chain, parent=None, lora=known[hash_].lora))

    @rule(source=st.sampled_from(SOURCES), pick=st.integers(0, 100), block=st.integers(0, 1))
    def give_a_hash_to_other_tokens(self, source: Source, pick: int, block: int) -> None:
        """A hash that stands for a block anywhere now begins a sequence."""
        known = self.hashes_of(source)
        if known:
            self.apply(source, self.stored(source, [known[pick % len(known)]], [block], parent=None))

    @rule(
        source=st.sampled_from(SOURCES),
        chain=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        lora=st.sampled_from(LORAS),
        ttl_s=st.sampled_from([1.0, PREDICTED_S]),
    )
    def predict(self, source: Source, chain: list[int], lora: str | None, ttl_s: float) -> None:
        """A request was sent there."""
        size = BLOCK_SIZES[source]
        tokens = np.repeat(np.array(chain, np.int32), size)
        self.index.predict(source, tokens, model="m", lora=lora, block_size=size, ttl_s=ttl_s)
        worker, now_s = self.naive[source], self.clock.monotonic_s()
        worker.predicted = {place: until_s for place, until_s in worker.predicted.items() if until_s > now_s}
        worker.predict(lora, tuple(chain), now_s + ttl_s)
        self.prompts.add(tuple(chain))

    @rule(seconds=st.sampled_from([0.5, 1.0, PREDICTED_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)

    @rule(source=st.sampled_from(SOURCES), how=st.sampled_from(["cleared", "reset", "gone"]))
    def clear(self, source: Source, how: str) -> None:
        """An event that clears, a subscription that starts anew, a worker that leaves and comes back."""
        if how == "cleared":
            self.index.apply(source, [Cleared()])
        elif how == "reset":
            self.index.clear(source)
        else:
            self.index.remove(source)
            self.index.add(source, model="m")
            self.hidden.discard(source)
        self.naive[source] = NaiveWorker(BLOCK_SIZES[source])
        self.held_back = [(other, record) for other, record in self.held_back if other != source]

    @rule(source=st.sampled_from(SOURCES))
    def hide_or_show(self, source: Source) -> None:
        """The connection breaks, or stands again."""
        if source in self.hidden:
            self.index.show(source)
        else:
            self.index.hide(source)
        self.hidden ^= {source}

    @rule()
    def restart(self) -> None:
        """The index is stopped, and begins again with its snapshot."""
        chunks = list(self.index.snapshot({SOURCES[0]: b"7"}))
        self.index = PrefixIndex(clock=self.clock)
        marks: dict[Source, bytes] = {}
        self.index.restore(chunks, marks)
        assert marks == {SOURCES[0]: b"7"}

    @invariant()
    def answers_are_the_models(self) -> None:
        """For every prompt ever stored, with one block more: a plain walk from block to block."""
        now_s = self.clock.monotonic_s()
        places = {source: worker.places(now_s) for source, worker in self.naive.items()}
        for prompt in self.prompts:
            for lora in LORAS:
                for size in set(BLOCK_SIZES.values()):
                    expected = {}
                    for source in SOURCES:
                        depths = tuple(_reach(lora, prompt, held) * size for held in places[source])
                        if depths[-1] and source not in self.hidden and BLOCK_SIZES[source] == size:
                            expected[source] = depths
                    tokens = np.repeat(np.array(prompt, np.int32), size)
                    matches = self.index.match(tokens, model="m", lora=lora, block_size=size)
                    found = {Source(*match[:2]): match[2:] for match in map(_as_tuple, matches)}
                    assert found == expected

    @invariant()
    def digests_are_the_models(self) -> None:
        """Whatever the order of events, a digest is that of the set."""
        for source, worker in self.naive.items():
            digests = self.index.digests(source)
            assert digests is not None
            expected = {(tier, Scope("m", lora=lora)): digest for (tier, lora), digest in worker.digests().items()}
            assert digests == expected

    def teardown(self) -> None:
        """Nothing is left when everybody is gone."""
        for source in SOURCES:
            self.index.remove(source)
        while self.index.reclaim():
            pass
        statistics = self.index.statistics()
        assert (statistics.blocks, statistics.residencies, statistics.scopes) == (0, 0, 0)
        assert (statistics.predicted_blocks, statistics.parked_runs) == (0, 0)


def _reach(lora: str | None, prompt: Chain, held: set[Place]) -> int:
    depth = 0
    while depth < len(prompt) and Place(lora, prompt[: depth + 1]) in held:
        depth += 1
    return depth


def _as_tuple(match: Any) -> tuple[Any, ...]:
    return match.instance_id, match.dp_rank, match.device_tokens, match.host_tokens, match.disk_tokens


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
