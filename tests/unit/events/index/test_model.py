"""The index against a naive model of its definition, under anything that engines, losses and operators may do."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Cleared, Removed, Stored, Tier

BLOCK = 2
SOURCES = [Source("a"), Source("b"), Source("b", 1)]

Chain = tuple[int, ...]
"""One number a block, from the start of a sequence."""


class NaiveWorker:
    """What one worker holds: per tier, the engine's hash to the whole chain that ends there."""

    def __init__(self) -> None:
        self.held: dict[Tier, dict[int, Chain]] = {tier: {} for tier in Tier}
        self.orphans: list[tuple[Stored, set[int]]] = []

    def find(self, hash_: int) -> Chain | None:
        return next((held[hash_] for held in self.held.values() if hash_ in held), None)

    def store(self, record: Stored) -> None:
        parent: Chain | None = () if record.parent is None else self.find(record.parent)
        if parent is None:
            self.orphans.append((record, set()))
            return
        blocks = record.token_ids[::BLOCK].tolist()
        for depth, hash_ in enumerate(record.hashes, start=1):
            self.held[record.tier][hash_] = (*parent, *blocks[:depth])
        for hash_ in record.hashes:
            for orphan in [item for item in self.orphans if item[0].parent == hash_]:
                self.orphans.remove(orphan)
                self.store(orphan[0])
                self.remove(Removed(hashes=sorted(orphan[1]), tier=orphan[0].tier))

    def move(self, hash_: int, tier: Tier) -> None:
        if (chain := self.find(hash_)) is not None:
            self.held[tier].setdefault(hash_, chain)

    def remove(self, record: Removed) -> None:
        for hash_ in record.hashes:
            if self.held[record.tier].pop(hash_, None) is None:
                for orphan, gone in self.orphans:
                    if orphan.tier == record.tier and hash_ in orphan.hashes:
                        gone.add(hash_)

    def chains(self) -> list[set[Chain]]:
        """What is held in each tier or a warmer one."""
        return [{chain for tier in Tier if tier <= coldest for chain in self.held[tier].values()} for coldest in Tier]


class IndexMachine(RuleBasedStateMachine):
    """Random records of three sources; after each step every prompt must get the model's answer."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.naive = {source: NaiveWorker() for source in SOURCES}
        self.hidden: set[Source] = set()
        self.prompts: set[Chain] = {(0, 1, 0, 1)}
        self.last_hash = 0
        for source in SOURCES:
            self.index.add(source, model="m")

    def apply(self, source: Source, record: Any) -> None:
        self.index.apply(source, [record])

    def hashes_of(self, source: Source) -> list[int]:
        return sorted({hash_ for held in self.naive[source].held.values() for hash_ in held})

    @rule(
        source=st.sampled_from(SOURCES),
        blocks=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        parent=st.integers(0, 40),
        tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK]),
    )
    def store(self, source: Source, blocks: list[int], parent: int, tier: Tier) -> None:
        """A run at the start of a sequence, below a block that is held, or below one that is not known."""
        known = self.hashes_of(source)
        below = None
        if parent % 4:
            below = known[parent % len(known)] if known and parent % 8 < 7 else self.last_hash + 5 + parent % 3
        hashes = list(range(self.last_hash + 1, self.last_hash + 1 + len(blocks)))
        self.last_hash = hashes[-1]
        record = Stored(
            hashes=hashes,
            parent=below,
            token_ids=np.repeat(np.array(blocks, np.int32), BLOCK),
            block_size=BLOCK,
            tier=tier,
        )
        self.apply(source, record)
        self.naive[source].store(record)
        chain = self.naive[source].find(hashes[-1])
        if chain is not None:
            self.prompts.add((*chain, 1))

    @rule(
        source=st.sampled_from(SOURCES),
        picks=st.lists(st.integers(0, 100), min_size=1, max_size=6),
        tier=st.sampled_from(Tier),
    )
    def remove(self, source: Source, picks: list[int], tier: Tier) -> None:
        """Blocks from anywhere in a chain, orphans, and hashes that nobody knows."""
        known = [
            *self.hashes_of(source),
            *(h for orphan, _ in self.naive[source].orphans for h in orphan.hashes),
            10**9,
        ]
        record = Removed(hashes=[known[pick % len(known)] for pick in picks], tier=tier)
        self.apply(source, record)
        self.naive[source].remove(record)

    @rule(source=st.sampled_from(SOURCES), pick=st.integers(0, 100), tier=st.sampled_from(Tier))
    def move(self, source: Source, pick: int, tier: Tier) -> None:
        """A stored event without tokens."""
        known = [*self.hashes_of(source), 10**9]
        hash_ = known[pick % len(known)]
        empty = np.array([], np.int32)
        self.apply(source, Stored(hashes=[hash_], parent=None, token_ids=empty, block_size=BLOCK, tier=tier))
        self.naive[source].move(hash_, tier)

    @rule(source=st.sampled_from(SOURCES), pick=st.integers(0, 100))
    def store_again(self, source: Source, pick: int) -> None:
        """The same chain again under the same hashes (a replay), or under others (another life's)."""
        known = self.naive[source].held[Tier.DEVICE]
        if not known:
            return
        hash_ = sorted(known)[pick % len(known)]
        chain = known[hash_]
        if len(chain) != 1:
            return
        hashes = [hash_ if pick % 2 else self.last_hash + 1]
        self.last_hash += 1
        record = Stored(
            hashes=hashes, parent=None, token_ids=np.repeat(np.array(chain, np.int32), BLOCK), block_size=BLOCK
        )
        self.apply(source, record)
        self.naive[source].store(record)

    @rule(source=st.sampled_from(SOURCES), how=st.sampled_from(["cleared", "reset", "gone"]))
    def clear(self, source: Source, how: str) -> None:
        """An event that clears, a subscription that starts anew, a worker that leaves and comes back."""
        if how == "cleared":
            self.apply(source, Cleared())
        elif how == "reset":
            self.index.clear(source)
        else:
            self.index.remove(source)
            self.index.add(source, model="m")
            self.hidden.discard(source)
        self.naive[source] = NaiveWorker()

    @rule(source=st.sampled_from(SOURCES))
    def hide_or_show(self, source: Source) -> None:
        """The connection breaks, or stands again."""
        if source in self.hidden:
            self.index.show(source)
        else:
            self.index.hide(source)
        self.hidden ^= {source}

    @invariant()
    def answers_are_the_models(self) -> None:
        """For every prompt ever stored, with one block more."""
        chains = {source: worker.chains() for source, worker in self.naive.items()}
        for prompt in self.prompts:
            expected = {}
            for source in SOURCES:
                depths = tuple(_reach(prompt, held) * BLOCK for held in chains[source])
                if depths[-1] and source not in self.hidden:
                    expected[source] = depths
            tokens = np.repeat(np.array(prompt, np.int32), BLOCK)
            found = {Source(*match[:2]): match[2:] for match in map(_as_tuple, self.index.match(tokens, model="m"))}
            assert found == expected

    def teardown(self) -> None:
        """Nothing is left when everybody is gone."""
        for source in SOURCES:
            self.index.remove(source)
        while self.index.reclaim():
            pass
        statistics = self.index.statistics()
        assert (statistics.blocks, statistics.residencies, statistics.scopes) == (0, 0, 0)


def _reach(prompt: Chain, held: set[Chain]) -> int:
    depth = 0
    while depth < len(prompt) and prompt[: depth + 1] in held:
        depth += 1
    return depth


def _as_tuple(match: Any) -> tuple[Any, ...]:
    return match.instance_id, match.dp_rank, match.device_tokens, match.host_tokens, match.disk_tokens


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
