"""What ranks say to each other in a step: sums in a fixed order, and failures that leave nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import RankThreads
from tiny_models import build

from kvmesh.cache.layout import PageLayout
from kvmesh.engine.ranks.errors import RanksLostError, StepFailedError
from kvmesh.models.base import ForwardBatch, GroupTables
from kvmesh.models.store import resolve_model
from kvmesh.net.faults import injected

PAGES, BLOCK = 8, 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    build("llama", num_hidden_layers=4).save_pretrained(directory)
    return directory


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[[int, int], Bench]]:
    made: list[RankThreads] = []

    def one(tp_size: int, pp_size: int) -> Bench:
        ranks = RankThreads(resolve_model(str(checkpoint)), tp_size, pp_size, tmp_path)
        made.append(ranks)
        return Bench(ranks)

    yield one
    for ranks in made:
        ranks.close()


class Bench:
    """Two sequences of which each rank computes its part."""

    def __init__(self, ranks: RankThreads) -> None:
        self.ranks = ranks
        layout = PageLayout.build(ranks.cache_requirements(), BLOCK)
        self.pools = [torch.zeros(PAGES * pool.page_bytes, dtype=torch.uint8) for pool in layout.pools]
        ranks.attach(layout, [pool.data_ptr() for pool in self.pools])
        self.num_groups = len(layout.groups)

    def batch(self, ids: list[int], wanted: list[int]) -> ForwardBatch:
        length = len(ids)
        tables = GroupTables(torch.arange(2, dtype=torch.int32)[None], torch.arange(length, dtype=torch.int64))
        return ForwardBatch(
            token_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.arange(length, dtype=torch.int32),
            query_start=torch.tensor([0, length], dtype=torch.int32),
            context_lens=torch.tensor([length], dtype=torch.int32),
            groups=[tables] * self.num_groups,
            logits_rows=torch.tensor(wanted, dtype=torch.int64),
        )

    def step(self, ids: list[int], wanted: list[int]) -> list[torch.Tensor | BaseException]:
        """What every rank has at the end of a step; nobody may still be in it."""
        futures = self.ranks.start(self.batch(ids, wanted))
        return [future.exception(20) or future.result() for future in futures]


class Once:
    """Fails the ``nth`` time that it is called."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("nothing left")


@pytest.mark.parametrize(
    ("nth", "wanted"), [(1, list(range(7))), (4, []), (7, [6]), (8, [])], ids=["first", "middle", "last", "very-last"]
)
@pytest.mark.parametrize(("tp_size", "pp_size", "culprit"), [
    (2, 1, 0), (2, 1, 1), (4, 1, 2), (1, 2, 0), (1, 2, 1), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3), (1, 4, 2),
])  # fmt: skip
def test_all_leave_a_failed_step_and_the_next_one_works(
    tp_size: int, pp_size: int, culprit: int, wanted: list[int], nth: int, make: Any
) -> None:
    """§8 item 25: whichever rank fails, wherever in its part, all take the error path; rank 0 always hears of it."""
    bench = make(tp_size, pp_size)
    ids = [5, 9, 33, 7, 80, 41, 12]
    good = bench.step(ids, wanted)
    fault = Once(min(nth, 2 * 4 // pp_size))
    with injected(f"engine.rank{culprit}.sum", fault):
        results = bench.step(ids, wanted)
    assert fault.left <= 0, "the fault was never reached"
    assert isinstance(results[culprit], MemoryError)
    for rank, result in enumerate(results):
        if rank != culprit:
            assert isinstance(result, torch.Tensor | StepFailedError)
    if culprit != 0:
        assert isinstance(results[0], StepFailedError)
        assert f"rank {culprit} could not" in str(results[0])
    again = bench.step(ids, wanted)
    torch.testing.assert_close(again[0], good[0], atol=0, rtol=0)


def test_two_ranks_fail_in_the_same_step(make: Any) -> None:
    bench = make(2, 2)
    with injected("engine.rank1.sum", Once(2)), injected("engine.rank3.sum", Once(3)):
        results = bench.step([5, 6, 7], [2])
    assert [type(result) for result in results] == [StepFailedError, MemoryError, StepFailedError, StepFailedError]
    assert isinstance(bench.step([5, 6, 7], [2])[0], torch.Tensor)


def test_a_sum_does_not_depend_on_the_place_in_the_batch(make: Any) -> None:
    """A row's sum over four ranks has the same bits in whichever row of however many it is (decisions 13)."""
    links = make(4, 1).ranks.links
    parts = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1e4], [1.0], [1e-4], [1.0]])
    expected = parts[0] + parts[1] + parts[2] + parts[3]

    def sums(rows: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.empty(0)] * 4

        def take_part(rank: int) -> None:
            link = links[rank]

            def part() -> torch.Tensor:
                buffer = link.buffer(rows, 64)
                buffer.copy_(parts[rank].expand(rows, 64))
                link.add_up(buffer)
                found[rank] = buffer.clone()
                link._sums_left = 0
                return link.collect(None, 0)

            link._logits_from = list
            link.run(rows, 0, part)

        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found

    for rows in (1, 2, 7, 64):
        for total in sums(rows):
            assert torch.equal(total, expected.expand(rows, 64))


def test_a_rank_that_is_gone_ends_the_engine(make: Any) -> None:
    """Nobody waits longer than the connection lives."""
    bench = make(2, 1)
    lost = bench.ranks.links[1]

    def vanish() -> None:
        lost._tensor_ranks.shutdown()
        lost._tensor_ranks = lost._all = None
        raise SystemExit

    with injected("engine.rank1.sum", vanish):
        futures = bench.ranks.start(bench.batch([4, 5], [1]))
        assert isinstance(futures[0].exception(20), RanksLostError)
