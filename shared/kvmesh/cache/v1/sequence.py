"""One sequence's view of the V1 cache: the blocks of its tokens, from creation to close.

It is created holding what the trees have of its prompt, resumed once, and from then on runs until it is closed.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.base import Scratch
from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.retention import block_priorities, touched_blocks
from kvmesh.cache.tallies import SequenceTally
from kvmesh.cache.v1.block import Block
from kvmesh.cache.v1.lease import BlockLease
from kvmesh.cache.v1.match import Match
from kvmesh.cache.v1.opening import Opened
from kvmesh.cache.v1.tokens import SequenceTokens
from kvmesh.cache.v1.view import GroupView
from kvmesh.cache.windows import first_live_block
from kvmesh.hashing import ReuseScope, TokenIds
from kvmesh.protocol.retention import RetentionConfig

if TYPE_CHECKING:
    from kvmesh.cache.v1.manager import V1CacheManager

__all__ = ["V1Sequence"]


class _State(Enum):
    CREATED = "created"
    ACTIVE = "active"
    CLOSED = "closed"


class V1Sequence:
    """Implements :class:`kvmesh.cache.base.SequenceCache`; made by :meth:`V1CacheManager.create`.

    Attributes:
        request_id: for messages.
        scope: where its blocks may be reused.
        num_cached_tokens: leading tokens whose KV was found at creation; always less than the prompt's length.
        views: its blocks by layer group.
        tally: its part of the statistics.
    """

    def __init__(
        self,
        manager: V1CacheManager,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        prompt_length: int,
        keys: list[bytes],
        match: Match,
        retention: RetentionConfig | None,
        storing: bool,
        tally: SequenceTally,
    ) -> None:
        self.request_id = request_id
        self.scope = scope
        self.tally = tally
        self.num_cached_tokens = match.num_tokens
        self._manager = manager
        self._usage, self._index, self._tiers = manager.usage, manager.index, manager.tiering
        self._opening = manager.opening
        self._block_tokens = manager.layout.tokens_per_block
        self._retention = retention
        self._state = _State.CREATED
        self._lost = self._stopped = False
        self._prompt_length = prompt_length
        self._known_length = len(token_ids) if tally.again else prompt_length
        """Tokens whose blocks are not counted as generated ones."""
        self._tokens = SequenceTokens(scope, token_ids, keys, self._block_tokens)
        self._capacity = self._history = self._committed = match.num_tokens
        self._num_stored = match.num_tokens // self._block_tokens
        self.views = [self._view(group, match, storing) for group in range(len(manager.layout.groups))]
        for block in self.used():
            self._usage.hold(block)

    @property
    def capacity(self) -> int:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        return self._capacity

    @property
    def history(self) -> int:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        return self._history

    @property
    def committed(self) -> int:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        return self._committed

    @property
    def num_blocks(self) -> int:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        return len(self.views[0].blocks)

    @property
    def lost(self) -> bool:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        return self._lost

    @property
    def active(self) -> bool:
        """Whether it was resumed and is not closed."""
        return self._state is _State.ACTIVE

    def used(self) -> list[Block]:
        """Every block that this sequence holds or locks, the partially matched ones last."""
        tails = (view.tail for view in self.views if view.tail is not None)
        return [*(block for view in self.views for block in view.live()), *tails]

    def chunk_end(self, start: int, end: int) -> int:  # noqa: ARG002 - of the protocol
        """``end``: V1 takes no snapshots."""
        return end

    def resume(self) -> bool:
        """Bring the matched blocks to the device; partially matched ones are copied, or claimed, into private blocks.

        Returns:
            False when there is no room (nothing has changed), or a block was damaged (:attr:`lost`).

        Raises:
            CacheStateError: it was resumed before.
        """
        self._require(_State.CREATED, "resume")
        if self._lost:
            return False
        priorities, durations_s = self._priorities(self.num_blocks, self.num_blocks + 1)
        opened = self._opening.open(self.views, priorities, durations_s, self.tally)
        self._lost = opened is Opened.DAMAGED
        if opened is not Opened.READY:
            return False
        self._retain_reused()
        self._state = _State.ACTIVE
        return True

    def suspend(self) -> None:
        """V1 has no suspended sequences.

        Raises:
            CacheStateError: always.
        """
        raise CacheStateError(f"{self.request_id}: suspend needs KV cache manager V2 (can_suspend is False)")

    def resize(self, capacity: int, history: int | None = None) -> bool:
        """Have blocks for ``capacity`` tokens in every layer group, except where the window has passed.

        Args:
            capacity: tokens; below the present capacity, trailing blocks are given back.
            history: tokens whose KV is computed or being computed; unchanged when None. It never decreases.

        Returns:
            False when there are not enough pages; nothing has changed.

        Raises:
            CacheStateError: the sequence is not active.
            ValueError: not ``present history <= history <= capacity``.
        """
        self._require(_State.ACTIVE, "resize")
        history = self._history if history is None else history
        if not self._history <= history <= capacity:
            raise ValueError(
                f"{self.request_id}: history {history} and capacity {capacity} must not be below {self._history}"
            )
        present, wanted = self.num_blocks, -(-capacity // self._block_tokens)
        new_from = [max(present, first_live_block(history, self._block_tokens, view.window)) for view in self.views]
        passing = [self._passing(view, history) for view in self.views]
        if wanted > present and not self._fits(wanted, new_from, passing):
            return False
        self._capacity, self._history = capacity, history
        self._pass_windows()
        if wanted > present:
            needs = [0] * len(self._usage.pools)
            for view, begin in zip(self.views, new_from, strict=True):
                needs[self._usage.pool_of_group[view.group]] += max(wanted - begin, 0)
            assert self._tiers.reserve(needs)
            generated = max(0, wanted - max(present, -(-self._known_length // self._block_tokens)))
            for view, begin in zip(self.views, new_from, strict=True):
                self._grow(view, min(begin, wanted), wanted)
                pages = max(wanted - begin, 0)
                self.tally.tell(self._usage.tallies.given, view.group, pages, generated, self.tally.again)
        else:
            for view in self.views:
                for block in view.cut(wanted):
                    self._usage.unlock(block)
        return True

    def commit(self, token_ids: TokenIds) -> None:
        """The KV of the next ``len(token_ids)`` tokens is computed; full blocks become reusable at once.

        Args:
            token_ids: int32; prompt tokens as they were given at creation, then generated ones.

        Raises:
            CacheStateError: the sequence is not active, :meth:`stop_committing` was called, or a peer may still write
                into the pages.
            ValueError: the tokens do not fit the capacity.
        """
        self._require(_State.ACTIVE, "commit")
        if not len(token_ids):
            return
        if self._stopped:
            raise CacheStateError(f"{self.request_id}: commit after stop_committing")
        end = self._committed + len(token_ids)
        if end > self._capacity:
            raise ValueError(f"{self.request_id}: {end} tokens committed with a capacity of {self._capacity}")
        if self._any_quarantined(self._committed // self._block_tokens):
            raise CacheStateError(f"{self.request_id}: commit of quarantined pages")
        self.tally.count()
        self._tokens.write(self._committed, token_ids)
        self._committed = end
        self._history = max(self._history, end)
        self._store_full_blocks()
        self._pass_windows()

    def note_step(self) -> None:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        self.tally.count()

    def stop_committing(self) -> None:
        """No more commits will come: the trailing partial block becomes reusable, too. Calling it again does nothing.

        Raises:
            CacheStateError: the sequence is closed.
        """
        if self._state is _State.CLOSED:
            raise CacheStateError(f"{self.request_id}: stop_committing on a closed sequence")
        if self._stopped:
            return
        self._stopped = True
        if self._state is _State.ACTIVE:
            self._store_partial_block()
            self._pass_windows()

    def close(self) -> None:
        """Store the trailing partial block and give every block back, last one first. Closing twice is harmless.

        Reusable blocks stay in the tree until they are evicted; blocks under a lease stay until its release.
        """
        if self._state is _State.CLOSED:
            return
        self.stop_committing()
        release = self._usage.unlock if self._state is _State.ACTIVE else self._usage.unhold
        for view in self.views:
            if view.tail is not None:
                self._usage.unhold(view.tail)
                view.tail = None
            for block in view.cut(0):
                release(block)
            self._index.release_anchor(view.group, view.tip)
        self._state = _State.CLOSED
        self._manager.forget(self)

    def hold(self, num_tokens: int, groups: Collection[int] | None = None) -> BlockLease:
        """Pin the blocks of the first ``num_tokens`` tokens, so that they outlive this sequence.

        Args:
            num_tokens: how many.
            groups: layer groups to pin; None: all. The lease has no blocks of the others.

        Raises:
            CacheStateError: the sequence is not active.
            ValueError: there are no blocks for so many tokens.
        """
        self._require(_State.ACTIVE, "hold")
        blocks = -(-num_tokens // self._block_tokens)
        if num_tokens < 0 or blocks > self.num_blocks:
            raise ValueError(f"{self.request_id}: no pages for {num_tokens} tokens, only {self.num_blocks} blocks")
        held = [
            view.blocks[:blocks] if groups is None or group in groups else [] for group, view in enumerate(self.views)
        ]
        return self._manager.lease(num_tokens, held)

    def page_ids(self, group: int) -> NDArray[np.int32]:
        """See :class:`~kvmesh.cache.base.SequenceCache`. Valid until the next commit, resize or close.

        Committing may exchange a block for an identical shared one.
        """
        return self.views[group].table.copy()

    def block_table_into(self, group: int, row: NDArray[np.int32]) -> int:
        """See :class:`~kvmesh.cache.base.SequenceCache`."""
        table = self.views[group].table
        row[: len(table)] = table
        return len(table)

    def scratch(self, group: int) -> Scratch | None:  # noqa: ARG002 - of the protocol
        """None: V1 has no scratch slots."""
        return None

    def _view(self, group: int, match: Match, storing: bool) -> GroupView:
        path, window = match.paths[group], self._manager.layout.groups[group].window
        live = first_live_block(match.num_tokens, self._block_tokens, window)
        blocks = [node.block if i >= live else None for i, node in enumerate(path)]
        tip = self._index.anchor(group, self.scope, path[-1] if path else None)
        tail = match.tails[group] if match.tails else None
        return GroupView(group, window, storing=storing, blocks=blocks, tip=tip, tail=tail)

    def _require(self, state: _State, action: str) -> None:
        if self._state is not state:
            raise CacheStateError(f"{self.request_id}: {action} on a sequence that is {self._state.value}")

    def _retain_reused(self) -> None:
        """Shared blocks take the priority of this request where one of its ranges touches them, else keep theirs."""
        shared = self.num_cached_tokens // self._block_tokens
        if self._retention is None or not shared:
            return
        touched = touched_blocks(self._retention, self._prompt_length, 0, shared, self._block_tokens)
        priorities, durations_s = self._priorities(0, shared)
        for number in touched.nonzero()[0].tolist():
            for view in self.views:
                if (block := view.blocks[number]) is not None:
                    self._index.set_priority(block, int(priorities[number]), float(durations_s[number]))

    def _priorities(self, begin: int, end: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        return block_priorities(self._retention, self._prompt_length, begin, end, self._block_tokens)

    def _passing(self, view: GroupView, history: int) -> int:
        """The first block that stays when ``history`` tokens are computed: what is yet to be stored does."""
        live = first_live_block(history, self._block_tokens, view.window)
        return min(live, self._num_stored) if view.storing and not self._stopped else live

    def _pass_windows(self) -> None:
        for view in self.views:
            for block in view.pass_until(self._passing(view, self._history)):
                self._usage.unlock(block)

    def _fits(self, wanted: int, new_from: list[int], passing: list[int]) -> bool:
        """Whether there is room for the new blocks, given those that only this sequence uses and that pass now."""
        room = self._tiers.available()
        for view, begin, end in zip(self.views, new_from, passing, strict=True):
            pool = self._usage.pool_of_group[view.group]
            room[pool] -= max(wanted - begin, 0)
            room[pool] += sum(block is not None and block.users == 1 for block in view.blocks[view.passed : end])
        return min(room) >= 0

    def _grow(self, view: GroupView, begin: int, end: int) -> None:
        """Append blocks up to number ``end``; the window has passed those before ``begin`` already."""
        passed: list[Block | None] = [None] * (begin - len(view.blocks))
        view.append([*passed, *self._tiers.take(view.group, *self._priorities(begin, end))])

    def _any_quarantined(self, begin: int) -> bool:
        return self._usage.quarantined > 0 and any(
            block.quarantines for view in self.views for block in view.live(begin)
        )

    def _store_full_blocks(self) -> None:
        first, last = self._num_stored, self._committed // self._block_tokens
        if last <= first or not any(view.storing for view in self.views):
            return
        chain = self._tokens.full_blocks(first, last)
        for view in self.views:
            if view.storing:
                blocks = view.blocks[first:last]
                tip, view.storing = self._index.store(view.group, view.tip, chain, blocks)
                view.blocks[first:last] = blocks
                view.refresh(first, last)
                self._index.move_anchor(view.group, view.tip, tip)
                view.tip = tip
        self._num_stored = last

    def _store_partial_block(self) -> None:
        full, rest = divmod(self._committed, self._block_tokens)
        if not rest or self._any_quarantined(full) or not any(view.storing for view in self.views):
            return
        chain = self._tokens.partial_block(self._committed)
        for view in self.views:
            block = view.blocks[full]
            if view.storing and block is not None:
                self._index.store_partial(view.group, view.tip, chain, block)
