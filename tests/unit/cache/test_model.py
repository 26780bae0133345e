"""Random sequences of calls against a reference cache without pages (semantics §3.4-§3.9, §1.3).

A forward pass writes a fingerprint of its whole prefix for every token, and reads what it attends to. After every step
the page accounting must be exact, every reusable block on the device, open sequence and lease must still hold its own
fingerprints, and a prompt must match what the reference finds by brute force. Cold pages are checked when they come
back: tiers are damaged and fail, and whatever that costs, it is never wrong content.

``make soak-cache`` runs many more steps (``KVMESH_SOAK``: how many times as many examples).
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from forward_pass import ForwardPass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference_cache import ReferenceCache, is_stale

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.lease import PageLease
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE
from kvmesh.cache.rebalance import RebalanceTuner
from kvmesh.cache.sequence import KvCache, SequenceState
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.config import KvPoolRebalanceConfig
from kvmesh.hashing import ReuseScope, as_token_ids
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

BLOCK = 4
BUDGET = 1 << 22

SOAK = int(os.environ.get("KVMESH_SOAK", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 * SOAK)]

SCOPES = (ReuseScope(), ReuseScope(salt=1), ReuseScope(lora_id=1))
LAYOUTS: tuple[tuple[tuple[int | None, int], ...], ...] = (
    # Window and heads of each layer; groups with other numbers of heads are in other pools.
    ((None, 1),),
    ((None, 1), (None, 1)),
    ((5, 1),),
    ((8, 1), (8, 1), (8, 1)),
    ((None, 1), (3, 1)),
    ((None, 2), (8, 1), (8, 1)),
    ((None, 1), (5, 2), (None, 1), (5, 2)),
    ((3, 1), (8, 1), (None, 2)),
    ((8, 2), (3, 1)),
)
RETENTIONS = (
    None,
    None,
    RetentionConfig(token_range_retention_configs=(TokenRangeRetention(token_start=0, priority=20),)),
    RetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetention(token_start=0, token_end=5, priority=90, duration_ms=2000),
            TokenRangeRetention(token_start=0, priority=60, duration_ms=500),
        ),
        decode_retention_priority=10,
        decode_duration_ms=1000,
    ),
    RetentionConfig(
        token_range_retention_configs=(TokenRangeRetention(token_start=4, priority=0),), decode_retention_priority=100
    ),
)
MOST_OPEN = 6
MOST_TOKENS = 48

NUMBER = st.integers(0, 7)
TAIL = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@dataclass(eq=False)
class Running:
    """A sequence under test and what it should contain."""

    cache: KvCache
    prompt: list[int]
    computed: list[int]
    """Tokens whose KV was written; the first ones are committed."""
    stores: bool
    prompt_length: int
    """Of the prompt's tokens, those that are not generated ones."""
    resumed: bool = False
    stopped: bool = False
    tainted: bool = False
    """A peer may write into its pages: it is only there to be closed."""

    @property
    def active(self) -> bool:
        return self.cache.state is SequenceState.ACTIVE

    @property
    def usable(self) -> bool:
        return self.active and not self.stopped and not self.tainted


@dataclass(eq=False)
class Held:
    """A lease and what its pages should hold."""

    lease: PageLease
    running: Running
    tokens: list[int]


@dataclass
class Damage:
    """What was done to the disk."""

    spoiled: bool = False
    """What is read may not be what was written."""
    failed: bool = False
    """Writes fail."""


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        layers=st.sampled_from(LAYOUTS),
        pages=st.integers(3, 14),
        tiers=st.sampled_from([(), ("host",), ("disk",), ("host", "disk")]),
        cold=st.integers(1, 8),
        partial=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["all_reusable", "all_reusable", "per_request", "per_conversation"]),
        util=st.sampled_from([1.0, 0.8]),
        threshold=st.sampled_from([30, 0, 36]),
        scratch=st.booleans(),
        special=st.sampled_from(["", "", "branch", "rewind", "no reuse"]),
        rebalance=st.sampled_from([True, True, False]),
        harmful=st.sampled_from([True, False, False]),
    )
    def build(
        self,
        layers: tuple[tuple[int | None, int], ...],
        pages: int,
        tiers: tuple[str, ...],
        cold: int,
        partial: bool,
        policy: str,
        util: float,
        threshold: int,
        scratch: bool,
        special: str,
        rebalance: bool,
        harmful: bool,
    ) -> None:
        specs = tuple(
            LayerCacheSpec(layer_index=i, num_kv_heads=heads, head_dim=4, dtype="float32", window=window)
            for i, (window, heads) in enumerate(layers)
        )
        self.layout = layout = PageLayout.build(CacheRequirements(specs), BLOCK)
        blocks = [pages, *(cold + 2 * pages * index for index in range(len(tiers)))]
        levels = [[count * len(pool.groups) for pool in layout.pools] for count in blocks]
        self.level_bytes = [self.bytes_of(counts) for counts in levels]
        self.directory = tempfile.TemporaryDirectory()
        self.fds = len(list(Path("/proc/self/fd").iterdir()))
        self.partial, self.policy = partial, policy
        self.util = util
        self.scratch_on = scratch
        self.reuse = special != "no reuse"
        self.damage = Damage()
        self.harmful = harmful and "disk" in tiers
        self.now_s = 0.0
        self.open: list[Running] = []
        self.held: list[Held] = []
        self.past: list[tuple[ReuseScope, list[int]]] = []
        self.offered: set[tuple[ReuseScope, tuple[int, ...]]] = set()
        """Prefixes that must be reusable as long as nothing was evicted."""
        self.device = CpuDevice(BUDGET)
        self.reference = ReferenceCache(layout, partial=partial, threshold=threshold, needed=self.is_needed)
        tuner = max_pages = reserve = None
        if rebalance and len(layout.pools) > 1:
            config = KvPoolRebalanceConfig(
                min_sampled_kv_caches=1,
                cooldown_secs=0,
                target_ratio_update_interval=1,
                ratio_threshold=1.01,
                moving_average_decay=0.5,
            )
            floors = [[len(pool.groups) for pool in layout.pools] for _ in levels]
            tuner = RebalanceTuner(config, layout, now_s=0.0, level_bytes=self.level_bytes, floors=floors)
            reserve = [self.level_bytes[0] // pool.page_bytes for pool in layout.pools]
            max_pages = [sum(size // pool.page_bytes for size in self.level_bytes) for pool in layout.pools]
        self.storage = Storage(
            layout,
            levels,
            ("gpu", *tiers),
            self.device,
            disk_path=Path(self.directory.name),
            device_reserve=reserve,
        )
        self.manager = KvCacheManager(
            layout,
            self.storage,
            levels,
            CacheSettings(
                enable_block_reuse=self.reuse,
                enable_partial_reuse=partial,
                policy=policy,  # type: ignore[arg-type]
                max_util_for_resume=util,
                enable_swa_scratch_reuse=scratch,
                cold_tier_offload_min_priority=threshold,
                enable_branch_snapshot=special == "branch",
                swa_endpoint_rewind_tokens=2 if special == "rewind" else 0,
            ),
            self.reference,
            max_pages=max_pages,
            tuner=tuner,
        )
        self.forward = ForwardPass(self.manager)
        self.groups = range(len(layout.groups))

    # Helpers

    def bytes_of(self, counts: list[int]) -> int:
        return sum(count * pool.page_bytes for count, pool in zip(counts, self.layout.pools, strict=True))

    def is_needed(self, group: int, key: bytes) -> bool:
        store = self.manager.store
        node = store.tree.find(key)
        assert node is not None
        return not store.group_tables[group].unused(store.tree.pages(group)[[node]])[0]

    def make(self, scope: ReuseScope, prompt: list[int], **options: Any) -> Running:
        """Create a sequence; it finds what the reference finds."""
        tokens = as_token_ids(prompt)
        reuse = options.get("reuse", True) and self.reuse
        found = self.reference.match(scope, prompt, options.get("reuse_limit"))
        cache = self.manager.create(scope, tokens, "r", **options)
        cached = cache.num_cached_tokens
        assert cached == cache.committed == cache.history
        assert cached in (found if reuse else {0})
        running = Running(cache, prompt, prompt[:cached], reuse, options.get("prompt_length", len(prompt)))
        self.open.append(running)
        return running

    def try_to_resume(self, running: Running) -> bool:
        """Resume, and say why not if not."""
        cache, manager = running.cache, self.manager
        before, content = manager.stats(), self.pages_of(running)
        utilisation = manager.utilisation
        moving = self.pages_to_move(running)
        ample = all(room - own >= need for room, (own, need) in zip(manager.available_pages(), moving, strict=True))
        if cache.resume():
            assert not cache.lost
            assert utilisation <= self.util
            running.resumed = True
            return True
        assert cache.state is SequenceState.SUSPENDED
        assert self.damage.spoiled or not cache.lost
        if not manager.can_suspend and not self.damage.failed:
            assert manager.stats() == before
            assert self.pages_of(running) == content
        assert utilisation > self.util or not ample or self.damage.failed or cache.lost
        return False

    def pages_to_move(self, running: Running) -> list[tuple[int, int]]:
        """By pool: how many pages of a sequence there are, and how many device pages resuming takes."""
        counts = [[0, 0] for _ in self.layout.pools]
        for group, layout in enumerate(self.layout.groups):
            table = self.manager.store.group_tables[group]
            pages, held = running.cache.used_pages(group)
            counts[layout.pool][0] += len(pages) + len(held)
            counts[layout.pool][1] += int(np.count_nonzero(table.level[pages] != DEVICE_LEVEL)) + 1
        return [(own, need) for own, need in counts]

    def pages_of(self, running: Running) -> list[list[int]]:
        return [running.cache.page_ids(group).tolist() for group in self.groups]

    def resize(self, running: Running, capacity: int) -> bool:
        """Resize, and check what that says about the pages."""
        cache, manager = running.cache, self.manager
        history = len(running.computed)
        before, content = manager.stats(), self.pages_of(running)
        needs = [0] * len(self.layout.pools)
        for group in self.layout.groups:
            needs[group.pool] += -(-capacity // BLOCK)
        ample = all(need <= room for need, room in zip(needs, manager.available_pages(), strict=True))
        state = (cache.capacity, cache.history, cache.committed)
        if not cache.resize(capacity, history):
            assert not ample or self.damage.failed
            if not self.damage.failed:
                assert manager.stats() == before
                assert self.pages_of(running) == content
                assert (cache.capacity, cache.history, cache.committed) == state
            return False
        assert (cache.capacity, cache.history) == (capacity, history)
        assert cache.num_blocks == -(-capacity // BLOCK)
        return True

    def commit(self, running: Running) -> None:
        """Commit what was computed."""
        cache = running.cache
        tokens = running.computed[cache.committed :]
        self.reference.learn(cache.scope, running.computed)
        cache.commit(as_token_ids(tokens))
        assert cache.committed == cache.history == len(running.computed)
        self.offer(running, len(running.computed) // BLOCK * BLOCK)

    def uses_scratch(self, running: Running) -> bool:
        return any(running.cache.scratch(group) is not None for group in self.groups)

    def offer(self, running: Running, length: int) -> None:
        whole = running.cache.committed >= running.prompt_length
        if running.stores and (self.policy == "all_reusable" or whole):
            self.offered.update((running.cache.scope, tuple(running.computed[:end])) for end in range(1, length + 1))

    def compute(
        self, running: Running, count: int, *, commit: bool, whole_blocks: bool = False, token: int = 0
    ) -> bool:
        """One step of a sequence: pages, forward pass, commit."""
        done = len(running.computed)
        end = running.cache.chunk_end(done, done + count)
        capacity = max(end, running.cache.capacity)
        if done < running.cache.capacity and self.uses_scratch(running):
            end = running.cache.capacity  # What the scratch slots are for must be computed first.
        else:
            if capacity == end == done + 1 and whole_blocks:
                capacity = -(-end // BLOCK) * BLOCK
            if not self.resize(running, capacity):
                return False
        tokens = [running.prompt[i] if i < len(running.prompt) else token for i in range(done, end)]
        self.forward.compute(running.cache, [*running.computed, *tokens], done)
        running.computed = running.computed + tokens
        if commit:
            self.commit(running)
        return True

    def finish(self, running: Running, *, stop: bool = True) -> None:
        cache = running.cache
        self.reference.learn(cache.scope, running.computed)
        if stop and not running.stopped:
            self.stop_committing(running)
        self.offer_all(running)
        if not running.tainted:
            self.past = [*self.past, (cache.scope, running.computed)][-8:]
        cache.close()
        cache.close()
        self.open.remove(running)

    def stop_committing(self, running: Running) -> None:
        self.reference.learn(running.cache.scope, running.computed)
        running.cache.stop_committing()
        running.stopped = True
        self.offer_all(running)

    def offer_all(self, running: Running) -> None:
        """It will commit no more: the rest of its last block is reusable, too."""
        # A partially matched block that was never copied is not the sequence's to offer.
        if running.resumed and not running.tainted and not running.cache.lost:
            self.offer(running, running.cache.committed)

    # Rules

    @rule(scope=st.integers(0, 9), tail=TAIL, base=NUMBER, cut=st.integers(0, 9), options=st.integers(0, 63), go=NUMBER)
    def create(self, scope: int, tail: list[int], base: int, cut: int, options: int, go: int) -> None:
        """A new request, mostly one that continues an earlier one; some are served at once."""
        if len(self.open) >= MOST_OPEN:
            self.finish(self.open[0])
        known = [*self.past, *((running.cache.scope, running.computed or running.prompt) for running in self.open)]
        where, prompt = SCOPES[max(0, scope - 7)], tail
        if known and base:
            where, earlier = known[base % len(known)]
            prompt = (earlier[: max(0, len(earlier) - cut)] + tail)[:MOST_TOKENS]
        running = self.make(
            where,
            prompt,
            reuse=options % 16 != 15,
            retention=RETENTIONS[options % len(RETENTIONS)],
            conversation_id=("a", "b", None)[options % 3],
            prompt_length=max(1, len(prompt) - 3 * (options % 4 == 1)),
            reuse_limit=5 if options % 8 == 5 else None,
        )
        if go and self.try_to_resume(running) and go > 1:
            self.prefill(running, 4 * go - 3, commit=go != 3)
            if go % 2:
                self.catch_up(running)
                self.finish(running)

    @rule(seed=st.integers(0, 1 << 20), count=st.integers(1, 6))
    def traffic(self, seed: int, count: int) -> None:
        """Some requests that come and go, the last of them perhaps suspended."""
        random = Random(seed)
        for _ in range(count):
            scope, tokens = SCOPES[max(0, random.randrange(6) - 3)], []
            if self.past and random.random() < 0.7:
                scope, tokens = random.choice(self.past)
            tokens = tokens[: random.randrange(MOST_TOKENS)] + random.choices((0, 1), k=random.randrange(1, 24))
            if len(self.open) >= MOST_OPEN:
                self.finish(random.choice(self.open))
            running = self.make(
                scope,
                tokens[:MOST_TOKENS],
                retention=random.choice(RETENTIONS),
                conversation_id=random.choice((None, "a", "b")),
            )
            if self.try_to_resume(running):
                self.prefill(running, random.randrange(1, 24), commit=random.random() < 0.8)
                for _ in range(random.randrange(6)):
                    self.compute(running, 1, commit=True, whole_blocks=True, token=random.randrange(2))
            if random.random() < 0.6:
                self.catch_up(running)
                self.finish(running)
            elif running.active:
                self.suspend(running, False)

    @precondition(lambda self: self.open)
    @rule(number=NUMBER, count=st.integers(1, 24), commit=st.booleans(), whole=st.booleans(), token=st.integers(0, 1))
    def step(self, number: int, count: int, commit: bool, whole: bool, token: int) -> None:
        able = [running for running in self.open if running.usable]
        if able:
            self.compute(able[number % len(able)], count, commit=commit, whole_blocks=whole, token=token)

    @precondition(lambda self: self.open)
    @rule(
        number=NUMBER,
        what=st.sampled_from(
            ["resume", "resume", "suspend", "catch_up", "grow", "receive", "stop", "hold", "hold", "close"]
        ),
        amount=st.integers(0, 20),
    )
    def act(self, number: int, what: str, amount: int) -> None:
        """Something else happens to a sequence, if it can."""
        running = self.open[number % len(self.open)]
        match what:
            case "resume" if running.cache.state is SequenceState.SUSPENDED:
                self.try_to_resume(running)
            case "suspend" if running.active:
                self.suspend(running, amount % 2 > 0)
            case "catch_up":
                self.catch_up(running)
            case "grow" if running.usable:
                # Pages for a step that is not computed yet, or fewer than there were.
                if not (self.uses_scratch(running) and len(running.computed) < running.cache.capacity):
                    self.resize(running, len(running.computed) + amount)
            case "receive" if running.usable:
                self.receive(running, amount % 4)
            case "stop" if not running.stopped:
                self.stop_committing(running)
            case "hold" if running.active and not running.tainted:
                tokens = running.computed[: len(running.computed) // (1 + amount % 2)]
                self.held.append(Held(running.cache.hold(len(tokens)), running, tokens))
            case "close":
                self.finish(running, stop=amount % 2 > 0)

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, what=st.sampled_from(["quarantine", "quarantine", "write", "release"]))
    def lease(self, number: int, what: str) -> None:
        held = self.held[number % len(self.held)]
        if what == "quarantine":
            held.lease.quarantine()
        written = held.lease.quarantined and self.spoil(held.lease)
        if written:
            held.running.tainted = True
            if what == "quarantine" and held.running.active and not held.running.stopped:
                unstored = held.running.prompt[held.running.cache.committed :] or [0]
                if held.running.cache.capacity > held.running.cache.committed:
                    self.refuse_commit(held.running, unstored[0])
        if what == "release":
            if written and held.running in self.open:
                # Whoever was quarantined is closed before the peer is known to be quiet.
                self.finish(held.running, stop=False)
            self.held.remove(held)
            held.lease.release()

    @precondition(lambda self: len(self.manager.tiers) > 1 and self.past)
    @rule(number=NUMBER)
    def prefetch(self, number: int) -> None:
        scope, tokens = self.past[number % len(self.past)]
        prompt = as_token_ids([*tokens, 0])
        found, before = self.manager.match(scope, prompt), len(self.reference.moves)
        damaged = self.manager.stats().counters.damaged_pages
        moved = self.manager.prefetch(scope, prompt)
        tried = moved + self.manager.stats().counters.damaged_pages - damaged
        moves = [move[1:] for move in self.reference.moves[before:]]
        assert moves.count((2, 1)) == moved
        assert moves.count((1, 2)) == len(moves) - moved <= tried, "no more went down than were to come up"
        if not self.damage.spoiled:
            assert self.manager.match(scope, prompt)[:2] == found[:2]

    @precondition(lambda self: self.manager.tuner is not None)
    @rule()
    def rebalance(self) -> None:
        active = [running for running in self.open if running.active]
        if active:
            assert not self.manager.rebalance(self.now_s)
        for running in active:
            self.suspend(running, False)
        wanted = self.manager.wants_rebalance(self.now_s)
        assert self.manager.rebalance(self.now_s) == wanted
        self.manager.check_integrity()
        for level, most in enumerate(self.level_bytes):
            counts = [table.num_slots[level] for table in self.manager.store.tables]
            assert all(counts)
            assert self.bytes_of(counts) <= most
        for running in active:
            self.try_to_resume(running)

    @rule(what=st.sampled_from(["tick", "tick", "tick", "clear"]), seconds=st.sampled_from([0.1, 0.6, 1.0, 3.0]))
    def upkeep(self, what: str, seconds: float) -> None:
        if what == "tick":
            self.now_s += seconds
            self.manager.tick(self.now_s)
        elif not self.open:
            self.manager.clear_reusable_blocks()
            self.offered.clear()
            assert not any(self.reference.stored)
            assert self.manager.stats().evictable == 0

    @precondition(lambda self: self.harmful and self.past)
    @rule(kind=st.sampled_from(["flip", "flip", "flip", "truncate", "delete", "fail"]), where=st.integers(0, 1 << 16))
    def harm(self, kind: str, where: int) -> None:
        """Something happens to the disk."""
        if kind == "fail":
            self.fail_writes()
            return
        files = sorted(Path(self.directory.name).iterdir())
        if not files:
            return
        self.damage.spoiled = True
        path = files[where % len(files)]
        size = path.stat().st_size
        if kind == "delete":
            path.unlink()
            self.damage.failed = True  # Later writes are refused.
        elif kind == "truncate":
            os.truncate(path, where % (size + 1))
        elif size:
            with path.open("r+b") as file:
                # One bit in 8 bytes, all over some 512 bytes: it must hit what is read of a page.
                begin = where % size // 512 * 512
                file.seek(begin)
                words = np.frombuffer(file.read(512), dtype=np.uint8).copy()
                words[:: 1 + where % 8] ^= 0x10
                file.seek(begin)
                file.write(words.tobytes())

    @rule(scope=st.integers(0, 2), tokens=TAIL, base=NUMBER)
    def probe(self, scope: int, tokens: list[int], base: int) -> None:
        where = SCOPES[scope]
        if self.past and base:
            where, earlier = self.past[base % len(self.past)]
            tokens = earlier + tokens[:3]
        self.check_match(where, tokens)

    # What the rules do

    def prefill(self, running: Running, chunk: int, *, commit: bool) -> None:
        while len(running.computed) < len(running.prompt):
            left = len(running.prompt) - len(running.computed)
            if not self.compute(running, min(chunk, left), commit=commit):
                return

    def catch_up(self, running: Running) -> None:
        if running.usable and len(running.computed) > running.cache.committed:
            self.commit(running)

    def suspend(self, running: Running, again: bool) -> None:
        if self.uses_scratch(running):
            self.catch_up(running)
        running.cache.suspend()
        if again:
            self.try_to_resume(running)

    def receive(self, running: Running, how: int) -> None:
        """A generation server: pages that a peer fills under a lease, committed when they are there."""
        cache, begin = running.cache, len(running.computed)
        if self.scratch_on or begin >= len(running.prompt):
            return
        if begin % BLOCK or cache.num_blocks * BLOCK > begin or begin > cache.committed:
            return  # A peer sends whole blocks.
        if not cache.resize(len(running.prompt), len(running.prompt)):
            return
        lease = cache.hold(len(running.prompt))
        self.held.append(Held(lease, running, running.computed))
        if not how:
            lease.quarantine()
            if self.spoil(lease):
                running.tainted = True
                self.refuse_commit(running, 0)
                return
        self.forward.receive(cache, running.prompt, begin)
        running.computed = running.prompt
        if how > 1:
            self.commit(running)
        if how > 2:
            self.held.pop().lease.release()

    def refuse_commit(self, running: Running, token: int) -> None:
        committed = running.cache.committed
        with pytest.raises(CacheStateError, match="quarantined"):
            running.cache.commit(as_token_ids([token]))
        assert running.cache.committed == committed

    def spoil(self, lease: PageLease) -> bool:
        """A peer that nobody can stop writes into the quarantined pages; whether there are any."""
        found = False
        for group in self.groups:
            table = self.manager.store.group_tables[group]
            pages = lease.pages(group)
            pages = pages[[int(page) in table.quarantines for page in pages]]
            found |= bool(len(pages))
            self.forward.spoil(group, table.slots(pages))
        return found

    def fail_writes(self) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space left on the device")

        level = self.manager.tiers.index("disk")
        self.damage.failed = True
        for pool in self.storage._cold[level - 1]:
            pool.store = refuse  # type: ignore[method-assign, union-attr]

    def check_match(self, scope: ReuseScope, tokens: list[int]) -> None:
        before = self.manager.stats()
        found = self.manager.match(scope, as_token_ids(tokens))
        assert self.manager.stats() == before
        assert found.num_tokens in self.reference.match(scope, tokens)
        assert found.num_full_blocks == found.num_tokens // BLOCK
        counters = before.counters
        evicted = counters.dropped_pages or counters.damaged_pages or self.damage.failed
        if not evicted and self.policy != "per_conversation" and not any(g.window for g in self.layout.groups):
            longest = max(n for n in range(len(tokens)) if n == 0 or (scope, tuple(tokens[:n])) in self.offered)
            assert found.num_tokens == (longest if self.partial else longest // BLOCK * BLOCK)

    # What must be true

    @invariant()
    def all_is_well(self) -> None:
        self.accounting_is_exact()
        self.reusable_blocks_are_what_was_told()
        self.sequences_keep_their_content()
        self.matches_are_what_the_reference_finds()

    def accounting_is_exact(self) -> None:
        manager = self.manager
        manager.check_integrity()
        self.reference.checked.step()
        stats = manager.stats()
        assert sum(stats[1:7]) == stats.total
        assert stats.open_sequences == len(self.open)
        assert stats.open_leases == len(self.held)
        for level in manager.level_stats():
            used = [0] * len(self.layout.pools)
            for group, layout in zip(level.groups, self.layout.groups, strict=True):
                used[layout.pool] += group.locked + group.pinned + group.held + group.evictable
            assert [a + b for a, b in zip(used, level.free, strict=True)] == list(level.total)
        assert self.damage.spoiled or not stats.counters.damaged_pages

    def reusable_blocks_are_what_was_told(self) -> None:
        store = self.manager.store
        nodes = 0
        for group, stored in enumerate(self.reference.stored):
            table, column = store.group_tables[group], store.tree.pages(group)
            found = [store.tree.find(key) for key in stored]
            assert None not in found
            pages = column[np.array(found, dtype=np.int32)] if found else np.empty(0, dtype=np.int32)
            assert NO_PAGE not in pages
            assert int(np.count_nonzero(column[store.tree.nodes()] != NO_PAGE)) == len(stored)
            blocks = list(stored.values())
            assert table.level[pages].tolist() == [block.level for block in blocks]
            assert table.priority[pages].tolist() == [block.priority for block in blocks]
            assert table.num_tokens[pages].tolist() == [block.covered for block in blocks]
            here = np.flatnonzero(table.level[pages] == DEVICE_LEVEL)
            self.forward.check_blocks(
                group,
                table.slots(pages[here]),
                [blocks[at].prefix for at in here.tolist()],
                table.num_tokens[pages[here]],
            )
        nodes = len(self.reference.nodes())
        assert self.manager.stats().cached_blocks == len(store.tree.nodes()) == nodes

    def sequences_keep_their_content(self) -> None:
        for running in self.open:
            cache = running.cache
            assert cache.committed <= cache.history <= cache.capacity
            if running.tainted or not running.resumed or not running.active:
                continue
            for group in self.groups:
                slots, window = cache.page_ids(group), self.layout.groups[group].window
                length = len(running.computed)
                first = 0 if window is None else max(0, length + 1 - window)
                for block in range(first // BLOCK, -(-length // BLOCK)):
                    assert slots[block] >= 0, "a window still needs the page"
                self.forward.check(group, slots, cache.scope, running.computed)
                scratch = cache.scratch(group)
                for block in range(cache.num_blocks):
                    stale = is_stale(block, cache.history, BLOCK, window)
                    in_scratch = scratch is not None and scratch.begin <= block < scratch.end
                    if in_scratch or (stale and running.stopped):
                        assert slots[block] == NO_PAGE
                    elif not stale and (scratch is not None or not self.scratch_on):
                        assert slots[block] >= 0
        for held in self.held:
            if not held.running.tainted:
                for group in self.groups:
                    self.forward.check(group, held.lease.page_ids(group), held.running.cache.scope, held.tokens)

    def matches_are_what_the_reference_finds(self) -> None:
        for running in self.open[-2:]:
            self.check_match(running.cache.scope, [*running.computed, 0])

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        if sys.exc_info()[0] is not None:  # What is found here would only hide what went wrong before.
            self.storage.close()
            self.directory.cleanup()
            return
        for held in self.held:
            held.lease.release()
        for running in list(self.open):
            running.cache.close()
        self.manager.check_integrity()
        self.manager.close()
        self.manager.check_integrity()
        assert self.manager.stats().free == self.manager.stats().total
        assert not any(self.reference.stored), "every stored key is removed"
        self.reference.checked.finish()
        assert self.device.free_bytes == BUDGET
        assert not list(Path(self.directory.name).iterdir())
        assert len(list(Path("/proc/self/fd").iterdir())) == self.fds
        self.directory.cleanup()


CacheMachine.TestCase.settings = settings(
    max_examples=200 * SOAK,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheModel = CacheMachine.TestCase
