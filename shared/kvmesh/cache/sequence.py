"""One sequence's view of the cache: the pages of its tokens, from creation to close.

A sequence is created *suspended*, holding what the tree already has of its prompt. ``resume`` makes it *active* (its
pages are locked on the device), ``resize`` gives it pages for the next tokens, ``commit`` says which tokens' KV is
computed, ``close`` gives everything back. At every moment ``committed <= history <= capacity``.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.lease import PageLease
from kvmesh.cache.pages import Pages
from kvmesh.hashing import ReuseScope, TokenIds, v2_block_keys, v2_root

if TYPE_CHECKING:
    from kvmesh.cache.manager import KvCacheManager

__all__ = ["KvCache", "SequenceState"]

_TOKEN_SLACK = 256
"""Room for generated tokens in the first token buffer."""

_BLOCK_SLACK = 8
"""Room for the blocks of generated tokens in the first page arrays."""


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
        num_cached_tokens: leading tokens whose KV was found at creation; always less than the prompt's length.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        block_keys: list[bytes],
        priority: int,
    ) -> None:
        self.request_id = request_id
        self.scope = scope
        self._manager = manager
        self._store = manager.store
        self._block_tokens = manager.layout.tokens_per_block
        self._priority = priority
        self._state = SequenceState.SUSPENDED
        self._ever_resumed = False
        self._storing = manager.settings.enable_block_reuse
        """Off: commits are accepted, but nothing becomes reusable any more."""
        self._stopped = False
        self._prompt_length = len(token_ids)
        self._tokens: TokenIds = np.empty(len(token_ids) + _TOKEN_SLACK, dtype=np.int32)
        self._tokens[: len(token_ids)] = token_ids
        self._keys = block_keys.copy()
        """Keys of the leading full blocks of the token buffer, as far as they are known."""

        match = manager.find(scope, token_ids, block_keys)
        self._num_blocks = self._num_stored = len(match.nodes)
        self._tables: list[Pages] = []
        for table, pages in zip(self._store.group_tables, self._store.pages_of(match.nodes), strict=True):
            table.hold(pages)
            self._tables.append(np.concatenate((pages, np.empty(_BLOCK_SLACK, dtype=np.int32))))
        self._copy_sources: list[Pages] | None = None
        if match.partial_node is not None:
            self._copy_sources = self._store.pages_of([match.partial_node])
            for table, source in zip(self._store.group_tables, self._copy_sources, strict=True):
                table.hold(source)
        self.num_cached_tokens = self._num_blocks * self._block_tokens + match.partial_tokens
        self._capacity = self._history = self._committed = self.num_cached_tokens

    @property
    def state(self) -> SequenceState:
        """Suspended, active or closed."""
        return self._state

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
    def num_blocks(self) -> int:
        """Blocks that have pages."""
        return self._num_blocks

    def resume(self) -> bool:
        """Make the sequence active; a partially matched block is copied into a private page the first time.

        Returns:
            False when the device is too full (``max_util_for_resume``, or no page for the copy); nothing has changed.

        Raises:
            CacheStateError: the sequence is not suspended.
        """
        self._require(SequenceState.SUSPENDED, "resume")
        if self._manager.utilisation > self._manager.settings.max_util_for_resume:
            return False
        copies: list[Pages] | None = None
        if self._copy_sources is not None:
            copies = self._store.allocate([1] * self._store.num_groups, self._priority)
            if copies is None:
                return False
        for table, pages in zip(self._store.group_tables, self._pages(), strict=True):
            table.lock(pages)
            table.unhold(pages)
        if copies is not None:
            self._copy_partial_block(copies)
        self._state = SequenceState.ACTIVE
        self._store.counters.resumed += self._ever_resumed
        self._ever_resumed = True
        return True

    def suspend(self) -> None:
        """Stop computing; the pages stay held: they may move to a colder level (where there is one), never go.

        Raises:
            CacheStateError: the sequence is not active.
        """
        self._require(SequenceState.ACTIVE, "suspend")
        for table, pages in zip(self._store.group_tables, self._pages(), strict=True):
            table.hold(pages)
            table.unlock(pages)
        self._state = SequenceState.SUSPENDED
        self._store.counters.suspended += 1

    def resize(self, capacity: int, history: int | None = None) -> bool:
        """Have pages for ``capacity`` tokens in every layer group, no more and no fewer.

        Args:
            capacity: tokens; below the present capacity, trailing pages are given back.
            history: tokens whose KV is computed or being computed; unchanged when None. It never decreases.

        Returns:
            False when there are not enough pages; nothing has changed.

        Raises:
            CacheStateError: the sequence is not active.
            ValueError: not ``committed <= present history <= history <= capacity``.
        """
        self._require(SequenceState.ACTIVE, "resize")
        history = self._history if history is None else history
        if not self._history <= history <= capacity:
            raise ValueError(
                f"{self.request_id}: history {history} and capacity {capacity} must not be below {self._history}"
            )
        wanted = -(-capacity // self._block_tokens)
        if wanted > self._num_blocks:
            new = self._store.allocate([wanted - self._num_blocks] * self._store.num_groups, self._priority)
            if new is None:
                return False
            self._append(new)
        elif wanted < self._num_blocks:
            for table, pages in zip(self._store.group_tables, self._pages(wanted), strict=True):
                table.unlock(pages[::-1])
            self._num_blocks = wanted
        self._capacity, self._history = capacity, history
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
        if self._any_quarantined(self._committed // self._block_tokens):
            raise CacheStateError(f"{self.request_id}: commit of quarantined pages")
        self._write_tokens(token_ids)
        self._committed = end
        self._history = max(self._history, end)
        if self._may_store():
            self._store_full_blocks()

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
        if not self._may_store():
            return
        full, rest = divmod(self._committed, self._block_tokens)
        if rest and self._num_stored == full < self._num_blocks and not self._any_quarantined(full):
            begin = full * self._block_tokens
            pages = [pages[full : full + 1] for pages in self._tables]
            self._store.commit_partial(self.scope, self._parent_key(full), self._tokens[begin : begin + rest], pages)

    def close(self) -> None:
        """Commit the trailing partial block and give every page back, last block first. Closing twice is harmless.

        Reusable blocks stay in the tree until they are evicted; pages under a lease stay until its release.
        """
        if self._state is SequenceState.CLOSED:
            return
        self.stop_committing()
        for table, pages in zip(self._store.group_tables, self._pages(), strict=True):
            if self._state is SequenceState.ACTIVE:
                table.unlock(pages[::-1])
            else:
                table.unhold(pages[::-1])
        self._drop_copy_sources()
        self._num_blocks = 0
        self._state = SequenceState.CLOSED
        self._manager.forget(self)

    def hold(self, num_tokens: int) -> PageLease:
        """Pin the pages of the first ``num_tokens`` tokens, so that they outlive this sequence.

        Raises:
            CacheStateError: the sequence is closed.
            ValueError: there are no pages for so many tokens.
        """
        if self._state is SequenceState.CLOSED:
            raise CacheStateError(f"{self.request_id}: hold on a closed sequence")
        blocks = -(-num_tokens // self._block_tokens)
        if num_tokens < 0 or blocks > self._num_blocks:
            raise ValueError(f"{self.request_id}: no pages for {num_tokens} tokens, only {self._num_blocks} blocks")
        return self._manager.lease(num_tokens, [pages[:blocks].copy() for pages in self._tables])

    def page_ids(self, group: int) -> Pages:
        """Slots of the pages in the device pool of ``group``, one for each block, in order: int32 ``[num_blocks]``.

        Valid until the next commit, resize or suspend: committing may exchange a page for an identical shared one.
        """
        return self._store.group_tables[group].slots(self._tables[group][: self._num_blocks])

    def block_table_into(self, group: int, row: Pages) -> int:
        """Write :meth:`page_ids` to the start of ``row`` (int32) and return their number; the rest is not touched."""
        row[: self._num_blocks] = self.page_ids(group)
        return self._num_blocks

    def held_pages(self, group: int) -> Pages:
        """Bookkeeping numbers of every page that this sequence holds or locks in ``group`` (for integrity checks)."""
        pages: Pages = self._tables[group][: self._num_blocks]
        if self._copy_sources is not None:
            return np.concatenate((pages, self._copy_sources[group]))
        return pages

    def _require(self, state: SequenceState, action: str) -> None:
        if self._state is not state:
            raise CacheStateError(f"{self.request_id}: {action} on a sequence that is {self._state.value}")

    def _pages(self, start: int = 0) -> list[Pages]:
        return [pages[start : self._num_blocks] for pages in self._tables]

    def _any_quarantined(self, start: int) -> bool:
        return any(
            table.any_quarantined(pages)
            for table, pages in zip(self._store.group_tables, self._pages(start), strict=True)
        )

    def _append(self, new: list[Pages]) -> None:
        count = self._num_blocks + len(new[0])
        for group, pages in enumerate(new):
            table = self._tables[group]
            if count > len(table):
                grown = np.empty(max(count + _BLOCK_SLACK, 2 * len(table)), dtype=np.int32)
                grown[: self._num_blocks] = table[: self._num_blocks]
                self._tables[group] = table = grown
            table[self._num_blocks : count] = pages
        self._num_blocks = count

    def _copy_partial_block(self, copies: list[Pages]) -> None:
        assert self._copy_sources is not None
        self._manager.copy_pages(self._copy_sources, copies)
        self._drop_copy_sources()
        self._append(copies)

    def _drop_copy_sources(self) -> None:
        if self._copy_sources is None:
            return
        for table, source in zip(self._store.group_tables, self._copy_sources, strict=True):
            table.unhold(source)
        self._copy_sources = None

    def _write_tokens(self, token_ids: TokenIds) -> None:
        begin = self._committed
        end = begin + len(token_ids)
        if end <= self._prompt_length and np.array_equal(self._tokens[begin:end], token_ids):
            return
        if end > len(self._tokens):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[:begin] = self._tokens[:begin]
            self._tokens = grown
        self._tokens[begin:end] = token_ids
        # Keys of these blocks may have been computed from other tokens.
        del self._keys[begin // self._block_tokens :]

    def _may_store(self) -> bool:
        return self._storing and (
            self._manager.settings.policy == "all_reusable" or self._committed >= self._prompt_length
        )

    def _store_full_blocks(self) -> None:
        first, last = self._num_stored, self._committed // self._block_tokens
        if last <= first:
            return
        self._know_keys(last)
        tokens = self._tokens[first * self._block_tokens : last * self._block_tokens]
        self._storing = self._store.commit_full(
            self.scope,
            self._parent_key(first),
            self._keys[first:last],
            tokens.reshape(-1, self._block_tokens),
            [pages[first:last] for pages in self._tables],
        )
        if self._storing:
            self._num_stored = last

    def _know_keys(self, blocks: int) -> None:
        known = len(self._keys)
        if known < blocks:
            tokens = self._tokens[known * self._block_tokens : blocks * self._block_tokens]
            self._keys += v2_block_keys(tokens, self._block_tokens, self._parent_key(known))

    def _parent_key(self, block: int) -> bytes:
        return self._keys[block - 1] if block else v2_root(self.scope)
