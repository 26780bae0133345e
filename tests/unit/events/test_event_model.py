"""Whatever a cache may do, both event paths tell a consistent story of it (semantics §8.5, §8.6, §8.23).

A cache without pages makes random but legal calls: chains of full blocks, partial leaves, blocks that their pages do
not cover, moves between three levels, new priorities, removals of subtrees, in a full and a windowed layer group. The
index reads the stream and must hold in each tier exactly what was told. The digests of what is published are the plain
sums over it, in every tier and scope, whether its batches arrive or not. What moves is told with its tokens, and the
whole state told as one batch makes the same index.
"""

from __future__ import annotations

import numpy as np
from event_checks import CheckedEvents
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.events.decoding import decode_batch
from kvmesh.events.digests import Digest, DigestKey, digest_of
from kvmesh.events.encoding import EventEncoding, encode_batch
from kvmesh.events.index import PrefixIndex
from kvmesh.events.index.scope import Source
from kvmesh.events.live import LiveBlocks
from kvmesh.events.published import NOTHING_PUBLISHED, PublishedSet
from kvmesh.events.records import Tier
from kvmesh.events.sink import StreamSink
from kvmesh.events.target import target_group
from kvmesh.hashing import ReuseScope, v2_partial_key, v2_root
from kvmesh.protocol.events import BlockStored, EventBatch

SOURCE = Source("worker")
SIZE = 2
GROUPS = (None, 8)
LEVELS = ("gpu", "host", "disk")
SCOPES = (ReuseScope(), ReuseScope(salt=3), ReuseScope(lora_id=1))


class Block:
    def __init__(self, scope: ReuseScope, parent: Block | None, tokens: list[int]) -> None:
        self.scope = scope
        self.parent = parent
        self.tokens = tokens
        parent_key = v2_root(scope) if parent is None else parent.key
        self.key = v2_partial_key(np.array(tokens, np.int32), parent_key)
        self.groups: dict[int, tuple[int, int]] = {}
        """Level and priority in each group that holds it."""


class Cache(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[bytes, Block] = {}

    @initialize(
        algo=st.sampled_from(["v1_block_key", "v2_sha256", "v2_sha256_64"]),
        tier_moves=st.sampled_from(["publish", "device_only"]),
        cap=st.sampled_from([3, 1000]),
        encoding=st.sampled_from(["map", "array"]),
    )
    def begin(self, algo: str, tier_moves: str, cap: int, encoding: EventEncoding) -> None:
        self.encoding = encoding
        self.published = PublishedSet()
        assert self.published.answer() == (NOTHING_PUBLISHED, {})
        self.scopes: dict[int, ReuseScope] = {}
        self.sequence = 0
        self.live = LiveBlocks()
        self.index = PrefixIndex()
        self.index.add(SOURCE, model="m")
        layers = tuple(
            LayerCacheSpec(layer_index=i, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
            for i, window in enumerate(GROUPS)
        )
        layout = PageLayout.build(CacheRequirements(layers), SIZE)
        self.events = CheckedEvents(layout, algo=algo, tier_moves=tier_moves)  # type: ignore[arg-type]
        self.events.stream_sink = StreamSink(
            SIZE,
            target_group(layout.groups),
            tier_moves=tier_moves,  # type: ignore[arg-type]
            max_stored_blocks=cap,
            published=self.published,
        )
        self.events.on_created(LEVELS, [(9, 9, 9) for _ in GROUPS])

    @rule(
        scope=st.sampled_from(SCOPES),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        covered=st.sampled_from([None, None, 1]),
        level=st.sampled_from([0, 0, 1]),
        priority=st.integers(0, 2),
    )
    def store(self, scope: ReuseScope, tokens: list[int], covered: int | None, level: int, priority: int) -> None:
        parent: Block | None = None
        run: list[Block] = []
        for begin in range(0, len(tokens), SIZE):
            block = Block(scope, parent, tokens[begin : begin + SIZE])
            known = self.blocks.get(block.key)
            if known is None:
                self.blocks[block.key] = block
                self.scopes[int.from_bytes(block.key[:8], "big")] = scope
                run.append(block)
            elif run:
                raise AssertionError("what continues a new block is new")
            parent = block if known is None else known
        full = [block for block in run if len(block.tokens) == SIZE]
        for blocks in (full, run[len(full) :]):
            for group in range(len(GROUPS)):
                if blocks:
                    self.tell(group, blocks, level, priority, covered if blocks is full else None)

    def tell(self, group: int, blocks: list[Block], level: int, priority: int, covered: int | None) -> None:
        parent = blocks[0].parent
        for block in blocks:
            block.groups[group] = level, priority
        self.events.on_stored(
            group,
            StoredBlocks(
                blocks[0].scope,
                None if parent is None else parent.key,
                [block.key for block in blocks],
                np.array([block.tokens for block in blocks], np.int32),
                level,
                np.full(len(blocks), priority, np.uint8),
                covered,
            ),
        )

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove_subtree(self, data: st.DataObject) -> None:
        self.remove(data.draw(st.sampled_from(list(self.blocks.values()))))

    def remove(self, block: Block) -> None:
        for child in [child for child in self.blocks.values() if child.parent is block]:
            self.remove(child)
        for group, (level, _) in block.groups.items():
            self.events.on_removed(group, [block.key], level)
        del self.blocks[block.key]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def leave_the_window(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.blocks.values())))
        if 1 in block.groups:
            level, _ = block.groups.pop(1)
            self.events.on_removed(1, [block.key], level)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), group=st.integers(0, len(GROUPS) - 1), new=st.integers(0, 2))
    def move(self, data: st.DataObject, group: int, new: int) -> None:
        old = data.draw(st.integers(0, 2))
        moved = [block for block in self.blocks.values() if block.groups.get(group, (new,))[0] == old != new]
        if moved:
            for block in moved:
                block.groups[group] = new, block.groups[group][1]
            self.events.on_moved(group, [block.key for block in moved], old, new)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), group=st.integers(0, len(GROUPS) - 1), new=st.integers(0, 2))
    def reprice(self, data: st.DataObject, group: int, new: int) -> None:
        block = data.draw(st.sampled_from(list(self.blocks.values())))
        level, old = block.groups.get(group, (0, new))
        if old != new:
            block.groups[group] = level, new
            self.events.on_priority(group, [block.key], old, new)

    @rule()
    def step(self) -> None:
        events = self.events.step()
        self.published.commit(self.sequence)
        assert self.published.answer() == (self.sequence, self.plain_sums())
        self.sequence += 1
        told = self.live.take_in(events)
        assert all(event.token_ids for event in told if isinstance(event, BlockStored)), "moves have tokens, too"
        batch = decode_batch(encode_batch(EventBatch(0.0, told, 0), self.encoding))
        assert not batch.rejected
        self.index.apply(SOURCE, batch.records)
        assert len(self.live) == len(self.events.stream.media)
        if self.sequence % 4 == 0:
            self.check_latecomer()

    def check_latecomer(self) -> None:
        state = decode_batch(encode_batch(EventBatch(0.0, list(self.live.events()), 0), self.encoding))
        latecomer = PrefixIndex()
        latecomer.add(SOURCE, model="m")
        latecomer.apply(SOURCE, state.records)
        assert set(latecomer.dump(SOURCE)) == set(self.index.dump(SOURCE))
        assert not latecomer.statistics().orphan_blocks_total
        held: dict[Tier, int] = dict.fromkeys(Tier, 0)
        for block in self.index.dump(SOURCE):
            held[block.tier] += 1
        told = [medium for media in self.events.stream.media.values() for medium in media]
        assert held == {tier: told.count(medium) for tier, medium in zip(Tier, ("GPU", "CPU", "DISK"), strict=True)}
        assert not self.index.statistics().orphan_blocks_total
        assert not self.index.statistics().unknown_moves_total

    def plain_sums(self) -> dict[DigestKey, Digest]:
        told: dict[DigestKey, list[int]] = {}
        for number, media in self.events.stream.media.items():
            scope = self.scopes[number]
            salt = None if scope.salt is None else str(scope.salt)
            for medium in media:
                tier = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "DISK": Tier.DISK}[str(medium)]
                told.setdefault(DigestKey(tier, scope.lora_id, salt), []).append(number)
        return {key: digest_of(numbers) for key, numbers in told.items()}

    def teardown(self) -> None:
        if hasattr(self, "events"):
            for block in list(self.blocks.values()):
                if block.parent is None:
                    self.remove(block)
            self.step()
            assert self.published.answer().digests == {}
            self.events.finish()


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
