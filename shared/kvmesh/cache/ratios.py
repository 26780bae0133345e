"""How the bytes of a level are split between its pools (semantics §2 ``pool_ratio``, §3.8); pure arithmetic.

A ratio is a share of bytes by pool, in the order of ``layout.pools``. Ratios are exact fractions inside, for no page
may be lost to rounding; a float stands for the decimal number that it is printed as.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from kvmesh.cache.demand import (
    DEFAULT_BATCH,
    Batch,
    Limits,
    batch_pages,
    constraint_batches,
    pages_bytes,
    typical_step,
)
from kvmesh.cache.layout import PageLayout
from kvmesh.config import KvCacheConfig

__all__ = [
    "InitialRatio",
    "Ratio",
    "SizingError",
    "byte_ratio",
    "exact",
    "initial_ratio",
    "pages_for_ratio",
    "ratio_of_batches",
]

Ratio = tuple[Fraction, ...]


class SizingError(ValueError):
    """The limits leave no room for a cache, or there is no limit at all; the message says which."""


def exact(value: float | Fraction) -> Fraction:
    """The number that a float is printed as: 0.7 is seven tenths."""
    return value if isinstance(value, Fraction) else Fraction(repr(float(value)))


def pages_for_ratio(
    ratio: Sequence[float | Fraction], quota_bytes: int, layout: PageLayout, floors: Sequence[int]
) -> list[int]:
    """Whole pages of each pool.

    A pool whose share does not pay its floor has its floor, and the others split the rest as before. What is left of a
    share after whole pages is not used: so more quota never means fewer pages of any pool.

    Args:
        ratio: shares of bytes, not negative and not all zero; they need not add up to 1.
        quota_bytes: of the level.
        layout: page sizes.
        floors: least pages of each pool.

    Raises:
        SizingError: the floors alone need more than the quota.
        ValueError: the ratio is not one.
    """
    shares = [exact(share) for share in ratio]
    if len(shares) != len(layout.pools) or any(share < 0 for share in shares) or not any(shares):
        raise ValueError(f"not a ratio of {len(layout.pools)} pools: {[float(share) for share in shares]}")
    if (least := pages_bytes(floors, layout)) > quota_bytes:
        raise SizingError(f"{quota_bytes} bytes are less than the {least} bytes of the pools' least pages")
    sizes = [pool.page_bytes for pool in layout.pools]
    pages = list(floors)
    left = quota_bytes
    sharing = set(range(len(sizes)))
    while sharing:
        total = sum(shares[pool] for pool in sharing)
        short = {pool for pool in sharing if shares[pool] * left < floors[pool] * sizes[pool] * total}
        if not short:
            for pool in sharing:
                pages[pool] = int(shares[pool] * left / total) // sizes[pool]
            break
        left -= sum(floors[pool] * sizes[pool] for pool in short)
        sharing -= short
    return pages


def byte_ratio(pages: Sequence[int], layout: PageLayout) -> Ratio:
    """Shares of bytes that so many pages have; there must be one page at least."""
    total = pages_bytes(pages, layout)
    return tuple(Fraction(count * pool.page_bytes, total) for count, pool in zip(pages, layout.pools, strict=True))


def ratio_of_batches(batches: Iterable[Batch], layout: PageLayout) -> Ratio:
    """The split at which each pool can serve the batch that wants most of it."""
    counts = [batch_pages(batch, layout) for batch in batches]
    return byte_ratio([max(pool) for pool in zip(*counts, strict=True)], layout)


class InitialRatio(NamedTuple):
    """How the device level is split at start, and why."""

    ratio: Ratio
    source: Literal["pool_ratio", "avg_seq_len", "constraints", "default"]
    typical_step: Batch | None = None
    """The batch that it was derived from."""
    constraints: tuple[Batch, ...] = ()
    """The batches that it was derived from; as floors they hold in any case."""
    note: str | None = None
    """A warning for the log."""


def initial_ratio(config: KvCacheConfig, layout: PageLayout, limits: Limits) -> InitialRatio:
    """The first of: ``pool_ratio``; a typical step of ``avg_seq_len``; the constraints; the default batch.

    The default batch counts only where ``pool_ratio`` does not fit the model's groups. A model with recurrent state
    and attention whose ``avg_seq_len`` is unset is taken to have half of ``max_seq_len``.

    Raises:
        SizingError: ``avg_seq_len`` is above ``max_seq_len``.
    """
    if config.avg_seq_len is not None and config.avg_seq_len > limits.max_seq_len:
        raise SizingError(f"avg_seq_len {config.avg_seq_len} is above max_seq_len {limits.max_seq_len}")
    if config.pool_ratio is not None:
        return _configured(config.pool_ratio, layout)
    avg_seq_len, note = config.avg_seq_len, None
    if avg_seq_len is None and {group.kind == "state" for group in layout.groups} == {True, False}:
        avg_seq_len = max(1, limits.max_seq_len // 2)
        note = f"avg_seq_len is not set: state and attention pools are sized for {avg_seq_len}, half of max_seq_len"
    if avg_seq_len is not None:
        step = typical_step(avg_seq_len, limits.max_batch_size, limits.max_num_tokens)
        return InitialRatio(ratio_of_batches([step], layout), "avg_seq_len", typical_step=step, note=note)
    constraints = constraint_batches(layout, limits)
    return InitialRatio(ratio_of_batches(constraints, layout), "constraints", constraints=constraints)


def _configured(pool_ratio: Sequence[float], layout: PageLayout) -> InitialRatio:
    if len(pool_ratio) != len(layout.groups):
        note = (
            f"pool_ratio has {len(pool_ratio)} values, but the model has {len(layout.groups)} layer groups: "
            "the default split is used"
        )
        return InitialRatio(ratio_of_batches([DEFAULT_BATCH], layout), "default", note=note)
    shares = [Fraction(0)] * len(layout.pools)
    for group, share in zip(layout.groups, pool_ratio, strict=True):
        shares[group.pool] += exact(share)
    total = sum(shares)
    return InitialRatio(tuple(share / total for share in shares), "pool_ratio")
