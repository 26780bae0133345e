"""Transfers of the ledger as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvmesh.protocol.transfer import FINAL_STATES, TransferRecord

__all__ = ["plain_table", "transfer_table"]


def plain_table(*headings: str, left: int) -> Table:
    """Without borders; the first ``left`` columns are names, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="left" if index < left else "right")
    return table


def transfer_table(records: Sequence[TransferRecord]) -> Table:
    """One row for each transfer; reasons only where there are any."""
    table = plain_table("transfer", "state", "from", "to", "tokens", "moved", "time", left=4)
    # Narrow terminals cut what is on the right: the id is what one copies.
    table.columns[0].min_width = max((len(str(record.transfer_id)) for record in records), default=0)
    table.columns[1].min_width = max((len(record.state) for record in records), default=0)
    reasons = ["; ".join(side.reason for side in record.sides if side.reason) for record in records]
    if any(reasons):
        table.add_column("reason")
    for record, reason in zip(records, reasons, strict=True):
        sides = {side.side: side for side in record.sides}
        source, target = sides.get("context"), sides.get("generation")
        moved = max((side.num_bytes for side in record.sides), default=0)
        table.add_row(
            str(record.transfer_id),
            record.state,
            source.instance_id if source else "?",
            target.instance_id if target else "-",
            str(max((side.num_tokens for side in record.sides), default=0)),
            f"{moved / 1e6:.2f} MB" if moved else "-",
            _age(record),
            *([reason] if any(reasons) else []),
        )
    return table


def _age(record: TransferRecord) -> str:
    """How old an open transfer is, or how long a finished one took."""
    time_ = f"{record.age_ms} ms" if record.age_ms < 10_000 else f"{record.age_ms / 1000:.0f} s"
    finished = all(side.state in FINAL_STATES for side in record.sides)
    return f"took {time_}" if finished else time_
