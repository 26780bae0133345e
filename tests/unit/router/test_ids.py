"""Transfer ids: unique, 63 bits, apart from local ids."""

from __future__ import annotations

import pytest

from kvmesh.net.clock import ManualClock
from kvmesh.router.ids import LOCAL_ID_LIMIT, PROCESS_ID_VARIABLE, TransferIds


def test_layout_and_range() -> None:
    ids = TransferIds(ManualClock(start_s=2.5), node_id=3, process_id=5)
    first, second = ids.next(), ids.next()
    assert first == ((2500 << 24 | 3 << 16 | 5 << 10) % (2**63 - 1 - 2**40)) + LOCAL_ID_LIMIT
    assert second == first + 1


def test_unique_when_a_millisecond_is_used_up_and_when_time_stands_still() -> None:
    clock = ManualClock()
    ids = TransferIds(clock, node_id=0, process_id=0)
    made = [ids.next() for _ in range(3000)]
    clock.advance(0.001)
    made += [ids.next() for _ in range(3000)]
    assert len(set(made)) == len(made)
    assert made == sorted(made)


def test_time_wraps_inside_63_bits() -> None:
    clock = ManualClock(start_s=2**39 / 1000 - 0.001)
    ids = TransferIds(clock, node_id=255, process_id=63)
    for _ in range(3):
        assert LOCAL_ID_LIMIT <= ids.next() < 2**63 - 1
        clock.advance(0.001)


@pytest.mark.parametrize("where", [{"node_id": 256}, {"node_id": -1}, {"process_id": 64}])
def test_out_of_range(where: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        TransferIds(ManualClock(), **where)


def test_process_id_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_ID_VARIABLE, "7")
    value = TransferIds(ManualClock(), node_id=0).next() - LOCAL_ID_LIMIT
    assert value >> 10 & 63 == 7
    monkeypatch.setenv(PROCESS_ID_VARIABLE, "seven")
    with pytest.raises(ValueError, match=PROCESS_ID_VARIABLE):
        TransferIds(ManualClock())
