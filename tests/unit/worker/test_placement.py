"""Which attention data-parallel rank gets a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmesh.protocol.engine import Generate
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.sampling import SamplingParams
from kvmesh.worker import placement
from kvmesh.worker.placement import PromptMemory, RankPlacer, RankView, least_cost

BLOCK = 4
IDLE = [0, 0]


def request(*blocks: int, tail: int = 1, **fields: Any) -> Generate:
    """A prompt of full blocks, each of one repeated token, and a few tokens more."""
    tokens = [token for block in blocks for token in [block] * BLOCK] + [999] * tail
    return Generate(
        request_id="r",
        prompt_token_ids=np.array(tokens, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=1),
        **fields,
    )


@pytest.fixture
def placer() -> RankPlacer:
    return RankPlacer(2, tokens_per_block=BLOCK, capacity_blocks=64)


class TestLeastCost:
    @pytest.mark.parametrize(
        ("views", "rank"),
        [
            ([RankView(0, 0), RankView(3, 0)], 1),
            ([RankView(0, 0), RankView(3, 2)], 1),
            ([RankView(0, 0), RankView(3, 4)], 0),
            ([RankView(1, 0), RankView(3, 2)], 0),  # equal cost: the less loaded one
            ([RankView(5, 1), RankView(5, 0), RankView(5, 2)], 1),
        ],
    )
    def test_blocks_to_compute_weigh_as_much_as_sequences(self, views: list[RankView], rank: int) -> None:
        assert {least_cost(views, 5, turn) for turn in range(3)} == {rank}

    def test_equals_take_turns(self) -> None:
        views = [RankView(2, 1), RankView(0, 0), RankView(2, 1)]
        assert [least_cost(views, 4, turn) for turn in range(4)] == [0, 2, 0, 2]


class TestPromptMemory:
    def test_leading_blocks_count(self) -> None:
        memory = PromptMemory(8)
        memory.remember([1, 2, 3])
        assert [memory.held(prompt) for prompt in ([1, 2, 9], [9, 2], [1, 2, 3, 4], [])] == [2, 0, 3, 0]

    def test_the_ends_of_the_oldest_prompts_go_first(self) -> None:
        memory = PromptMemory(4)
        memory.remember([1, 2, 3])
        memory.remember([7, 8])
        assert (memory.held([1, 2, 3]), memory.held([7, 8]), len(memory)) == (2, 2, 4)
        memory.remember([1, 2])  # used again: the other prompt is the older one now
        memory.remember([5])
        assert (memory.held([1, 2]), memory.held([7, 8]), memory.held([5])) == (2, 1, 1)

    def test_of_a_prompt_that_is_too_long_the_beginning_stays(self) -> None:
        memory = PromptMemory(2)
        memory.remember([1, 2, 3])
        assert (memory.held([1, 2, 3]), len(memory)) == (2, 2)


class TestPlacer:
    def test_a_prompt_goes_where_its_prefix_is(self, placer: RankPlacer) -> None:
        first = placer.place(request(1, 2, 3), IDLE)
        other = placer.place(request(7, 8), IDLE)
        assert {first, other} == {0, 1}
        for _ in range(3):
            assert placer.place(request(1, 2, 3, 4), IDLE) == first
            assert placer.place(request(7, 9), IDLE) == other

    def test_a_popular_prefix_does_not_bury_its_rank(self, placer: RankPlacer) -> None:
        holder = placer.place(request(1, 2), IDLE)
        busy = [0, 0]
        busy[holder] = 3
        assert placer.place(request(1, 2, 5), busy) != holder

    def test_other_salts_have_other_prefixes(self, placer: RankPlacer) -> None:
        holder = placer.place(request(1, 2, 3, cache_salt="a"), IDLE)
        active = [0, 0]
        active[holder] = 1
        assert placer.place(request(1, 2, 3, cache_salt="a"), active) == holder
        assert placer.place(request(1, 2, 3, cache_salt="b"), active) != holder

    def test_without_reuse_only_the_load_counts(self) -> None:
        placer = RankPlacer(2, tokens_per_block=BLOCK, capacity_blocks=0)
        first = placer.place(request(1, 2, 3), IDLE)
        active = [0, 0]
        active[first] = 1
        wish = {"dp_rank": first, "dp_matched_tokens": 12}
        assert placer.place(request(1, 2, 3, **wish), active) != first

    def test_an_order_is_obeyed_and_remembered(self, placer: RankPlacer) -> None:
        assert placer.place(request(1, 2, 3, dp_rank=1), [0, 50]) == 1
        assert placer.place(request(1, 2, 3), IDLE) == 1

    @pytest.mark.parametrize(("matched", "active", "rank"), [(12, [0, 2], 1), (12, [0, 4], 0), (4, [0, 2], 0)])
    def test_a_wish_counts_as_a_known_prefix(
        self, placer: RankPlacer, matched: int, active: list[int], rank: int
    ) -> None:
        assert placer.place(request(1, 2, 3, dp_rank=1, dp_matched_tokens=matched), active) == rank

    def test_a_wish_is_not_worth_more_than_the_prompt(self, placer: RankPlacer) -> None:
        assert placer.place(request(1, dp_rank=1, dp_matched_tokens=4000), [0, 2]) == 0

    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("rank", [-1, 2, 7])
    def test_a_wish_for_a_rank_that_there_is_not_counts_for_nothing(self, size: int, rank: int) -> None:
        """The index may know a server as it was before it was started anew with fewer ranks."""
        placer = RankPlacer(size, tokens_per_block=BLOCK, capacity_blocks=8)
        assert placer.place(request(1, 2, 3, dp_rank=rank, dp_matched_tokens=12), [0, 1][:size]) == 0

    def test_a_conversation_stays(self, placer: RankPlacer) -> None:
        rank = placer.place(request(1, conversation_id="c"), IDLE)
        elsewhere = placer.place(request(5, 6, 7), IDLE)
        assert elsewhere != rank
        crowded = [0, 0]
        crowded[rank] = 9
        wish = {"dp_rank": elsewhere, "dp_matched_tokens": 12}
        assert placer.place(request(5, 6, 7, conversation_id="c", **wish), crowded) == rank
        # The same id under another salt is another conversation.
        assert placer.place(request(5, 6, 7, conversation_id="c", cache_salt="s"), crowded) == elsewhere

    def test_the_order_moves_the_conversation(self, placer: RankPlacer) -> None:
        rank = placer.place(request(1, conversation_id="c"), IDLE)
        assert placer.place(request(1, conversation_id="c", dp_rank=1 - rank), IDLE) == 1 - rank
        assert placer.place(request(2, conversation_id="c"), IDLE) == 1 - rank

    def test_conversations_that_are_silent_for_long_are_forgotten(
        self, placer: RankPlacer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(placement, "MAX_CONVERSATIONS", 1)
        assert placer.place(request(1, conversation_id="c", dp_rank=1), IDLE) == 1
        placer.place(request(2, conversation_id="d"), IDLE)
        assert placer.place(request(9, conversation_id="c"), [0, 9]) == 0

    @pytest.mark.parametrize("size", [1, 2])
    def test_there_are_no_other_ranks(self, size: int) -> None:
        placer = RankPlacer(size, tokens_per_block=BLOCK, capacity_blocks=8)
        with pytest.raises(ApiError, match=f"ranks 0 to {size - 1}") as error:
            placer.place(request(1, dp_rank=size), [0] * size)
        assert (error.value.status, error.value.code) == (400, "no_such_rank")

    def test_a_single_rank_remembers_nothing(self) -> None:
        placer = RankPlacer(1, tokens_per_block=BLOCK, capacity_blocks=8)
        assert placer.place(request(1, conversation_id="c"), [5]) == 0
