"""Random sequences of calls against a naive cache: what the events say is reusable, as whole prefixes, without pages.

Every computed token writes a fingerprint of its whole prefix into its place in the page. After every step the page
accounting must be exact, every reusable block on either level, open sequence and lease must still hold its own
fingerprints, and a new sequence must find exactly what the naive cache says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from v1_cache import WORDS_PER_TOKEN, SmallCache, fingerprint

from kvmesh.cache.stats import GroupPages
from kvmesh.cache.storage.memory import HostPool
from kvmesh.cache.v1.block import HOST, Block, BlockState
from kvmesh.cache.v1.lease import BlockLease
from kvmesh.cache.v1.sequence import V1Sequence
from kvmesh.hashing import ReuseScope, as_token_ids
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

BLOCK = 4

SCOPES = st.sampled_from([ReuseScope(), ReuseScope(salt=1), ReuseScope(lora_id=1)])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
RETENTIONS = st.none() | st.builds(
    lambda start, length, priority, duration_ms, decode: RetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetention(
                token_start=start, token_end=start + length, priority=priority, duration_ms=duration_ms
            ),
        ),
        decode_retention_priority=decode,
    ),
    st.integers(0, 8),
    st.integers(1, 12),
    st.sampled_from([0, 29, 30, 35, 80]),
    st.none() | st.integers(0, 3000),
    st.sampled_from([0, 35, 70]),
)


@dataclass(eq=False)
class Running:
    """A sequence under test and what it should contain."""

    cache: V1Sequence
    prompt: list[int]
    computed: list[int]
    reuse: bool
    stopped: bool = False


@dataclass(eq=False)
class Held:
    lease: BlockLease
    scope: ReuseScope
    tokens: list[int]


class V1Machine(RuleBasedStateMachine):
    running: Bundle[Running] = Bundle("running")
    leases: Bundle[Held] = Bundle("leases")

    @initialize(
        pages=st.integers(3, 20),
        host=st.sampled_from([0, 1, 4, 12]),
        windows=st.sampled_from([(None,), (None, 8), (8,), (5, None, 12)]),
        partial=st.booleans(),
        copy=st.booleans(),
    )
    def build(self, pages: int, host: int, windows: tuple[int | None, ...], partial: bool, copy: bool) -> None:
        self.small = SmallCache(
            pages, host=host, windows=windows, enable_partial_reuse=partial, copy_on_partial_reuse=copy
        )
        self.manager = self.small.manager
        self.partial, self.copy = partial, copy
        self.open: list[Running] = []
        self.held: list[Held] = []
        self.damaged: list[Block] = []
        self.now_s = 0.0

    # What the naive cache says.

    def expected(self, scope: ReuseScope, prompt: list[int]) -> int:
        """The longest prefix whose last block and whose blocks inside each window are stored, by trying each length."""
        groups = range(len(self.small.layout.groups))
        covered = [self.covered(group, scope, prompt) for group in groups]
        return next(
            length
            for length in range(len(prompt) - 1, -1, -1)
            if all(self.serves(*covered[group], self.small.layout.groups[group].window, length) for group in groups)
        )

    def covered(self, group: int, scope: ReuseScope, prompt: list[int]) -> tuple[list[bool], list[int]]:
        """Which blocks of ``prompt`` are stored whole, and how much of each a stored block begins with."""
        count = len(prompt) // BLOCK + 1
        whole, part = [False] * count, [0] * count
        nodes = {node.key: node for node in self.manager.index.trees[group].nodes()}
        keys = self.manager.block_keys(scope, as_token_ids(prompt))
        for key, (stored_scope, stored) in self.small.sink.prefixes[group].items():
            block = (len(stored) - 1) // BLOCK
            begin = block * BLOCK
            if stored_scope != scope or block >= count or list(stored[:begin]) != prompt[:begin]:
                continue
            common = [a == b for a, b in zip([*stored[begin:], -1], [*prompt[begin:], -2], strict=False)].index(False)
            whole[block] |= common == BLOCK
            node = nodes[key]
            assert node.block is not None
            free = self.copy or not (node.block.users or node.children)
            # A node that matches whole is the only one that is looked at, even when it is a hole.
            if self.partial and free and (common == BLOCK or block >= len(keys) or keys[block] not in nodes):
                part[block] = max(part[block], common)
        return whole, part

    @staticmethod
    def serves(whole: list[bool], part: list[int], window: int | None, length: int) -> bool:
        full, rest = divmod(length, BLOCK)
        blocks = full + (rest > 0)
        first = 0 if window is None else min(max(0, (length + 1 - window) // BLOCK), blocks - 1)
        return length == 0 or (all(whole[max(first, 0) : full]) and (rest == 0 or part[full] >= rest))

    # What happens to the cache.

    @rule(
        target=running,
        scope=SCOPES,
        prompt=TOKENS,
        parent=st.none() | running,
        retention=RETENTIONS,
        reuse=st.sampled_from([True, True, True, False]),
    )
    def create(
        self, scope: ReuseScope, prompt: list[int], parent: Running | None, retention: RetentionConfig, reuse: bool
    ) -> Running:
        if parent is not None:
            scope, prompt = parent.cache.scope, parent.computed + prompt
        tokens = as_token_ids(prompt)
        before = self.manager.stats()
        expected = self.manager.match(scope, tokens).num_tokens
        assert self.manager.stats() == before
        assert expected == self.expected(scope, prompt)
        keys = self.manager.block_keys(scope, tokens)
        cache = self.manager.create(scope, tokens, "r", block_keys=keys, retention=retention, reuse=reuse)
        expected = expected if reuse else 0
        assert cache.num_cached_tokens == cache.committed == cache.history == expected
        running = Running(cache, prompt, prompt[:expected], reuse)
        self.open.append(running)
        return running

    @rule(running=running)
    def resume(self, running: Running) -> None:
        if running in self.open and not running.cache.active:
            before = self.manager.stats().pools
            if running.cache.resume():
                self.check(running)
            elif not running.cache.lost:
                assert self.manager.stats().pools == before
            else:
                assert self.damaged

    @rule(
        target=running,
        scope=SCOPES,
        prompt=TOKENS,
        parent=st.none() | running,
        retention=RETENTIONS,
        chunk=st.integers(1, 14),
    )
    def prefill(
        self, scope: ReuseScope, prompt: list[int], parent: Running | None, retention: RetentionConfig, chunk: int
    ) -> Running:
        running = self.create(scope, prompt, parent, retention, True)
        self.resume(running)
        for _ in range(0, len(running.prompt), chunk):
            self.compute(running, min(chunk, len(running.prompt) - len(running.computed)) or 1, 1, True, False)
        return running

    @rule(scope=SCOPES, prompt=TOKENS, parent=st.none() | running, retention=RETENTIONS, chunk=st.integers(4, 14))
    def serve(
        self, scope: ReuseScope, prompt: list[int], parent: Running | None, retention: RetentionConfig, chunk: int
    ) -> None:
        self.finish(self.prefill(scope, prompt, parent, retention, chunk))

    @rule(
        running=running, count=st.integers(1, 9), generated=st.integers(0, 1), commit=st.booleans(), ahead=st.booleans()
    )
    def compute(self, running: Running, count: int, generated: int, commit: bool, ahead: bool) -> None:
        """A step; ``ahead``: the history is raised before the commit, as for a prompt that is received."""
        cache = running.cache
        if not cache.active or running.stopped:
            return
        done = cache.committed
        tokens = [running.prompt[i] if i < len(running.prompt) else generated for i in range(done, done + count)]
        before = self.manager.stats().pools
        capacity = max(done + count, cache.history)
        history = done + count if ahead and commit else None
        if not cache.resize(capacity, None if history is None else max(history, cache.history)):
            assert self.manager.stats().pools == before
            return
        self.small.write(cache, tokens, running.computed)
        if commit and not any(held.lease.quarantined for held in self.held):
            cache.commit(as_token_ids(tokens))
            running.computed = running.computed + tokens
        assert cache.committed == len(running.computed)

    @rule(running=running)
    def shrink(self, running: Running) -> None:
        if running.cache.active:
            assert running.cache.resize(running.cache.history)

    @rule(running=running)
    def stop(self, running: Running) -> None:
        if running in self.open and not running.stopped:
            running.cache.stop_committing()
            running.stopped = True

    @rule(running=running)
    def close(self, running: Running) -> None:
        self.finish(running)

    @rule(target=leases, running=running)
    def hold(self, running: Running) -> Held | None:
        # A history ahead of the commits has passed blocks that this check would look at.
        if not running.cache.active or running.cache.history != running.cache.committed:
            return None
        held = Held(running.cache.hold(running.cache.committed), running.cache.scope, running.computed)
        self.held.append(held)
        return held

    @rule(held=leases)
    def quarantine(self, held: Held | None) -> None:
        if held is not None and not held.lease.released:
            held.lease.quarantine()

    @rule(held=leases)
    def release(self, held: Held | None) -> None:
        if held is not None and not held.lease.released:
            held.lease.release()
            self.held.remove(held)

    @rule(passed_s=st.floats(0, 2))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.small.clock._now_s = self.now_s
        self.manager.tick(self.now_s)

    @precondition(lambda self: self.small.manager.index.num_offered and self.manager.usage.num_levels > 1)
    @rule(pick=st.integers(0, 50))
    def damage(self, pick: int) -> None:
        cold = [block for block in self.offered() if block.level == HOST and block not in self.damaged]
        if cold:
            block = cold[pick % len(cold)]
            self.small.memory.damage(self.small.layout.groups[block.group].pool, block.slot)
            self.damaged.append(block)

    @precondition(lambda self: not self.open)
    @rule()
    def clear(self) -> None:
        self.manager.clear_reusable_blocks()
        assert not any(self.small.sink.prefixes)

    # What must hold always.

    @invariant()
    def accounting_is_exact(self) -> None:
        self.manager.check_integrity()
        stats = self.manager.stats()
        used = stats.held + stats.locked + stats.pinned + stats.quarantined
        assert stats.free + stats.evictable + used == stats.total
        assert stats.open_sequences == len(self.open)
        sink = self.small.sink
        for group, tree in enumerate(self.manager.index.trees):
            offered = {node.key: node.block for node in tree.nodes() if node.block is not None}
            assert sink.levels[group] == {key: block.level for key, block in offered.items()}
            assert sink.priorities[group] == {key: block.priority for key, block in offered.items()}
        assert stats.cached_blocks == max(len(prefixes) for prefixes in sink.prefixes)
        assert [(level.level, pages) for level in self.manager.level_stats() for pages in level.groups] == self.walked()

    def walked(self) -> list[tuple[int, GroupPages]]:
        """What the levels' statistics should say, by looking at every block."""
        blocks = {node.block for tree in self.manager.index.trees for node in tree.nodes() if node.block is not None}
        blocks.update(block for running in self.open for block in running.cache.used())
        blocks.update(block for held in self.held for block in held.lease.pinned())
        found = Counter((block.level, block.group, block.state) for block in blocks)
        return [
            (
                level,
                GroupPages(
                    group.group_id,
                    group.window,
                    locked=found[level, group.group_id, BlockState.LOCKED],
                    pinned=sum(
                        found[level, group.group_id, state] for state in (BlockState.PINNED, BlockState.QUARANTINED)
                    ),
                    held=found[level, group.group_id, BlockState.HELD],
                    evictable=found[level, group.group_id, BlockState.EVICTABLE],
                ),
            )
            for level in range(len(self.manager.tiers))
            for group in self.small.layout.groups
        ]

    @invariant()
    def content_is_intact(self) -> None:
        for group, tree in enumerate(self.manager.index.trees):
            for node in tree.nodes():
                if node.block is not None and node.block not in self.damaged:
                    scope, prefix = self.small.sink.prefixes[group][node.key]
                    begin = (len(prefix) - 1) // BLOCK * BLOCK
                    words = self.words(node.block)
                    for position in range(begin, len(prefix)):
                        assert words[position % BLOCK] == fingerprint(scope, prefix[: position + 1], group)
        for running in self.open:
            if running.cache.active:
                self.check(running)
        for held in self.held:
            slots = [held.lease.page_ids(group) for group in range(len(self.small.layout.groups))]
            self.small.check_slots(slots, held.scope, held.tokens)

    def words(self, block: Block) -> np.ndarray:
        if block.level != HOST:
            return self.small.words(block.group)[block.slot]
        host = self.small.memory._cold[0][self.small.layout.groups[block.group].pool]
        assert isinstance(host, HostPool)
        page = host.array.reshape(-1, host.page_bytes)[block.slot]
        return page.view(np.int64)[: BLOCK * WORDS_PER_TOKEN : WORDS_PER_TOKEN]

    def offered(self) -> list[Block]:
        return [node.block for tree in self.manager.index.trees for node in tree.nodes() if node.block is not None]

    def check(self, running: Running) -> None:
        # The windows of a sequence are those of its history, which may be ahead of what was written.
        if running.cache.history == running.cache.committed:
            self.small.check(running.cache, running.computed)

    def finish(self, running: Running) -> None:
        if running in self.open:
            running.cache.close()
            running.cache.close()
            self.open.remove(running)

    def teardown(self) -> None:
        if not hasattr(self, "small"):
            return
        for held in self.held:
            held.lease.release()
        for running in list(self.open):
            self.finish(running)
        self.small.finish()


V1Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestV1Model = V1Machine.TestCase
