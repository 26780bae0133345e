"""Runs of neighbouring pages, so that they move in one piece; pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageRun", "page_runs"]


class PageRun(NamedTuple):
    """``length`` pages from ``src`` on go to as many from ``dst`` on."""

    src: int
    dst: int
    length: int


def page_runs(src: NDArray[np.int32], dst: NDArray[np.int32]) -> list[PageRun]:
    """The moves ``src[i]`` to ``dst[i]`` as runs in which both sides advance by one, in the order of ``src``.

    Args:
        src: int32 ``[n]``, no page twice.
        dst: int32 ``[n]``.
    """
    if not len(src):
        return []
    order = np.argsort(src, kind="stable")
    ordered_src, ordered_dst = src[order], dst[order]
    breaks = np.flatnonzero((np.diff(ordered_src) != 1) | (np.diff(ordered_dst) != 1)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(np.append(begins, len(src)))
    return [
        PageRun(s, d, n)
        for s, d, n in zip(ordered_src[begins].tolist(), ordered_dst[begins].tolist(), counts.tolist(), strict=True)
    ]
