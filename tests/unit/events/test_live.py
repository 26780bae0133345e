"""What a publisher keeps to tell its state again: all of it, and not much more than what is still there."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.events.encoding import PackedTokens
from kvmesh.events.live import LiveBlocks
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

SIZE = 4
MEDIA = ("GPU", "CPU")
SLACK_BYTES = 300_000
"""Of the interpreter: small objects kept for reuse, a table that has grown."""

Told = dict[tuple[int, str | None], tuple[int | None, list[int], list[str] | None]]
"""By hash and medium: parent, tokens and extra keys."""


def stored(first: int, count: int, *, keys: bool = False, packed: bool = True) -> BlockStored:
    """A sequence of blocks; block ``n`` has ``n`` as its hash and as every token."""
    hashes = list(range(first, first + count))
    tokens = np.repeat(np.array(hashes, np.int32), SIZE)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=PackedTokens([tokens]) if packed else tokens.tolist(),
        block_size=SIZE,
        extra_keys=[[str(number)] if number % 3 else None for number in hashes] if keys else None,
    )


def told(events: list[KvEvent]) -> Told:
    """What a reader holds afterwards; it has heard of a block's parent before the block."""
    held: Told = {}
    for event in events:
        match event:
            case AllBlocksCleared():
                held.clear()
            case BlockStored():
                parent = event.parent_block_hash
                for at, number in enumerate(event.block_hashes):
                    tokens = list(event.token_ids[at * SIZE : (at + 1) * SIZE])
                    keys = event.extra_keys[at] if isinstance(event.extra_keys, list) else None
                    held[number, event.medium] = parent, tokens, keys
                    parent = number
            case _:
                raise AssertionError(f"{event} in a state")
    return held


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "remove", "move"]),
            st.integers(0, 40),
            st.integers(1, 17),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_the_state_is_what_was_told_and_not_taken_back(steps: list[tuple[str, int, int, bool]]) -> None:
    live, held, sources = LiveBlocks(), set[tuple[int, str]](), dict[int, BlockStored]()
    for kind, first, count, flag in steps:
        span = range(first, first + count)
        if kind == "store":
            event = stored(first, count, keys=flag, packed=not flag)
            live.take_in([event])
            for number in span:
                if not any((number, medium) in held for medium in MEDIA):
                    sources[number] = event
            held |= {(number, "GPU") for number in span}
        elif kind == "remove":
            medium = MEDIA[flag]
            live.take_in([BlockRemoved(block_hashes=list(span), medium=medium)])
            held -= {(number, medium) for number in span}
        else:
            known = [number for number in reversed(span) if any((number, medium) in held for medium in MEDIA)]
            moved = BlockStored(block_hashes=known, parent_block_hash=None, token_ids=[], block_size=SIZE, medium="CPU")
            if known:
                again = told(live.take_in([moved]))
                assert sorted(again) == [(number, "CPU") for number in sorted(known)]
            held |= {(number, "CPU") for number in known}
    state = told(list(live.events()))
    assert set(state) == held
    for (number, _), (parent, tokens, keys) in state.items():
        event = sources[number]
        first = event.block_hashes[0]
        assert parent == (None if number == first else number - 1)
        assert tokens == [number] * SIZE
        assert keys == (event.extra_keys[number - first] if isinstance(event.extra_keys, list) else None)
    assert len(live) == len({number for number, _ in held})


@pytest.mark.parametrize("left", ["the first", "each hundredth"])
def test_a_block_that_stays_does_not_keep_those_that_went(left: str) -> None:
    """A cache evicts the ends of conversations first."""
    size, blocks, conversations = 16, 500, 60
    live = LiveBlocks()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for conversation in range(conversations):
        hashes = list(range(conversation * blocks + 2**40, (conversation + 1) * blocks + 2**40))
        tokens = PackedTokens([np.full((blocks, size), conversation, np.int32)])
        live.take_in([BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=size)])
        gone = hashes[1:] if left == "the first" else [number for number in hashes if number % 100]
        for begin in range(0, len(gone), 50):
            live.take_in([BlockRemoved(block_hashes=gone[begin : begin + 50])])
        del hashes, tokens, gone
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(live) in (conversations, 5 * conversations)
    assert after - before < len(live) * (1000 + 4 * size) + SLACK_BYTES


def test_a_part_of_an_array_does_not_keep_the_array() -> None:
    live = LiveBlocks()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(100):
        prompt = np.full(100_000, number, np.int32)
        tokens = PackedTokens([prompt[:SIZE]])
        live.take_in([BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=tokens, block_size=SIZE)])
    del prompt, tokens
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100 * (1000 + 4 * SIZE) + SLACK_BYTES
    assert told(list(live.events()))[7, "GPU"] == (None, [7] * SIZE, None)
