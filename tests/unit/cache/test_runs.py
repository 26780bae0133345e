"""Runs of neighbouring pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.runs import PageRun, page_runs


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_examples() -> None:
    assert page_runs(ids(), ids()) == []
    assert page_runs(ids(4), ids(9)) == [PageRun(4, 9, 1)]
    assert page_runs(ids(2, 0, 1), ids(7, 5, 6)) == [PageRun(0, 5, 3)]
    assert page_runs(ids(0, 1, 2, 3), ids(5, 6, 1, 2)) == [PageRun(0, 5, 2), PageRun(2, 1, 2)]
    assert page_runs(ids(1, 2), ids(5, 4)) == [PageRun(1, 5, 1), PageRun(2, 4, 1)]


@given(st.lists(st.integers(0, 12), unique=True), st.randoms(use_true_random=False))
def test_every_move_is_in_one_run(src: list[int], random: object) -> None:
    dst = random.sample(range(20), len(src))  # type: ignore[attr-defined]
    runs = page_runs(ids(*src), ids(*dst))
    moves = [(run.src + i, run.dst + i) for run in runs for i in range(run.length)]
    assert moves == sorted(zip(src, dst, strict=True))
    ends = {(run.src + run.length, run.dst + run.length) for run in runs}
    assert not ends & {(run.src, run.dst) for run in runs}, "two runs could be one"
