"""How attention data-parallel ranks are named."""

from __future__ import annotations

import pytest

from kvmesh.protocol.ranks import ALONE, DpSeat, rank_instance_id, rank_instance_ids, server_of


def test_a_server_of_one_engine_is_its_engine() -> None:
    assert rank_instance_ids("gen-0", 1) == [rank_instance_id("gen-0", ALONE)] == ["gen-0"]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_a_name_of_its_own_that_leads_to_its_server(size: int) -> None:
    names = rank_instance_ids("gen-0", size)
    assert names == [rank_instance_id("gen-0", DpSeat(rank, size)) for rank in range(size)]
    assert len({"gen-0", *names}) == size + 1
    assert {server_of(name) for name in names} == {"gen-0"} == {server_of("gen-0")}
