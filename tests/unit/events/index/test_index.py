"""What the index claims of each worker: leading blocks, per tier and scope, and never more than there is."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Cleared, Removed, Stored, Tier
from kvmesh.hashing import local_hashes, salt_id, sequence_hashes

BLOCK = 2
MAX_PARKED_RUNS = 256
"""Of one source."""
A, B = Source("a"), Source("b")


def prompt(*blocks: int) -> np.ndarray:
    return np.repeat(np.array(blocks, np.int32), BLOCK)


def stored(hashes: list[int], blocks: Iterable[int] = (), parent: int | None = None, **fields: Any) -> Stored:
    """Blocks whose tokens are all one number."""
    fields.setdefault("block_size", BLOCK)
    return Stored(hashes=hashes, parent=parent, token_ids=prompt(*blocks), **fields)


def removed(*hashes: int, tier: Tier = Tier.DEVICE, group: int | None = None) -> Removed:
    return Removed(hashes=list(hashes), tier=tier, group=group)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    index.add(A, model="m")
    index.add(B, model="m")
    return index


def device(index: PrefixIndex, *blocks: int, **scope: Any) -> dict[str, int]:
    return {
        match.instance_id: match.device_tokens // BLOCK for match in index.match(prompt(*blocks), model="m", **scope)
    }


def tiers(index: PrefixIndex, *blocks: int) -> dict[str, tuple[int, int, int]]:
    return {
        match.instance_id: (match.device_tokens // BLOCK, match.host_tokens // BLOCK, match.disk_tokens // BLOCK)
        for match in index.match(prompt(*blocks), model="m")
    }


class TestMatching:
    def test_workers_with_different_hashes_meet(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2], [1, 2])])
        index.apply(B, [stored([900], [1])])
        assert device(index, 1, 2, 3) == {"a": 2, "b": 1}
        assert device(index, 1, 9) == {"a": 1, "b": 1}
        assert device(index, 9) == {}

    def test_a_partial_block_never_counts(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1])])
        (match,) = index.match(prompt(1, 2)[:3], model="m")
        assert match.device_tokens == BLOCK
        assert index.match(prompt(1)[:1], model="m") == []
        assert index.match(prompt(), model="m") == []

    def test_branches_share_their_beginning(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2, 3], [1, 2, 3]), stored([4], [4], parent=1)])
        assert device(index, 1, 2, 3) == {"a": 3}
        assert device(index, 1, 4, 3) == {"a": 2}

    @pytest.mark.parametrize("length", range(1, 40))
    def test_every_end_of_a_prefix_is_found(self, length: int) -> None:
        index = PrefixIndex()
        workers = [Source(f"w{i}") for i in range(length + 1)]
        for held, worker in enumerate(workers):
            index.add(worker, model="m")
            if held:
                index.apply(worker, [stored(list(range(1, held + 1)), range(held))])
        assert device(index, *range(length)) == {f"w{held}": held for held in range(1, length + 1)}
        assert device(index, *range(length), 99) == {f"w{held}": held for held in range(1, length + 1)}

    def test_ranks_of_a_worker_are_told_apart(self, index: PrefixIndex) -> None:
        rank = Source("a", 1)
        index.add(rank, model="m")
        index.apply(A, [stored([1], [1])])
        index.apply(rank, [stored([1, 2], [1, 2])])
        found = index.match(prompt(1, 2), model="m")
        assert {(match.dp_rank, match.device_tokens) for match in found} == {(0, BLOCK), (1, 2 * BLOCK)}

    def test_block_sizes_live_side_by_side(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2], [1, 1])])
        index.apply(B, [Stored(hashes=[5], parent=None, token_ids=prompt(1, 1), block_size=2 * BLOCK)])
        assert device(index, 1, 1) == {"a": 2, "b": 2}
        assert device(index, 1) == {"a": 1}
        assert device(index, 1, 1, block_size=BLOCK) == {"a": 2}

    def test_a_block_size_does_not_change_within_a_chain(self, index: PrefixIndex) -> None:
        longer = Stored(hashes=[2], parent=1, token_ids=prompt(1, 1), block_size=2 * BLOCK)
        index.apply(A, [stored([1], [1]), longer])
        assert index.statistics().block_size_changes_total == 1
        assert index.num_held(A) == 1

    def test_by_rolling_hashes(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2], [1, 2])])
        hashes = sequence_hashes(local_hashes(prompt(1, 2, 3), BLOCK))
        (match,) = index.match_hashes(hashes, model="m")
        assert match.device_tokens == 2 * BLOCK


class TestScopes:
    def test_models_tenants_and_adapters_do_not_meet(self) -> None:
        index = PrefixIndex()
        index.add(A, model="m")
        index.add(B, model="m", tenant="t")
        index.add(Source("c"), model="other")
        for source in index.sources():
            index.apply(source, [stored([1], [1]), stored([2], [1], lora=7), stored([3], [1], lora="name")])
        assert device(index, 1) == {"a": 1}
        assert device(index, 1, tenant="t") == {"b": 1}
        assert device(index, 1, lora=7) == device(index, 1, lora="name") == {"a": 1}
        assert device(index, 1, lora=8) == {}
        assert index.match(prompt(1), model="nobody's") == []

    def test_kvmesh_workers_send_the_number_of_a_salt_and_vllm_the_salt(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1], salt=str(salt_id("s"))), stored([2], [2], parent=1)])
        index.apply(B, [stored([1], [1], salt="s")])
        assert device(index, 1, 2, cache_salt="s") == {"a": 2, "b": 1}
        assert device(index, 1, 2) == {}
        assert device(index, 1, 2, cache_salt="other") == {}

    def test_a_source_may_have_an_adapter_and_a_salt_of_its_own(self) -> None:
        index = PrefixIndex()
        index.add(A, model="m", lora="x", salt="s")
        index.apply(A, [stored([1], [1])])
        assert device(index, 1, lora="x", cache_salt="s") == {"a": 1}
        assert device(index, 1) == {}

    def test_content_beside_the_tokens_keeps_blocks_apart(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2], [1, 2], extra_keys=[None, ["image"]])])
        index.apply(B, [stored([1, 2], [1, 2])])
        assert device(index, 1, 2) == {"a": 1, "b": 2}

    def test_an_empty_scope_is_not_kept(self, index: PrefixIndex) -> None:
        for lora in range(1, 50):
            index.apply(A, [stored([lora], [1], lora=lora), removed(lora)])
        assert (index.statistics().scopes, index.statistics().blocks) == (0, 0)

    @pytest.mark.parametrize("other", [{"lora": "x"}, {"lora": 3}, {"salt": "s"}, {"tenant": "t"}, {"model": "n"}])
    @pytest.mark.parametrize("parked", [False, True])
    def test_a_block_that_names_another_scope_than_its_parent_is_in_neither(
        self, index: PrefixIndex, other: dict[str, Any], parked: bool
    ) -> None:
        """To believe its place would promise the tokens of one adapter or salt to requests without it."""
        told = [stored([1], [1]), stored([2], [2], parent=1, **other), stored([3], [3], parent=2)]
        index.apply(A, told[1:] + told[:1] if parked else told)
        assert device(index, 1, 2, 3) == {"a": 1}
        asked = {"cache_salt" if key == "salt" else key: value for key, value in other.items()}
        assert index.match(prompt(1, 2), **({"model": "m"} | asked)) == []
        assert index.statistics().scope_changes_total == 1

    def test_what_a_block_does_not_name_is_its_parents(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1], lora="x", salt="s"), stored([2], [2], parent=1, lora="x")])
        index.apply(A, [stored([3], [3], parent=2), stored([4], [4], parent=3, salt="s")])
        [match] = index.match(prompt(1, 2, 3, 4), model="m", lora="x", cache_salt="s")
        assert match.device_tokens == 4 * BLOCK
        assert index.statistics().scope_changes_total == 0


class TestDoubtfulHashes:
    """Engines that hash tokens alone give one hash to blocks of several adapters or salts, and removals name none.

    Nothing may be claimed that is not held; less may be.
    """

    def test_what_continues_one_of_two_blocks_has_no_place(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1], salt="s"), stored([2], [2], parent=1)])
        assert device(index, 1, 2, cache_salt="s") == {"a": 1}
        assert device(index, 1, 2) == {}
        index.apply(A, [stored([1], [1])])
        assert device(index, 1, 2) == {"a": 1}

    def test_a_removal_takes_what_is_claimed(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2], [1, 2]), stored([1, 2], [1, 2], salt="s"), removed(2), removed(1)])
        assert index.num_held(A) == 0
        index.apply(A, [stored([1], [1]), stored([2], [2], parent=1)])
        assert device(index, 1, 2) == {"a": 1}, "the other sequence may still have its block"

    def test_a_move_of_one_of_two_blocks_is_of_none(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1], salt="s", tier=Tier.HOST), stored([1], tier=Tier.DISK)])
        assert {block.tier for block in index.dump(A)} == {Tier.DEVICE, Tier.HOST}
        assert index.statistics().unknown_moves_total == 1

    def test_the_same_hash_at_two_places_of_one_scope_is_doubtful_too(self, index: PrefixIndex) -> None:
        """The first SGLang versions hashed a page by its own tokens."""
        index.apply(A, [stored([1], [1]), stored([7, 1], [7, 1]), stored([2], [2], parent=1)])
        assert device(index, 7, 1, 2) == {"a": 2}
        assert device(index, 1, 2) == {}

    def test_a_clear_ends_the_doubt(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1], salt="s"), Cleared()])
        index.apply(A, [stored([1], [1]), stored([2], [2], parent=1)])
        assert device(index, 1, 2) == {"a": 2}

    def test_a_snapshot_keeps_it(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1], salt="s")])
        other = PrefixIndex()
        other.restore(index.snapshot())
        other.apply(A, [stored([2], [2], parent=1)])
        assert device(other, 1, 2, cache_salt="s") == {"a": 1}

    def test_with_very_many_nothing_has_a_place(self, index: PrefixIndex) -> None:
        hashes = list(range(1, 10_001))
        for first in (1, 2):
            tokens = np.arange(first, first + len(hashes) * BLOCK, dtype=np.int32)
            index.apply(A, [Stored(hashes=hashes, parent=None, token_ids=tokens, block_size=BLOCK)])
        index.apply(A, [stored([100_001], [1]), stored([100_002], [2], parent=100_001)])
        assert device(index, 1, 2) == {"a": 1}


class TestRemoval:
    def test_store_and_remove_are_idempotent(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1])])
        assert index.statistics().duplicate_blocks_total == 1
        index.apply(A, [removed(1), removed(1)])
        assert device(index, 1) == {}
        assert index.statistics().unknown_removals_total == 1
        assert index.statistics().residencies == 0

    def test_a_hole_ends_the_prefix_until_it_is_filled(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2, 3, 4], [1, 2, 3, 4])])
        index.apply(A, [removed(2)])
        assert device(index, 1, 2, 3, 4) == {"a": 1}
        index.apply(A, [stored([2], [2], parent=1)])
        assert device(index, 1, 2, 3, 4) == {"a": 4}

    @pytest.mark.parametrize("order", [[1, 2, 3], [3, 2, 1], [2, 1, 3], [2, 3, 1]])
    def test_nothing_is_left_whatever_the_order(self, index: PrefixIndex, order: list[int]) -> None:
        index.apply(A, [stored([1, 2, 3], [1, 2, 3]), stored([4], [4], parent=2), removed(*order), removed(4)])
        statistics = index.statistics()
        assert (statistics.blocks, statistics.residencies, statistics.scopes) == (0, 0, 0)

    def test_one_worker_leaving_a_block_does_not_touch_the_others(self, index: PrefixIndex) -> None:
        for source in (A, B):
            index.apply(source, [stored([1, 2, 3], [1, 2, 3])])
        index.apply(A, [removed(1)])
        assert device(index, 1, 2, 3) == {"b": 3}

    def test_a_hash_given_to_other_tokens_moves(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [2])])
        assert device(index, 1) == {}
        assert device(index, 2) == {"a": 1}

    def test_two_hashes_for_one_block_count_until_both_are_gone(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([2], [1])])
        index.apply(A, [removed(1)])
        assert device(index, 1) == {"a": 1}
        index.apply(A, [removed(2)])
        assert device(index, 1) == {}

    def test_cleared_forgets_every_tier(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1], tier=Tier.HOST), Cleared(), stored([2], [2])])
        assert tiers(index, 1) == {}
        assert device(index, 2) == {"a": 1}
        assert index.num_held(A) == 1


class TestOrphans:
    def test_an_unknown_parent_is_never_taken_for_the_start(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([2], [2], parent=77)])
        assert device(index, 2) == {}
        assert index.statistics().orphan_blocks_total == 1

    def test_orphans_find_their_place_when_the_parent_comes(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([3], [3], parent=2), stored([2], [2], parent=1), removed(3), stored([4], [4], parent=2)])
        index.apply(A, [stored([1], [1])])
        assert device(index, 1, 2, 3) == {"a": 2}
        assert device(index, 1, 2, 4) == {"a": 3}
        assert index.statistics().parked_runs == 0

    def test_a_removed_orphan_may_come_back(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([2], [2], parent=1), removed(2), stored([2], [2], parent=1), stored([1], [1])])
        assert device(index, 1, 2) == {"a": 2}

    def test_orphans_are_bounded(self, index: PrefixIndex) -> None:
        for number in range(MAX_PARKED_RUNS + 1):
            index.apply(A, [stored([2 * number], [number], parent=2 * number + 1)])
        statistics = index.statistics()
        assert (statistics.parked_runs, statistics.dropped_orphan_blocks_total) == (MAX_PARKED_RUNS, 1)

    def test_removals_cost_no_more_for_many_orphans(self, index: PrefixIndex) -> None:
        """Each of them would otherwise be looked for among everything that waits, by whichever worker likes."""

        def cpu_s() -> float:
            began_s = time.process_time()
            index.apply(A, [removed(*range(2**40, 2**40 + 20_000))])
            return time.process_time() - began_s

        without = min(cpu_s() for _ in range(3))
        for run in range(200):
            first = 10_000 * (run + 1)
            index.apply(A, [stored(list(range(first, first + 2000)), list(range(2000)), parent=first + 5000)])
        assert index.statistics().parked_runs == 200
        assert min(cpu_s() for _ in range(3)) < 30 * without + 0.05

    def test_every_orphan_can_be_removed(self, index: PrefixIndex) -> None:
        """Of whichever run, once, in its own tier, also after a snapshot."""
        hashes = list(range(10, 30))
        index.apply(A, [stored(hashes[:10], list(range(10)), parent=1), stored(hashes[10:], list(range(10)), parent=2)])
        index.apply(A, [removed(11, 25), removed(12, tier=Tier.HOST), removed(11)])
        assert index.statistics().unknown_removals_total == 2
        restored = PrefixIndex()
        restored.restore(index.snapshot())
        for one in (index, restored):
            one.apply(A, [removed(28), stored([1], [50]), stored([2], [60])])
            assert one.num_held(A) == 19
            assert (device(one, 50, *range(10)), device(one, 60, *range(10))) == ({"a": 2}, {"a": 6})

    def test_zero_stands_for_no_parent_where_a_worker_begins_with_it(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1], parent=0), stored([2], [2], parent=0)])
        assert device(index, 2) == {"a": 1}
        index.apply(B, [stored([1], [1]), stored([2], [2], parent=0)])
        assert device(index, 2) == {"a": 1}


class TestTiers:
    def test_a_colder_count_includes_the_warmer_ones(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([2], [2], parent=1, tier=Tier.HOST)])
        index.apply(A, [stored([3], [3], parent=2, tier=Tier.DISK)])
        index.apply(B, [stored([1, 2, 3], [1, 2, 3])])
        assert tiers(index, 1, 2, 3) == {"a": (1, 2, 3), "b": (3, 3, 3)}

    def test_a_move_without_tokens(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1, 2], [1, 2]), stored([2, 9], tier=Tier.HOST), removed(2)])
        assert tiers(index, 1, 2) == {"a": (1, 2, 2)}
        assert index.statistics().unknown_moves_total == 1
        index.apply(A, [stored([2]), removed(2, tier=Tier.HOST)])
        assert tiers(index, 1, 2) == {"a": (2, 2, 2)}

    def test_removal_concerns_its_tier_only(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1]), stored([1], [1], tier=Tier.DISK), removed(1, tier=Tier.HOST)])
        assert tiers(index, 1) == {"a": (1, 1, 1)}
        index.apply(A, [removed(1)])
        assert tiers(index, 1) == {"a": (0, 0, 1)}


class TestGroups:
    def test_windows_do_not_count_nor_do_their_removals(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1], group=0, kind="full_attention")])
        index.apply(A, [stored([1], [1], group=1, kind="sliding_window"), removed(1, group=1)])
        assert device(index, 1) == {"a": 1}
        assert index.statistics().ignored_group_blocks_total == 1
        index.apply(A, [removed(1, group=0)])
        assert device(index, 1) == {}


class TestSources:
    def test_unknown_sources_are_passed_over(self, index: PrefixIndex) -> None:
        index.apply(Source("x"), [stored([1], [1])])
        index.remove(Source("x"))
        index.clear(Source("x"))
        index.hide(Source("x"))
        index.show(Source("x"))
        assert device(index, 1) == {}

    def test_adding_again_keeps_and_another_model_clears(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1])])
        index.add(A, model="m")
        assert device(index, 1) == {"a": 1}
        index.add(A, model="n")
        assert device(index, 1) == {}
        assert index.statistics().residencies == 0

    def test_a_hidden_source_is_not_matched_and_comes_back(self, index: PrefixIndex) -> None:
        index.apply(A, [stored([1], [1])])
        index.hide(A)
        assert device(index, 1) == {}
        index.apply(A, [stored([2], [2], parent=1), Cleared(), stored([3], [3])])
        assert device(index, 3) == {}
        index.show(A)
        assert device(index, 3) == {"a": 1}

    def test_removal_is_immediate_however_much_there_is(self, index: PrefixIndex) -> None:
        for start in range(0, 20_000, 1000):
            run = list(range(start + 1, start + 1001))
            index.apply(A, [stored(run, run)])
        index.apply(B, [stored([5], [1])])
        index.remove(A)
        assert device(index, 1, 2) == {"b": 1}
        assert index.reclaimable, "the rest is taken out later"
        index.add(A, model="m")
        index.apply(A, [stored([7], [2])])
        while index.reclaim(1000):
            assert device(index, 1, 2) == {"b": 1}
            assert device(index, 2) == {"a": 1}
        assert index.statistics().blocks == 2
        assert index.statistics().residencies == 2

    def test_sources_that_come_and_go_leave_nothing(self, index: PrefixIndex) -> None:
        def churn(count: int) -> int:
            for _ in range(count):
                index.clear(A)
                index.apply(A, [stored([1], [1])])
            return index.memory_bytes

        assert churn(10) == churn(1000)


class TestMemory:
    BOUND = 120_000

    def test_what_nobody_asked_for_is_forgotten_first(self) -> None:
        index = PrefixIndex(max_memory_bytes=self.BOUND)
        index.add(A, model="m")
        index.apply(A, [stored([1, 2, 3], [1, 2, 3])])
        for number in range(100, 5000):
            assert device(index, 1, 2, 3) == {"a": 3}
            index.apply(A, [stored([number], [number])])
            assert index.memory_bytes <= self.BOUND
        assert device(index, 1, 2, 3) == {"a": 3}
        assert device(index, 100) == {}
        assert index.statistics().forgotten_blocks_total > 1000

    def test_it_claims_less_but_never_more(self) -> None:
        index = PrefixIndex(max_memory_bytes=self.BOUND)
        index.add(A, model="m")
        index.apply(A, [stored(list(range(1, 10_000)), range(9999))])
        held = index.num_held(A)
        assert 500 < held < 5000
        assert device(index, *range(9999))["a"] == held
        index.apply(A, [removed(*range(9999, 0, -1))])
        statistics = index.statistics()
        assert (statistics.blocks, statistics.residencies) == (0, 0)

    def test_a_bound_below_the_index_itself_holds_nothing(self) -> None:
        index = PrefixIndex(max_memory_bytes=1)
        index.add(A, model="m")
        index.apply(A, [stored([1], [1]), removed(1)])
        assert device(index, 1) == {}
        assert index.statistics().forgotten_blocks_total == 1


def test_dump(index: PrefixIndex) -> None:
    index.apply(A, [stored([1, 2], [1, 2], lora=3), stored([1], [1], tier=Tier.HOST, lora=3)])
    blocks = list(index.dump(A))
    keys = sequence_hashes(local_hashes(prompt(1, 2), BLOCK)).tolist()
    assert {(block.prefix_hash, block.parent_hash, block.tier) for block in blocks} == {
        (keys[0], None, Tier.DEVICE),
        (keys[1], keys[0], Tier.DEVICE),
        (keys[0], None, Tier.HOST),
    }
    assert {(block.scope.lora, block.block_size) for block in blocks} == {(3, BLOCK)}
    assert list(index.dump(B)) == []
