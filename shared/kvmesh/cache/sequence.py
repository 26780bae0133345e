"""One sequence's view of the cache: the pages of its tokens, from creation to close.

A sequence is created *suspended*, holding what the tree already has of its prompt. ``resume`` makes it *active* (its
pages are on the device and locked), ``resize`` gives it pages for the next tokens, ``commit`` says which tokens' KV is
computed, ``close`` gives everything back. At every moment ``committed <= history <= capacity``.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import TYPE_CHECKING

from kvmesh.cache.base import Scratch
from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.holdings import Holdings
from kvmesh.cache.lease import PageLease
from kvmesh.cache.pages import Pages
from kvmesh.cache.priorities import PagePriorities
from kvmesh.cache.store import BlockMatch
from kvmesh.cache.tallies import SequenceTally
from kvmesh.cache.token_chain import TokenChain
from kvmesh.cache.windows import BlockRange, scratch_range
from kvmesh.hashing import ReuseScope, TokenIds, v2_block_keys, v2_partial_key, v2_root

if TYPE_CHECKING:
    from kvmesh.cache.manager import KvCacheManager

__all__ = ["KvCache", "SequenceState"]

_NO_RANGE = BlockRange(0, 0)


class SequenceState(Enum):
    """Where a sequence is in its life."""

    SUSPENDED = "suspended"
    ACTIVE = "active"
    CLOSED = "closed"


class KvCache:
    """The cache of one sequence; made by :meth:`KvCacheManager.create`.

    Attributes:
        request_id: for messages.
        scope: where its blocks may be reused.
        conversation_id: the conversation that it is a turn of, or None.
        num_cached_tokens: leading tokens whose KV was found at creation; always less than the prompt's length.
        tally: its part of the statistics.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        prompt_length: int,
        match: BlockMatch,
        block_keys: list[bytes],
        priorities: PagePriorities,
        storing: bool,
        boundaries: tuple[int, ...] = (),
        snapshot_points: tuple[int, ...] = (),
        conversation_id: str | None = None,
        tally: SequenceTally,
    ) -> None:
        self.request_id = request_id
        self.scope = scope
        self.tally = tally
        self.conversation_id = conversation_id
        self._manager = manager
        self._store = manager.store
        self._block_tokens = block_tokens = manager.layout.tokens_per_block
        self._priorities = priorities
        self._boundaries = boundaries
        self._snapshot_points = frozenset(snapshot_points)
        self._state = SequenceState.SUSPENDED
        self._ever_resumed = False
        self._went_on = False
        """A step was computed since the last resumption."""
        self._set_aside = False
        """Whether a suspension was counted whose end was not."""
        self._storing = storing
        """Off: commits are accepted, but nothing becomes reusable any more."""
        self._stopped = False
        self._prompt_length = prompt_length
        self._known_length = len(token_ids) if tally.again else prompt_length
        """Tokens whose blocks are not counted as generated ones."""
        self._chain = TokenChain(
            token_ids,
            block_keys,
            self._block_tokens,
            root=v2_root(scope),
            hash_blocks=lambda tokens, parent: v2_block_keys(tokens, block_tokens, parent),
        )
        self._tail_keys: list[bytes] = []
        """Key of the trailing partial block, once it is committed."""

        self._num_blocks = self._num_stored = len(match.nodes)
        self.num_cached_tokens = self._num_blocks * self._block_tokens + match.partial_tokens
        self._capacity = self._history = self._committed = self.num_cached_tokens
        self._num_samples = self._capacity_sum = self._history_sum = 0
        self._pages = Holdings(self._store, match, self.num_cached_tokens, tally)

    @property
    def state(self) -> SequenceState:
        """Suspended, active or closed."""
        return self._state

    def matched_pages(self) -> list[tuple[Pages, Pages]]:
        """By layer group, pages found for the prompt: whole blocks, and the one to be copied from. Before a resume."""
        return self._pages.matched()

    @property
    def lost(self) -> bool:
        """A page that it needs was damaged in a cold tier: it can only be closed; a new one finds what is left."""
        return self._pages.lost

    @property
    def capacity(self) -> int:
        """Tokens for which there are pages (once resumed)."""
        return self._capacity

    @property
    def history(self) -> int:
        """Tokens whose KV is computed or being computed."""
        return self._history

    @property
    def committed(self) -> int:
        """Tokens whose KV is computed, the reused ones included."""
        return self._committed

    @property
    def mean_capacity(self) -> float:
        """Tokens of capacity, averaged over the calls of :meth:`resize`; 0 before the first."""
        return self._capacity_sum / self._num_samples if self._num_samples else 0.0

    @property
    def mean_history(self) -> float:
        """Tokens of history, averaged as :attr:`mean_capacity`."""
        return self._history_sum / self._num_samples if self._num_samples else 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks of the capacity: the length of every block table."""
        return self._num_blocks

    def chunk_end(self, start: int, end: int) -> int:
        """Where a prefill chunk that begins at ``start`` and may go up to ``end`` has to stop: at a snapshot point."""
        return min((point for point in self._boundaries if start < point < end), default=end)

    def resume(self) -> bool:
        """Bring all needed pages to the device and lock them; the first time, what was matched only in part is copied.

        Returns:
            False when the device is too full (``max_util_for_resume``, or no pages for what is on colder levels or for
            the copy): nothing has changed, save that pages may have moved between levels. Also False, for ever, when
            :attr:`lost`.

        Raises:
            CacheStateError: the sequence is not suspended.
        """
        self._require(SequenceState.SUSPENDED, "resume")
        if self._pages.lost or self._manager.utilisation > self._manager.settings.max_util_for_resume:
            return False
        promoted = self._pages.promote()
        if not self._pages.bring_to_device() or not self._make_private():
            self._pages.demote(promoted)
            return False
        self._state = SequenceState.ACTIVE
        self._ever_resumed = True
        self._went_on = False
        return True

    def suspend(self) -> None:
        """Stop computing; the pages stay held: they may move to a colder level (where there is one), never go.

        Raises:
            CacheStateError: the sequence is not active.
        """
        self._require(SequenceState.ACTIVE, "suspend")
        if self._history < self._capacity and self._pages.any_scratch:
            # The step was not computed: the blocks in scratch slots would come back without a page.
            self._give_up_step()
        self._pages.free_scratch()
        self._pages.demote(self._pages.active())
        self._state = SequenceState.SUSPENDED
        # A resumption that is taken back at once, for want of room, is none.
        if self._went_on and self.tally.counted:
            self._set_aside = True
            self._store.counters.suspended += 1

    def resize(self, capacity: int, history: int | None = None) -> bool:
        """Have pages for ``capacity`` tokens in every layer group, no more and no fewer.

        Blocks that ``history`` leaves behind every window of a group lose their pages there, or get none. With scratch
        reuse, windowed blocks of this step that will be behind it when ``capacity`` tokens are computed share scratch
        slots until the next call.

        Args:
            capacity: tokens; below the present capacity, trailing pages are given back.
            history: tokens whose KV is computed or being computed; unchanged when None. It never decreases.

        Returns:
            False when there are not enough pages; nothing has changed.

        Raises:
            CacheStateError: the sequence is not active.
            ValueError: not ``committed <= present history <= history <= capacity``; or scratch slots are in use and
                ``history`` does not reach what they were for.
        """
        self._require(SequenceState.ACTIVE, "resize")
        history = self._history if history is None else history
        if not self._history <= history <= capacity:
            raise ValueError(
                f"{self.request_id}: history {history} and capacity {capacity} must not be below {self._history}"
            )
        if history < self._capacity and self._pages.any_scratch:
            raise ValueError(
                f"{self.request_id}: scratch slots hold blocks up to token {self._capacity}; history must reach it"
            )
        wanted = -(-capacity // self._block_tokens)
        if wanted <= self._num_blocks:
            self._pages.free_scratch()
            self._raise_history(history)
            if wanted < self._num_blocks:
                self._pages.truncate(wanted)
                self._num_blocks = wanted
            self._capacity = capacity
            self._sample()
            return True
        scratch = self._scratch_ranges(history, capacity)
        counts = self._pages.missing(wanted, history, scratch)
        if not self._store.all_whole and not self._let_go_for(counts, history):
            return False
        new = self._allocate(wanted, counts)
        if new is None:  # Without windows; with them, a tier failed while making room.
            return False
        self._history = history
        generated = max(0, wanted - max(self._num_blocks, -(-self._known_length // self._block_tokens)))
        self._pages.extend(wanted, history, scratch, new, generated)
        self._num_blocks, self._capacity = wanted, capacity
        self._sample()
        return True

    def commit(self, token_ids: TokenIds) -> None:
        """The KV of the next ``len(token_ids)`` tokens is computed; full blocks become reusable as the policy says.

        Args:
            token_ids: int32; prompt tokens as they were given at creation, then generated ones.

        Raises:
            CacheStateError: the sequence is not active, :meth:`stop_committing` was called, or a peer may still write
                into the pages.
            ValueError: the tokens do not fit the capacity.
        """
        self._require(SequenceState.ACTIVE, "commit")
        if not len(token_ids):
            return
        if self._stopped:
            raise CacheStateError(f"{self.request_id}: commit after stop_committing")
        end = self._committed + len(token_ids)
        if end > self._capacity:
            raise ValueError(f"{self.request_id}: {end} tokens committed with a capacity of {self._capacity}")
        if self._pages.any_quarantined(self._num_stored):
            raise CacheStateError(f"{self.request_id}: commit of quarantined pages")
        self.note_step()
        self._chain.write(self._committed, token_ids)
        self._committed = end
        if end in self._snapshot_points and self._may_still_store():
            self._take_snapshots()
        if self._may_store():
            self._store_full_blocks()
        self._raise_history(max(self._history, end))

    def note_step(self) -> None:
        """A step was computed: what this sequence found and was given is in the statistics from now on.

        A commit does so, too. A sequence that is closed before leaves no trace in them, and a resumption without any
        step is none.
        """
        if self._went_on:
            return
        self._went_on = True
        self.tally.count()
        if self._set_aside:
            self._set_aside = False
            self._store.counters.resumed += 1

    def stop_committing(self) -> None:
        """No more commits will come: the trailing partial block becomes reusable, too. Calling it again does nothing.

        Raises:
            CacheStateError: the sequence is closed.
        """
        if self._state is SequenceState.CLOSED:
            raise CacheStateError(f"{self.request_id}: stop_committing on a closed sequence")
        if self._stopped:
            return
        self._stopped = True
        if self._may_store() and not self._pages.lost:
            self._store_partial_block()
        self._pages.release_retained(self._num_blocks)

    def close(self) -> None:
        """Commit the trailing partial block and give every page back, last block first. Closing twice is harmless.

        A turn of a conversation that has computed its whole prompt is over now. Reusable blocks stay in the tree until
        they are evicted; pages under a lease stay until its release.
        """
        if self._state is SequenceState.CLOSED:
            return
        self.stop_committing()
        if self.conversation_id is not None and self._committed >= self._prompt_length:
            keys = self._chain.keys(0, self._num_stored) + self._tail_keys
            self._manager.end_turn((self.scope, self.conversation_id), keys, self._committed)
        self._pages.give_back(locked=self._state is SequenceState.ACTIVE)
        self._num_blocks = 0
        self._state = SequenceState.CLOSED
        self._manager.forget(self)

    def hold(self, num_tokens: int, groups: Collection[int] | None = None) -> PageLease:
        """Pin the pages of the first ``num_tokens`` tokens, so that they outlive this sequence.

        Args:
            num_tokens: how many.
            groups: layer groups to pin; None: all. The lease has no pages of the others.

        Raises:
            CacheStateError: the sequence is closed, or a page is not on the device.
            ValueError: there are no pages for so many tokens.
        """
        if self._state is SequenceState.CLOSED:
            raise CacheStateError(f"{self.request_id}: hold on a closed sequence")
        blocks = -(-num_tokens // self._block_tokens)
        if num_tokens < 0 or blocks > self._num_blocks:
            raise ValueError(f"{self.request_id}: no pages for {num_tokens} tokens, only {self._num_blocks} blocks")
        pages = self._pages.readable(blocks)
        if pages is None:
            raise CacheStateError(f"{self.request_id}: hold of pages that are not on the device; resume it first")
        if groups is not None:
            pages = [held if group in groups else held[:0] for group, held in enumerate(pages)]
        return self._manager.lease(num_tokens, pages)

    def page_ids(self, group: int) -> Pages:
        """Slots of the pages in the device pool of ``group``, one for each block, in order: int32 ``[num_blocks]``.

        -1 where the window has passed, or where a scratch slot is used. Valid until the next commit, resize or suspend:
        committing may exchange a page for an identical shared one.
        """
        return self._pages.slots(group)

    def block_table_into(self, group: int, row: Pages) -> int:
        """Write :meth:`page_ids` to the start of ``row`` (int32) and return their number; the rest is not touched."""
        row[: self._num_blocks] = self.page_ids(group)
        return self._num_blocks

    def scratch(self, group: int) -> Scratch | None:
        """The blocks of ``group`` that use scratch slots until the next resize, None when there are none."""
        return self._pages.scratch(group)

    def used_pages(self, group: int) -> tuple[Pages, Pages]:
        """Bookkeeping numbers of what it uses in ``group`` (for checks): active pages, and those held anyway."""
        return self._pages.used(group)

    def _require(self, state: SequenceState, action: str) -> None:
        if self._state is not state:
            raise CacheStateError(f"{self.request_id}: {action} on a sequence that is {self._state.value}")

    def _make_private(self) -> bool:
        """The first time: private pages for the partially matched block and for states; False without room for them."""
        if self._ever_resumed:
            return True
        partial = self.num_cached_tokens % self._block_tokens > 0
        counts = [int(partial or group.kind == "state") for group in self._manager.layout.groups]
        if not any(counts):
            return True
        copies = self._allocate(self._num_blocks + partial, counts)
        if copies is None:
            return False
        if not self._pages.copy_into(copies):
            return False
        self._num_blocks += partial
        return True

    def _allocate(self, wanted: int, counts: list[int]) -> list[Pages] | None:
        """Pages for blocks up to ``wanted``: ``counts[group]`` of them, which are for the last blocks."""
        rules = [
            self._priorities.of(group, wanted - count, wanted)
            for group, count in zip(self._manager.layout.groups, counts, strict=True)
        ]
        new = self._store.allocate(counts, [rule.values for rule in rules])
        if new is not None:
            for table, rule, pages in zip(self._store.group_tables, rules, new, strict=True):
                if rule.durations_s is not None:
                    table.retain(pages, rule.durations_s)
        return new

    def _scratch_ranges(self, history: int, capacity: int) -> list[BlockRange]:
        if not self._manager.settings.enable_swa_scratch_reuse:
            return [_NO_RANGE] * self._store.num_groups
        ranges = [
            # Not even a window of one token leaves a block behind that a decode has only begun.
            scratch_range(history, capacity, self._block_tokens, group.window and max(group.window, 2))
            for group in self._manager.layout.groups
        ]
        return [BlockRange(max(begin, self._num_blocks), max(end, self._num_blocks)) for begin, end in ranges]

    def _sample(self) -> None:
        self._num_samples += 1
        self._capacity_sum += self._capacity
        self._history_sum += self._history

    def _give_up_step(self) -> None:
        """Take back the pages of blocks that were to be computed; scratch slots are in use."""
        kept = -(-self._history // self._block_tokens)
        self._pages.free_scratch()
        self._pages.truncate(kept)
        self._num_blocks, self._capacity = kept, self._history

    def _let_go_for(self, counts: list[int], history: int) -> bool:
        """Let go of what ``history`` leaves behind if ``counts`` pages can be had then; else False, and no change."""
        needs = self._store.by_pool(counts)
        pages, stored = self._pages, self._num_stored
        if not self._store.can_allocate(needs, pages.freed_by(history, stored, storing=self._may_still_store())):
            if not self._store.can_allocate(needs, pages.freed_without_retaining(history, stored)):
                return False
            # Going on is worth more than the reuse of what only waits to be committed.
            pages.advance(history, stored, storing=False, locked=True)
            pages.release_retained(self._num_blocks)
        pages.free_scratch()
        self._raise_history(history)
        return True

    def _raise_history(self, history: int) -> None:
        self._history = history
        if self._store.all_whole:
            return
        active = self._state is SequenceState.ACTIVE
        self._pages.advance(history, self._num_stored, storing=self._may_still_store(), locked=active)

    def _take_snapshots(self) -> None:
        """Copy the state as it is after the committed tokens; without room for the copy there is none."""
        block = (self._committed - 1) // self._block_tokens
        tokens = self._committed - block * self._block_tokens
        for group, blocks in self._pages.states():
            rule = self._priorities.of(group, block, block + 1)
            page = self._store.copy_to_fresh(group.group_id, blocks.live, tokens, rule.values)
            if page is not None:
                blocks.add_snapshot(block, page)

    def _may_still_store(self) -> bool:
        return self._storing and not self._stopped

    def _may_store(self) -> bool:
        return self._storing and (
            self._manager.settings.policy == "all_reusable" or self._committed >= self._prompt_length
        )

    def _store_full_blocks(self) -> None:
        first, last = self._num_stored, self._committed // self._block_tokens
        if last <= first:
            return
        self._pages.forget_damaged()
        keys = self._chain.keys(first, last)
        stored = self._store.commits.full(
            self.scope,
            self._chain.parent_key(first),
            keys,
            self._chain.blocks(first, last),
            self._pages.between(first, last),
        )
        self._storing = stored is not None
        self._num_stored = first + (stored or 0)
        self._pages.release_retained(self._num_stored if self._storing else self._num_blocks)

    def _store_partial_block(self) -> None:
        full, rest = divmod(self._committed, self._block_tokens)
        if rest and self._num_stored == full < self._num_blocks and not self._pages.any_quarantined(full):
            begin = full * self._block_tokens
            tokens, parent_key = self._chain.tokens(begin, begin + rest), self._chain.parent_key(full)
            if self._store.commits.partial(self.scope, parent_key, tokens, self._pages.between(full, full + 1)):
                self._tail_keys = [v2_partial_key(tokens, parent_key)]
