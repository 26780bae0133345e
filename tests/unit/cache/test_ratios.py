"""How a level is split between pools, and what requests need (semantics §2 pool_ratio, §3.8)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_layouts import GroupOf, layout_of

from kvmesh.cache.demand import (
    DEFAULT_BATCH,
    Limits,
    RequestShape,
    batch_pages,
    constraint_batches,
    fit_floors,
    longest_request,
    minimum_pages,
    pages_bytes,
    token_pages,
)
from kvmesh.cache.ratios import (
    SizingError,
    byte_ratio,
    exact,
    initial_ratio,
    pages_for_ratio,
    ratio_of_batches,
)
from kvmesh.cache.windows import blocks_needed
from kvmesh.config import KvCacheConfig

LIMITS = Limits(max_seq_len=4096, max_batch_size=8, max_num_tokens=512, max_util=Fraction(19, 20))
FULL, NARROW = GroupOf(10), GroupOf(5, window=64)

windows = st.one_of(st.none(), st.integers(1, 300))
groups = st.builds(GroupOf, page_bytes=st.integers(1, 9), window=windows)
groups |= st.builds(GroupOf, page_bytes=st.integers(1, 9), kind=st.just("state"))
layouts = st.builds(
    lambda groups, size: layout_of(*groups, tokens_per_block=size),
    st.lists(groups, min_size=1, max_size=4),
    st.sampled_from([2, 4, 8, 32]),
)
limits_of = st.builds(
    Limits,
    max_seq_len=st.integers(1, 400),
    max_batch_size=st.integers(1, 20),
    max_num_tokens=st.integers(1, 150),
    max_util=st.sampled_from([Fraction(1), Fraction(19, 20), Fraction(1, 2)]),
)


def slots(layout, ratio, quota: int, floors=None) -> list[int]:
    return pages_for_ratio(ratio, quota, layout, minimum_pages(layout) if floors is None else floors)


class TestPagesForRatio:
    def test_bytes_not_pages_are_in_the_ratio(self) -> None:
        """§2.2 CHECK: ratios (.75, .25) of 1000 B with 10 B and 5 B slots -> 75 and 50 slots."""
        assert slots(layout_of(FULL, NARROW), (0.75, 0.25), 1000) == [75, 50]

    def test_no_page_is_lost_to_the_rounding_of_floats(self) -> None:
        assert slots(layout_of(FULL, NARROW), (0.7, 0.3), 1000) == [70, 60]
        layout = layout_of(GroupOf(10), GroupOf(20))
        assert slots(layout, byte_ratio([10, 10], layout), 300) == [10, 10]

    def test_a_pool_below_its_floor_gets_it_and_the_others_split_the_rest(self) -> None:
        layout = layout_of(GroupOf(10), GroupOf(5), GroupOf(1))
        assert slots(layout, (0.5, 0.25, 0.25), 1000, [0, 100, 0]) == [33, 100, 166]

    def test_floors_above_the_quota(self) -> None:
        with pytest.raises(SizingError, match="1000 bytes are less than the 1005 bytes"):
            slots(layout_of(FULL, NARROW), (0.5, 0.5), 1000, [100, 1])

    @pytest.mark.parametrize("ratio", [(1.0,), (1.5, -0.5), (0.0, 0.0)])
    def test_what_is_no_ratio(self, ratio) -> None:
        with pytest.raises(ValueError, match="not a ratio of 2 pools"):
            slots(layout_of(FULL, NARROW), ratio, 1000)

    @given(layouts, st.data())
    def test_quota_and_floors_are_kept_and_more_is_never_less(self, layout, data) -> None:
        per_pool = {"min_size": len(layout.pools), "max_size": len(layout.pools)}
        floors = data.draw(st.lists(st.integers(0, 30), **per_pool))
        ratio = data.draw(st.lists(st.floats(0, 1, exclude_min=True), **per_pool))
        quota = pages_bytes(floors, layout) + data.draw(st.integers(0, 2000))
        pages = pages_for_ratio(ratio, quota, layout, floors)
        assert all(count >= floor for count, floor in zip(pages, floors, strict=True))
        used = pages_bytes(pages, layout)
        assert quota - sum(pool.page_bytes for pool in layout.pools) < used <= quota
        more = pages_for_ratio(ratio, quota + data.draw(st.integers(0, 300)), layout, floors)
        assert all(after >= before for before, after in zip(pages, more, strict=True))

    @given(layouts, st.data())
    def test_a_larger_share_is_never_fewer_pages(self, layout, data) -> None:
        ratio = data.draw(st.lists(st.integers(1, 100), min_size=len(layout.pools), max_size=len(layout.pools)))
        pool = data.draw(st.integers(0, len(ratio) - 1))
        larger = list(ratio)
        larger[pool] += data.draw(st.integers(1, 100))
        quota = pages_bytes(minimum_pages(layout), layout) + data.draw(st.integers(0, 2000))
        before, after = (slots(layout, [Fraction(share) for share in shares], quota) for shares in (ratio, larger))
        assert after[pool] >= before[pool]
        assert all(after[other] <= before[other] for other in range(len(ratio)) if other != pool)

    def test_a_float_is_the_decimal_that_it_prints_as(self) -> None:
        assert exact(0.95) == Fraction(19, 20)
        assert exact(1e-7) == Fraction(1, 10**7)


class TestConstraints:
    def test_full_attention(self) -> None:
        """§3.8: one request at max_seq_len beside minimal decodes, one fresh context at max_num_tokens."""
        long, *fresh = constraint_batches(layout_of(FULL), LIMITS)
        assert long == (RequestShape(4095, 4096), RequestShape(0, 1, 7))
        assert (RequestShape(0, 512),) in fresh
        assert batch_pages(long, layout_of(FULL)) == [1024 + 7]

    def test_a_chunk_is_at_most_the_longest_request(self) -> None:
        batches = constraint_batches(layout_of(FULL), LIMITS._replace(max_seq_len=100))
        assert all(shape.capacity <= 100 for batch in batches for shape in batch)

    @given(layouts, limits_of)
    def test_they_cover_every_chunk_and_decode_of_a_request(self, layout, limits) -> None:
        """Wherever a chunk begins, with whatever was reused: no step needs more pages of a group."""
        for group in layout.groups:
            worst = max(
                blocks_needed(
                    group,
                    layout.tokens_per_block,
                    history=history,
                    capacity=min(history + limits.max_num_tokens, limits.max_seq_len),
                )
                for history in range(limits.max_seq_len)
            )
            alone = layout_of(
                GroupOf(1, window=group.window, kind=group.kind), tokens_per_block=layout.tokens_per_block
            )
            alone_limits = limits._replace(max_batch_size=1)
            assert worst == max(batch_pages(batch, alone)[0] for batch in constraint_batches(alone, alone_limits))

    def test_recurrent_state_is_one_page_a_request(self) -> None:
        layout = layout_of(FULL, GroupOf(1000, kind="state"))
        assert batch_pages(constraint_batches(layout, LIMITS)[0], layout) == [1031, 8]


class TestFloors:
    def test_all_constraints_when_they_fit(self) -> None:
        layout = layout_of(FULL, NARROW)
        floors, fitted = fit_floors(layout, 100_000, LIMITS, minimum_pages(layout))
        # Groups of 4 tokens. Full: 1024 + 7 decodes, / .95. Window 64 and a chunk of 512 at the worst place: 145.
        assert floors == [1086, 153]
        assert fitted == LIMITS

    def test_every_group_has_room_for_the_whole_batch(self) -> None:
        """§8 item 7 (issue 15401): a windowed pool with one slot deadlocked; it has a page for each decode."""
        layout = layout_of(FULL, GroupOf(5, window=1))
        limits = LIMITS._replace(max_num_tokens=4, max_batch_size=64)
        floors, _ = fit_floors(layout, 100_000, limits, minimum_pages(layout))
        assert floors[1] >= 64

    def test_then_a_shorter_request(self) -> None:
        layout = layout_of(FULL)
        floors, fitted = fit_floors(layout, 400, LIMITS, [1])
        assert fitted == LIMITS._replace(max_seq_len=31 * 4)
        assert floors == [40]

    def test_then_nothing_beside_it(self) -> None:
        layout = layout_of(FULL)
        floors, fitted = fit_floors(layout, 70, LIMITS, [1])
        assert fitted == LIMITS._replace(max_seq_len=6 * 4, max_batch_size=1)
        assert floors == [7]

    def test_then_what_must_be(self) -> None:
        assert fit_floors(layout_of(FULL), 19, LIMITS, [1]) == ([1], None)

    @given(layouts, limits_of, st.integers(0, 3000))
    def test_they_fit_and_serve_what_they_say(self, layout, limits, extra) -> None:
        base = minimum_pages(layout)
        quota = pages_bytes(base, layout) + extra
        floors, fitted = fit_floors(layout, quota, limits, base)
        assert pages_bytes(floors, layout) <= quota
        assert all(floor >= least for floor, least in zip(floors, base, strict=True))
        if fitted is not None:
            assert longest_request(floors, layout, limits) >= fitted.max_seq_len
            decodes = batch_pages([RequestShape(0, 1, fitted.max_batch_size)], layout)
            assert all(floor >= needed for floor, needed in zip(floors, decodes, strict=True))
            larger = fitted._replace(max_seq_len=fitted.max_seq_len + layout.tokens_per_block)
            if larger.max_seq_len <= limits.max_seq_len:
                assert fit_floors(layout, quota, larger, base)[1] != larger, "a longer one fits as well"

    def test_longest_request(self) -> None:
        assert longest_request([10], layout_of(FULL), LIMITS) == 40
        assert longest_request([5000], layout_of(FULL), LIMITS) == 4096
        assert longest_request([0], layout_of(FULL), LIMITS) == 0
        # A window of 64 needs 17 pages beside chunks of one token.
        limits = LIMITS._replace(max_num_tokens=1)
        assert longest_request([5000, 17], layout_of(FULL, NARROW), limits) == 4096
        assert longest_request([5000, 16], layout_of(FULL, NARROW), limits) == 64


class TestTokens:
    def test_full_groups_keep_all_tokens_and_windows_what_a_request_needs(self) -> None:
        limits = LIMITS._replace(max_util=Fraction(1))
        assert token_pages(1000, layout_of(FULL, NARROW), limits) == [250, 145]
        assert token_pages(100_000, layout_of(FULL, NARROW), limits) == [25_000, 145]
        assert token_pages(8, layout_of(FULL, NARROW), limits) == [2, 2]

    def test_without_full_attention_the_widest_window_counts(self) -> None:
        limits = LIMITS._replace(max_util=Fraction(1), max_num_tokens=1)
        layout = layout_of(GroupOf(5, window=64), GroupOf(10, window=16))
        assert token_pages(1000, layout, limits) == [250, 5]

    def test_a_window_as_long_as_the_sequence_is_full_attention(self) -> None:
        layout = layout_of(FULL, GroupOf(5, window=4096))
        assert token_pages(10_000, layout, LIMITS._replace(max_util=Fraction(1))) == [2500, 2500]

    def test_state(self) -> None:
        layout = layout_of(FULL, GroupOf(5, kind="state"))
        assert token_pages(1000, layout, LIMITS._replace(max_util=Fraction(1))) == [250, 1]


class TestInitialRatio:
    LAYOUT = layout_of(FULL, NARROW)

    def test_pool_ratio_wins_over_avg_seq_len(self) -> None:
        """§7 T2: pool_ratio [1.0] with avg_seq_len 256: no typical step, no constraints."""
        initial = initial_ratio(KvCacheConfig(pool_ratio=[1.0], avg_seq_len=256), layout_of(FULL), LIMITS)
        assert initial.ratio == (1,)
        assert initial.typical_step is None
        assert initial.constraints == ()

    def test_pool_ratio_is_by_group_and_groups_of_a_pool_add_up(self) -> None:
        layout = layout_of(GroupOf(10), GroupOf(5, window=64), GroupOf(10, window=16))
        initial = initial_ratio(KvCacheConfig(pool_ratio=[0.5, 0.2, 0.3]), layout, LIMITS)
        assert initial.ratio == (Fraction(8, 10), Fraction(2, 10))
        assert initial.source == "pool_ratio"

    def test_pool_ratio_within_its_tolerance_adds_up_to_one(self) -> None:
        initial = initial_ratio(KvCacheConfig(pool_ratio=[0.7, 0.3 + 5e-7]), self.LAYOUT, LIMITS)
        assert sum(initial.ratio) == 1

    def test_pool_ratio_of_another_length(self) -> None:
        """§2 pool_ratio: length != number of groups -> a warning, and the default split."""
        initial = initial_ratio(KvCacheConfig(pool_ratio=[1.0]), self.LAYOUT, LIMITS)
        assert initial.source == "default"
        assert initial.note is not None
        assert "pool_ratio has 1 values, but the model has 2 layer groups" in initial.note
        # Capacity 2049, history 2048: 513 blocks, of which 17 are in the window.
        assert initial.ratio == ratio_of_batches([DEFAULT_BATCH], self.LAYOUT) == byte_ratio([513, 17], self.LAYOUT)

    def test_typical_step(self) -> None:
        """§3.8: one context of max_num_tokens, and max_batch_size - 1 decodes of avg_seq_len."""
        initial = initial_ratio(KvCacheConfig(avg_seq_len=256), self.LAYOUT, LIMITS)
        assert initial.source == "avg_seq_len"
        assert initial.typical_step == (RequestShape(0, 512), RequestShape(255, 256, 7))
        assert initial.ratio == byte_ratio([128 + 7 * 64, 128 + 7 * 16], self.LAYOUT)

    def test_without_either_the_constraints_count(self) -> None:
        """§7 T2: a prefill constraint exists even when avg_seq_len is unset."""
        initial = initial_ratio(KvCacheConfig(), self.LAYOUT, LIMITS)
        assert initial.source == "constraints"
        assert initial.typical_step is None
        assert (RequestShape(0, 512),) in initial.constraints
        assert initial.ratio == byte_ratio([1031, 145], self.LAYOUT)

    def test_state_and_attention_without_avg_seq_len(self) -> None:
        """§2 avg_seq_len: unset on a hybrid model: a warning, and half of max_seq_len."""
        layout = layout_of(FULL, GroupOf(100, kind="state"))
        initial = initial_ratio(KvCacheConfig(), layout, LIMITS)
        assert initial.typical_step == (RequestShape(0, 512), RequestShape(2047, 2048, 7))
        assert initial.note is not None
        assert "2048, half of max_seq_len" in initial.note
        assert initial.ratio == byte_ratio([128 + 7 * 512, 8], layout)

    def test_an_average_above_the_maximum(self) -> None:
        """§2.1: avg_seq_len > max_seq_len is refused at start."""
        assert initial_ratio(KvCacheConfig(avg_seq_len=4096), self.LAYOUT, LIMITS).source == "avg_seq_len"
        with pytest.raises(SizingError, match="avg_seq_len 4097 is above max_seq_len 4096"):
            initial_ratio(KvCacheConfig(avg_seq_len=4097), self.LAYOUT, LIMITS)
