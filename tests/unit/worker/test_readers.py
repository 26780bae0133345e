"""Which outgoing transfers a worker takes for open, from what its engines say of them."""

from __future__ import annotations

from typing import Any

from kvmesh.protocol.transfer import LedgerEvent
from kvmesh.worker.readers import OpenTransfers


def said(state: Any, transfer_id: int = 7, **fields: Any) -> LedgerEvent:
    return LedgerEvent(
        transfer_id=transfer_id,
        side=fields.pop("side", "context"),
        instance_id="context",
        epoch=1,
        state=state,
        unix_ms=1000,
        **fields,
    )


def test_a_transfer_is_open_from_its_first_word_to_its_last() -> None:
    transfers = OpenTransfers()
    assert transfers.note([said("registered", num_tokens=9)]) == []
    assert not transfers.has_reader(7)
    assert transfers.note([said("transferring", peer_instance_id="generation"), said("timed_out")]) == []
    assert transfers.has_reader(7)
    assert transfers.note([said("completed")]) == [7]
    assert len(transfers) == 0


def test_a_late_word_opens_nothing() -> None:
    """Else it would stay open for ever, and whoever leaves would wait for it."""
    transfers = OpenTransfers()
    assert transfers.note([said("registered"), said("completed"), said("timed_out"), said("transferring")]) == [7]
    assert len(transfers) == 0


def test_what_comes_here_is_none_of_them() -> None:
    transfers = OpenTransfers()
    transfers.note([said("registered", side="generation")])
    assert len(transfers) == 0
