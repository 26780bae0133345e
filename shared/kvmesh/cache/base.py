"""What the engine asks of a KV cache manager, V1 or V2: the interface, without behaviour.

One thread drives a manager and everything made by it; no call waits. Running out of pages is a result (``resume`` and
``resize`` return False), and then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import DeviceBuffer
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.stats import CacheStats, LevelStats
from kvmesh.cache.storage.memory import HostPool
from kvmesh.hashing import ReuseScope, TokenIds
from kvmesh.protocol.retention import RetentionConfig

__all__ = ["CacheManager", "Lease", "MatchInfo", "Scratch", "SequenceCache"]

Pages = NDArray[np.int32]


class MatchInfo(NamedTuple):
    """How much of a prompt is cached now."""

    num_tokens: int
    """Reusable tokens; always less than the prompt's length, since the last token must be computed."""
    num_full_blocks: int
    """Blocks that would be shared; a remainder of ``num_tokens`` would be copied from a further one."""
    coldest_level: int = 0
    """The coldest level that one of the pages is on: 0 means that all are on the device."""


class Scratch(NamedTuple):
    """Blocks of the present prefill step that have no page of their own in a windowed group (semantics §3.7).

    Layer ``j`` of all ``L`` layers of the group uses, for block ``begin + i``, the place that buffer ``i % L`` has
    inside slot ``slots[i // L]``: one layer is computed after the other, so all may use the same places.
    """

    begin: int
    end: int
    slots: Pages


class Lease(Protocol):
    """Pages that must stay as and where they are while somebody outside their sequence reads or writes them."""

    @property
    def num_pages(self) -> int:
        """Pages over all layer groups."""
        ...

    def page_ids(self, group: int) -> Pages:
        """Slots in the pool of ``group`` on their level by block, int32, -1 where a window has passed."""
        ...

    def levels(self, group: int) -> NDArray[np.uint8]:
        """By block the level that its page is on, uint8; other than 0 only after :meth:`let_move`."""
        ...

    def let_move(self) -> bool:
        """Nobody reads the pages now: they may fall to colder levels, and never go; False: they stay here."""
        ...

    def keep_place(self) -> bool:
        """The counterpart: they stay where they are, on the device or in host memory; False: no room now, or lost."""
        ...

    @property
    def lost(self) -> bool:
        """A colder tier could not give pages back intact: the lease can only be released."""
        ...

    def quarantine(self) -> None:
        """A peer may still write into the pages: until the release, those not reusable yet do not become so."""
        ...

    def release(self) -> None:
        """Give the pages back, once."""
        ...


class SequenceCache(Protocol):
    """The cache of one sequence: created suspended, then resumed, resized, committed, perhaps suspended, and closed.

    At every moment ``committed <= history <= capacity``.
    """

    @property
    def request_id(self) -> str:
        """For messages."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens whose KV was found at creation; less than the prompt's length."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens for which there are pages (once resumed)."""
        ...

    @property
    def history(self) -> int:
        """Tokens whose KV is computed or being computed."""
        ...

    @property
    def committed(self) -> int:
        """Tokens whose KV is computed, the reused ones included."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the capacity: the length of every block table."""
        ...

    @property
    def lost(self) -> bool:
        """A page that it needs was damaged in a cold tier: it can only be closed; a new one finds what is left."""
        ...

    def chunk_end(self, start: int, end: int) -> int:
        """Where a prefill chunk that begins at ``start`` and may go up to ``end`` has to stop.

        At a snapshot point (fork, endpoint, periodic) in between, else at ``end`` itself.
        """
        ...

    def resume(self) -> bool:
        """Bring all needed pages to the device and lock them. False: too full now (or :attr:`lost`)."""
        ...

    def suspend(self) -> None:
        """Stop computing; the pages stay held and may move to a colder level, never go."""
        ...

    def resize(self, capacity: int, history: int | None = None) -> bool:
        """Have pages for exactly ``capacity`` tokens; blocks that ``history`` leaves outside every window are freed."""
        ...

    def commit(self, token_ids: TokenIds) -> None:
        """The KV of the next tokens is computed; full blocks become reusable as the policy says."""
        ...

    def note_step(self) -> None:
        """A step was computed: in the statistics the sequence counts from now on. A commit implies this."""
        ...

    def stop_committing(self) -> None:
        """No more commits will come: the trailing partial block becomes reusable, too."""
        ...

    def close(self) -> None:
        """Give every page back, last block first. Closing twice is harmless."""
        ...

    def hold(self, num_tokens: int, groups: Collection[int] | None = None) -> Lease:
        """Pin the pages of the first ``num_tokens`` tokens on the device, so that they outlive this sequence.

        ``groups`` are the layer groups to pin, None: all; the lease has no pages of the others.
        """
        ...

    def page_ids(self, group: int) -> Pages:
        """Device slots by block, int32 ``[num_blocks]``; -1 where the window has passed or a scratch slot is used."""
        ...

    def block_table_into(self, group: int, row: Pages) -> int:
        """Write :meth:`page_ids` to the start of ``row`` and return their number; the rest is not touched."""
        ...

    def scratch(self, group: int) -> Scratch | None:
        """The blocks of ``group`` that use scratch slots until the next resize, None when there are none."""
        ...


class CacheManager(Protocol):
    """The cache of one engine."""

    layout: PageLayout

    @property
    def pools(self) -> Sequence[DeviceBuffer]:
        """Device memory of each pool: slot ``i`` begins at ``address + i * page_bytes``. It never moves."""
        ...

    @property
    def host_pools(self) -> Sequence[HostPool]:
        """Memory of the host tier by pool, for peers to read leased pages from; empty where they never are there."""
        ...

    @property
    def tiers(self) -> Sequence[str]:
        """``gpu``, ``host`` or ``disk`` by level."""
        ...

    @property
    def can_suspend(self) -> bool:
        """Whether suspended pages can leave the device: there is a colder level."""
        ...

    def block_keys(self, scope: ReuseScope, token_ids: TokenIds) -> list[bytes]:
        """Keys of the full blocks of a prompt, for :meth:`match` and :meth:`create`, to hash only once."""
        ...

    def match(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> MatchInfo:
        """How much of ``token_ids`` a sequence created now would find. Changes nothing."""
        ...

    def create(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        block_keys: list[bytes] | None = None,
        retention: RetentionConfig | None = None,
        conversation_id: str | None = None,
        reuse: bool = True,
        prompt_length: int | None = None,
        reuse_limit: int | None = None,
        counted: bool = True,
        again: bool = False,
    ) -> SequenceCache:
        """A new suspended sequence that holds the cached prefix of its prompt.

        Args:
            scope: where its blocks may be reused.
            token_ids: the prompt, int32, at least one token; tokens that were generated already may follow.
            request_id: for messages.
            block_keys: :meth:`block_keys` of the same prompt, when the caller has them.
            retention: priorities of its blocks, validated.
            conversation_id: for the ``per_conversation`` policy; ignored under the others, and with a warning while
                another sequence of the conversation is open.
            reuse: False: neither look for cached blocks nor leave any.
            prompt_length: how many of ``token_ids`` are the prompt; None: all.
            reuse_limit: take at most so many leading tokens from the cache; None: as many as there are.
            counted: False: keep it out of the statistics, and of what decides how memory is split between pools.
            again: this sequence was counted before, and closed: it is no prompt, and its own blocks are no hits.
        """
        ...

    def prefetch(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        *,
        block_keys: list[bytes] | None = None,
        keep: Sequence[list[bytes]] = (),
    ) -> int:
        """Bring disk-tier pages of a prompt's cached prefix up to the host tier, best effort; returns their number.

        Args:
            scope: of the prompt.
            token_ids: the prompt.
            block_keys: :meth:`block_keys` of the same prompt, when the caller has them.
            keep: keys of the blocks of other prompts whose pages must not be pushed down for that.
        """
        ...

    def tick(self, now_s: float) -> None:
        """Let retention durations that have run out by ``now_s`` (monotonic) expire. Call it once a step."""
        ...

    def pages_needed(self, *, history: int, capacity: int) -> list[int]:
        """Device pages by pool of a sequence with ``history`` computed tokens and pages for ``capacity``."""
        ...

    def available_pages(self) -> list[int]:
        """By pool, device pages that can be had now: free ones and those that eviction or offload can free."""
        ...

    def reservable_pages(self) -> list[int]:
        """By pool, device pages that sequences can own in all: the pool without what leases pin."""
        ...

    def rebalance(self, now_s: float) -> bool:
        """Move memory between pools when the auto-tuner wants it and every sequence is suspended; whether it did."""
        ...

    def wants_rebalance(self, now_s: float) -> bool:
        """Whether :meth:`rebalance` would do something if every sequence were suspended."""
        ...

    def stats(self) -> CacheStats:
        """Pages by state and counters, in constant time."""
        ...

    def level_stats(self) -> list[LevelStats]:
        """Pages by level and layer group; linear in pages, for reports at a human pace."""
        ...

    def check_integrity(self) -> None:
        """Check the bookkeeping of every page. Linear in pages.

        Raises:
            CacheIntegrityError: something contradicts itself.
        """
        ...

    def clear_reusable_blocks(self) -> None:
        """Forget every reusable block.

        Raises:
            CacheBusyError: a sequence is open.
        """
        ...

    def close(self) -> None:
        """Forget every block and give the memory (and files) back. Closing twice is harmless.

        Raises:
            CacheBusyError: a sequence or a lease is open.
        """
        ...
