"""Random sequences of calls against a naive cache: a dictionary of token prefixes, without pages.

Every computed token writes a fingerprint of its whole prefix into its place in the page. After every step the page
accounting must be exact, every reusable block, open sequence and lease must still hold its own fingerprints, and a new
sequence must find exactly what the naive cache says.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.lease import PageLease
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache, SequenceState
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.hashing import ReuseScope, as_token_ids

BLOCK = 4
WORDS_PER_TOKEN = 4
"""A token has 8 float32 values in K: four 64-bit words; the fingerprint goes into the first."""

SCOPES = st.sampled_from([ReuseScope(), ReuseScope(salt=1), ReuseScope(lora_id=1)])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)

Prefix = tuple[ReuseScope, tuple[int, ...]]


def fingerprint(scope: ReuseScope, prefix: Seq[int], group: int) -> int:
    return zlib.crc32(repr((scope, list(prefix), group)).encode()) + 1


@dataclass
class NaiveCache:
    """What is reusable, as whole prefixes; told by the cache's events."""

    prefixes: dict[bytes, Prefix] = field(default_factory=dict)

    def on_created(self, tiers: Seq[str], num_pages: Seq[Seq[int]]) -> None:
        assert tiers[0] == "gpu"

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        if group:
            return
        parent: tuple[int, ...] = ()
        if blocks.parent_key is not None:
            assert self.prefixes[blocks.parent_key][0] == blocks.scope
            parent = self.prefixes[blocks.parent_key][1]
        for key, tokens in zip(blocks.keys, blocks.token_ids.tolist(), strict=True):
            assert key not in self.prefixes
            assert len(parent) % BLOCK == 0
            parent = (*parent, *tokens)
            self.prefixes[key] = (blocks.scope, parent)

    def on_removed(self, group: int, keys: Seq[bytes], level: int) -> None:
        if group:
            return
        for key in keys:
            scope, prefix = self.prefixes.pop(key)
            assert not any(s == scope and p[: len(prefix)] == prefix for s, p in self.prefixes.values() if p != prefix)

    def on_moved(self, group: int, keys: Seq[bytes], old_level: int, new_level: int) -> None:
        assert old_level != new_level
        if not group:
            assert self.prefixes.keys() >= set(keys)

    def on_priority(self, group: int, keys: Seq[bytes], old: int, new: int) -> None:
        raise AssertionError("nothing changes a priority")

    def match(self, scope: ReuseScope, tokens: list[int], *, partial: bool) -> int:
        """Longest common prefix with anything reusable, at most all but one token."""
        best = 0
        for stored_scope, stored in self.prefixes.values():
            if stored_scope == scope:
                common = 0
                while common < min(len(stored), len(tokens) - 1) and stored[common] == tokens[common]:
                    common += 1
                best = max(best, common if partial else common // BLOCK * BLOCK)
        return best


@dataclass(eq=False)
class Running:
    """A sequence under test and what it should contain."""

    cache: KvCache
    prompt: list[int]
    computed: list[int]
    resumed: bool = False
    stopped: bool = False


@dataclass(eq=False)
class Held:
    lease: PageLease
    scope: ReuseScope
    tokens: list[int]


class CacheMachine(RuleBasedStateMachine):
    running: Bundle[Running] = Bundle("running")
    leases: Bundle[Held] = Bundle("leases")

    @initialize(
        pages=st.integers(3, 24),
        windows=st.sampled_from([(None,), (None, 64), (None, 64, None)]),
        host=st.sampled_from([0, 0, 2, 8]),
        disk=st.sampled_from([0, 0, 3]),
        partial=st.booleans(),
        policy=st.sampled_from(["all_reusable", "per_request"]),
        util=st.sampled_from([1.0, 0.8]),
    )
    def build(
        self, pages: int, windows: tuple[int | None, ...], partial: bool, policy: str, util: float, host: int, disk: int
    ) -> None:
        layers = tuple(
            LayerCacheSpec(layer_index=i, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
            for i, window in enumerate(windows)
        )
        layout = PageLayout.build(CacheRequirements(layers), BLOCK)
        colder = {tier: count for tier, count in (("host", host), ("disk", disk)) if count}
        counts = [[count * len(pool.groups) for pool in layout.pools] for count in (pages, *colder.values())]
        self.directory = tempfile.TemporaryDirectory()
        self.naive = NaiveCache()
        self.policy = policy
        self.partial = partial
        self.device = CpuDevice(1 << 22)
        self.manager = KvCacheManager(
            layout,
            Storage(layout, counts, ("gpu", *colder), self.device, disk_path=Path(self.directory.name)),
            counts,
            CacheSettings(enable_partial_reuse=partial, policy=policy, max_util_for_resume=util),
            self.naive,
        )
        self.open: list[Running] = []
        self.held: list[Held] = []

    def words(self, group: int) -> np.ndarray:
        """int64 ``[slots, tokens of a block]``: the place of each fingerprint."""
        layout = self.manager.layout
        pool = layout.groups[group].pool
        slots = self.manager.pools[pool].array.view(np.int64).reshape(-1, layout.pools[pool].page_bytes // 8)
        return slots[:, : BLOCK * WORDS_PER_TOKEN : WORDS_PER_TOKEN]

    def quarantined(self) -> bool:
        return any(held.lease.quarantined for held in self.held)

    def write(self, running: Running, tokens: list[int]) -> None:
        """What a forward pass does: put the KV of ``tokens`` behind the committed ones."""
        done = running.cache.committed
        for group in range(len(self.manager.layout.groups)):
            words, slots = self.words(group), running.cache.page_ids(group)
            for position in range(done, done + len(tokens)):
                prefix = running.computed + tokens[: position - done + 1]
                words[slots[position // BLOCK], position % BLOCK] = fingerprint(running.cache.scope, prefix, group)

    def check_content(self, slots: list[np.ndarray], scope: ReuseScope, tokens: Seq[int], first: int = 0) -> None:
        for group, group_slots in enumerate(slots):
            words = self.words(group)
            for position in range(first, len(tokens)):
                found = words[group_slots[(position - first) // BLOCK], position % BLOCK]
                assert found == fingerprint(scope, tokens[: position + 1], group)

    @rule(target=running, scope=SCOPES, prompt=TOKENS, parent=st.none() | running)
    def create(self, scope: ReuseScope, prompt: list[int], parent: Running | None) -> Running:
        if parent is not None:
            scope, prompt = parent.cache.scope, parent.computed + prompt
        tokens = as_token_ids(prompt)
        expected = self.naive.match(scope, prompt, partial=self.partial)
        before = self.manager.stats()
        assert self.manager.match(scope, tokens).num_tokens == expected
        assert self.manager.stats() == before
        cache = self.manager.create(scope, tokens, "r")
        assert cache.num_cached_tokens == cache.committed == expected
        running = Running(cache, prompt, prompt[:expected])
        self.open.append(running)
        return running

    @rule(running=running)
    def resume(self, running: Running) -> None:
        if running.cache.state is SequenceState.SUSPENDED:
            before = self.manager.stats()
            if running.cache.resume():
                running.resumed = True
            elif not self.manager.can_suspend:
                assert self.manager.stats() == before

    @rule(target=running, scope=SCOPES, prompt=TOKENS, parent=st.none() | running, chunk=st.integers(1, 14))
    def prefill(self, scope: ReuseScope, prompt: list[int], parent: Running | None, chunk: int) -> Running:
        running = self.create(scope, prompt, parent)
        self.resume(running)
        for _ in range(0, len(running.prompt), chunk):
            self.compute(running, min(chunk, len(running.prompt) - len(running.computed)) or 1, 1, True)
        return running

    @rule(scope=SCOPES, prompt=TOKENS, parent=st.none() | running, chunk=st.integers(4, 14))
    def serve(self, scope: ReuseScope, prompt: list[int], parent: Running | None, chunk: int) -> None:
        self.finish(self.prefill(scope, prompt, parent, chunk))

    @rule(running=running, count=st.integers(1, 9), generated=st.integers(0, 1), commit=st.booleans())
    def compute(self, running: Running, count: int, generated: int, commit: bool) -> None:
        cache = running.cache
        if cache.state is not SequenceState.ACTIVE or running.stopped:
            return
        done = cache.committed
        tokens = [running.prompt[i] if i < len(running.prompt) else generated for i in range(done, done + count)]
        before = self.manager.stats()
        if not cache.resize(max(done + count, cache.history)):
            assert self.manager.stats() == before or self.manager.can_suspend
            return
        self.write(running, tokens)
        if commit and not self.quarantined():
            cache.commit(as_token_ids(tokens))
            running.computed = running.computed + tokens
        assert cache.committed == len(running.computed)

    @rule(running=running)
    def shrink(self, running: Running) -> None:
        if running.cache.state is SequenceState.ACTIVE:
            assert running.cache.resize(running.cache.history)

    @rule(running=running)
    def stop(self, running: Running) -> None:
        if running.cache.state is SequenceState.CLOSED or running.stopped:
            return
        running.cache.stop_committing()
        running.stopped = True
        whole_prompt = len(running.computed) >= len(running.prompt)
        # A partially matched block that was never copied may have gone from the tree.
        if running.resumed and (self.policy == "all_reusable" or whole_prompt) and not self.quarantined():
            stored = {prefix for scope, prefix in self.naive.prefixes.values() if scope == running.cache.scope}
            for length in range(1, len(running.computed) + 1):
                assert any(prefix[:length] == tuple(running.computed[:length]) for prefix in stored)

    @rule(running=running, again=st.booleans())
    def suspend(self, running: Running, again: bool) -> None:
        if running.cache.state is SequenceState.ACTIVE:
            running.cache.suspend()
            if again:
                self.resume(running)

    @rule(running=running)
    def close(self, running: Running) -> None:
        self.finish(running)

    @rule(target=leases, running=running)
    def hold(self, running: Running) -> Held | None:
        if running.cache.state is not SequenceState.ACTIVE:
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

    @precondition(lambda self: not self.open)
    @rule()
    def clear(self) -> None:
        self.manager.clear_reusable_blocks()
        assert not self.naive.prefixes

    @invariant()
    def accounting_is_exact(self) -> None:
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert sum(stats[1:7]) == stats.total
        assert stats.cached_blocks == len(self.naive.prefixes) == len(self.manager.store.tree.nodes())
        assert stats.open_sequences == len(self.open)

    @invariant()
    def content_is_intact(self) -> None:
        store = self.manager.store
        for key, (scope, prefix) in self.naive.prefixes.items():
            node = store.tree.find(key)
            assert node is not None
            pages = [store.tree.pages(group)[[node]] for group in range(store.num_groups)]
            if any(table.level[page] != 0 for table, page in zip(store.group_tables, pages, strict=True)):
                continue
            slots = [table.slots(page) for table, page in zip(store.group_tables, pages, strict=True)]
            self.check_content(slots, scope, prefix, (len(prefix) - 1) // BLOCK * BLOCK)
        groups = range(len(self.manager.layout.groups))
        for running in self.open:
            if running.cache.state is SequenceState.ACTIVE:
                slots = [running.cache.page_ids(group) for group in groups]
                self.check_content(slots, running.cache.scope, running.computed)
        for held in self.held:
            self.check_content([held.lease.page_ids(group) for group in groups], held.scope, held.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for held in self.held:
            held.lease.release()
        for running in list(self.open):
            self.finish(running)
        self.manager.close()
        self.manager.check_integrity()
        assert self.manager.stats().free == self.manager.stats().total
        assert not self.naive.prefixes, "every stored key is removed"
        assert self.device.free_bytes == 1 << 22
        assert not list(Path(self.directory.name).iterdir())
        self.directory.cleanup()

    def finish(self, running: Running) -> None:
        cache = running.cache
        if cache.state is SequenceState.CLOSED:
            return
        self.stop(running)
        cache.close()
        cache.close()
        self.open.remove(running)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheModel = CacheMachine.TestCase
