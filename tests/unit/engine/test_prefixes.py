"""Common prefixes by block keys, against comparing tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.prefixes import UnfinishedPrefixes, shared_blocks
from kvmesh.hashing import v2_block_keys

BLOCK = 2
ROOT = bytes(32)
prompts = st.lists(st.integers(0, 1), max_size=16)


def keys(prompt: list[int]) -> list[bytes]:
    return v2_block_keys(np.array(prompt, dtype=np.int32), BLOCK, ROOT)


def common(one: list[int], other: list[int]) -> int:
    """Whole blocks that two prompts begin with alike."""
    blocks = 0
    while (
        len(one) >= (blocks + 1) * BLOCK
        and len(other) >= (blocks + 1) * BLOCK
        and one[: (blocks + 1) * BLOCK] == other[: (blocks + 1) * BLOCK]
    ):
        blocks += 1
    return blocks


@given(mine=prompts, others=st.lists(prompts, max_size=5))
def test_the_longest_common_prefix_is_found(mine: list[int], others: list[list[int]]) -> None:
    found = UnfinishedPrefixes(keys(other) for other in others[:2])
    for other in others[2:]:
        found.add(keys(other))
    assert found.shared_blocks(keys(mine)) == max((common(mine, other) for other in others), default=0)
    for other in others:
        assert shared_blocks(keys(mine), keys(other)) == common(mine, other)


def test_few_keys_are_compared() -> None:
    """Logarithmic in the length, and one comparison when nothing can be gained."""

    class Counted(list[bytes]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Counted.reads += 1
            return super().__getitem__(index)

    mine = Counted(keys([0] * 2048))
    assert shared_blocks(mine, keys([0] * 2048)) == 1024
    assert Counted.reads <= 12
    Counted.reads = 0
    assert shared_blocks(mine, keys([0] * 200 + [1] * 1848), 1000) == 1000
    assert Counted.reads == 1
