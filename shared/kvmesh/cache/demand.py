"""How many pages requests need: typical steps, constraints, and floors of the pools (semantics §3.8); pure arithmetic.

Pages are counted by pool, in the order of ``layout.pools``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from kvmesh.cache.layout import LayerGroupLayout, PageLayout
from kvmesh.cache.windows import blocks_needed

__all__ = [
    "DEFAULT_BATCH",
    "Batch",
    "Limits",
    "RequestShape",
    "batch_pages",
    "constraint_batches",
    "constraint_pages",
    "fit_floors",
    "largest_at_least_one",
    "longest_request",
    "minimum_pages",
    "pages_bytes",
    "token_pages",
    "typical_step",
]


class RequestShape(NamedTuple):
    """Requests of one shape."""

    history: int
    """Tokens computed."""
    capacity: int
    """Tokens that there are pages for."""
    num_requests: int = 1
    """How many such requests."""


Batch = tuple[RequestShape, ...]

DEFAULT_BATCH: Batch = (RequestShape(history=2048, capacity=2049),)
"""What the pools are split for when nothing is known."""


class Limits(NamedTuple):
    """What a server lets run at a time."""

    max_seq_len: int
    """Longest request in tokens."""
    max_batch_size: int
    """Requests that decode at a time."""
    max_num_tokens: int
    """Tokens of a step, and so of a prefill chunk."""
    max_util: Fraction
    """Highest utilisation at which a sequence can resume, so that its pages may not fill a pool beyond it."""


def batch_pages(batch: Iterable[RequestShape], layout: PageLayout) -> list[int]:
    """Pages that a batch needs."""
    pages = [0] * len(layout.pools)
    for shape in batch:
        for group in layout.groups:
            needed = blocks_needed(group, layout.tokens_per_block, history=shape.history, capacity=shape.capacity)
            pages[group.pool] += shape.num_requests * needed
    return pages


def minimum_pages(layout: PageLayout) -> list[int]:
    """One page for every layer group: less cannot hold a token."""
    return [len(pool.groups) for pool in layout.pools]


def pages_bytes(pages: Sequence[int], layout: PageLayout) -> int:
    """Bytes of so many pages."""
    return sum(count * pool.page_bytes for count, pool in zip(pages, layout.pools, strict=True))


def typical_step(avg_seq_len: int, max_batch_size: int, max_num_tokens: int) -> Batch:
    """A step in the middle of a workload: one context request, and decodes of the average length besides."""
    decode = RequestShape(history=avg_seq_len - 1, capacity=avg_seq_len, num_requests=max_batch_size - 1)
    return (RequestShape(history=0, capacity=max_num_tokens), decode)


def constraint_batches(layout: PageLayout, limits: Limits) -> tuple[Batch, ...]:
    """What must always fit, each for itself.

    Semantics §3.8: the longest request beside minimal decodes of the others, and one fresh context of a whole step.
    Besides, a later chunk of the longest prompt: a windowed group then needs the window and the chunk. Where the chunk
    begins inside a block decides over one page more, and reused prefixes may begin it anywhere, so that the worst
    place is taken.
    """
    length, chunk = limits.max_seq_len, min(limits.max_num_tokens, limits.max_seq_len)
    last = length - chunk
    starts = {0, last}
    for group in layout.groups:
        if group.window is not None:
            worst = last - (last - (group.window - 2)) % layout.tokens_per_block
            starts.add(max(0, worst))
    longest = RequestShape(history=length - 1, capacity=length)
    minimal = RequestShape(history=0, capacity=1, num_requests=limits.max_batch_size - 1)
    return (
        (longest, minimal),
        *((RequestShape(history=start, capacity=start + chunk),) for start in sorted(starts)),
    )


def constraint_pages(layout: PageLayout, limits: Limits) -> list[int]:
    """Pages with which every one of :func:`constraint_batches` fits."""
    counts = [batch_pages(batch, layout) for batch in constraint_batches(layout, limits)]
    return [max(pool) for pool in zip(*counts, strict=True)]


def token_pages(max_tokens: int, layout: PageLayout, limits: Limits) -> list[int]:
    """Pages that ``max_tokens`` cached tokens need, and that still can be resumed.

    Groups with the widest window keep all of them; a narrower one needs what the longest single request does, for how
    many requests the tokens belong to is the business of the ratio between the pools.
    """
    pages = [0] * len(layout.pools)
    widest = max((_window(group, limits.max_seq_len) for group in layout.groups if group.kind != "state"), default=0)
    short = limits._replace(max_seq_len=max(1, min(max_tokens, limits.max_seq_len)), max_batch_size=1)
    shapes = [shape for batch in constraint_batches(layout, short) for shape in batch if shape.num_requests]
    for group in layout.groups:
        if group.kind != "state" and _window(group, limits.max_seq_len) == widest:
            pages[group.pool] += layout.num_blocks(max_tokens)
        else:
            pages[group.pool] += max(
                blocks_needed(group, layout.tokens_per_block, history=shape.history, capacity=shape.capacity)
                for shape in shapes
            )
    return _resumable(pages, limits.max_util)


def fit_floors(
    layout: PageLayout, quota_bytes: int, limits: Limits, base: Sequence[int]
) -> tuple[list[int], Limits | None]:
    """The least pages of each pool, as demanding as the quota allows.

    In this order: all constraints; those with a shorter longest request; those with a shorter one and nothing beside
    it; ``base`` alone.

    Args:
        layout: page sizes.
        quota_bytes: of the level.
        limits: of the server.
        base: pages that each pool has in any case; they must fit.

    Returns:
        The floors, and the limits that they stand for, None for ``base`` alone.
    """

    def floors(limits: Limits) -> list[int]:
        peak = (batch_pages(batch, layout) for batch in constraint_batches(layout, limits))
        return [
            max(counts) for counts in zip(base, *(_resumable(pages, limits.max_util) for pages in peak), strict=True)
        ]

    for batch_size in dict.fromkeys((limits.max_batch_size, 1)):
        tried = limits._replace(max_batch_size=batch_size)
        length = _longest(lambda limits: pages_bytes(floors(limits), layout) <= quota_bytes, tried, layout)
        if length:
            tried = tried._replace(max_seq_len=length)
            return floors(tried), tried
    return list(base), None


def longest_request(pages: Sequence[int], layout: PageLayout, limits: Limits) -> int:
    """Tokens of the longest request that so many pages hold with all else empty, at most ``max_seq_len``; 0: none."""

    def fits(limits: Limits) -> bool:
        return all(needed <= there for needed, there in zip(constraint_pages(layout, limits), pages, strict=True))

    return _longest(fits, limits._replace(max_batch_size=1), layout)


def largest_at_least_one(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 .. ``limit`` that fits, 0 when none does; whatever is below one that fits must fit as well."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _longest(fits: Callable[[Limits], bool], limits: Limits, layout: PageLayout) -> int:
    """``max_seq_len`` if it fits, else the longest in whole blocks, 0 for none."""
    if fits(limits):
        return limits.max_seq_len
    size = layout.tokens_per_block
    whole = (limits.max_seq_len - 1) // size
    return size * largest_at_least_one(whole, lambda blocks: fits(limits._replace(max_seq_len=blocks * size)))


def _resumable(pages: Sequence[int], max_util: Fraction) -> list[int]:
    return [math.ceil(count / max_util) for count in pages]


def _window(group: LayerGroupLayout, max_seq_len: int) -> int:
    return max_seq_len if group.window is None else min(group.window, max_seq_len)
