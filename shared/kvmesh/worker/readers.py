"""The prompts whose pages this server holds for readers: who has come for them, who asked for them, and since when.

Fed with the ledger events of the engines, which the front passes on anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import anyio

from kvmesh.protocol.transfer import FINAL_STATES, LedgerEvent

__all__ = ["OpenTransfer", "OpenTransfers"]

MAX_TOLD = 20
"""Transfers named one by one; of more the number is told."""


class OpenTransfer(NamedTuple):
    """One prompt whose pages are held."""

    transfer_id: int
    since_unix_ms: int
    tokens: int
    pages: int
    """Asked for; 0 until somebody has."""
    reader: str | None
    """The engine that reads; None while nobody has come."""


class OpenTransfers:
    """Outgoing transfers that are not finished, oldest first."""

    def __init__(self) -> None:
        self._open: dict[int, OpenTransfer] = {}
        self._empty = anyio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def note(self, events: Iterable[LedgerEvent]) -> list[int]:
        """Take in what the engines said; gives the transfers that ended."""
        ended = []
        for event in events:
            if event.side != "context":
                continue
            if event.state in FINAL_STATES:
                if self._open.pop(event.transfer_id, None) is not None:
                    ended.append(event.transfer_id)
                continue
            known = self._open.get(event.transfer_id)
            if known is None and event.state != "registered":
                continue  # A late word on one that has ended.
            self._open[event.transfer_id] = OpenTransfer(
                event.transfer_id,
                event.unix_ms if known is None else known.since_unix_ms,
                event.num_tokens or (0 if known is None else known.tokens),
                event.num_pages or (0 if known is None else known.pages),
                event.peer_instance_id or (None if known is None else known.reader),
            )
        if not self._open:
            self._empty.set()
        return ended

    def has_reader(self, transfer_id: int) -> bool:
        """Whether somebody has come for the pages of this transfer, as long as it is open."""
        transfer = self._open.get(transfer_id)
        return transfer is not None and transfer.reader is not None

    async def finished(self) -> None:
        """Wait until none is open; the caller bounds the wait."""
        while self._open:
            self._empty = anyio.Event()
            await self._empty.wait()

    def list(self, now_unix_ms: int) -> list[dict[str, object]]:
        """The oldest of them, for logs and machines."""
        return [
            {
                "transfer_id": transfer.transfer_id,
                "reader": transfer.reader,
                "tokens": transfer.tokens,
                "pages": transfer.pages,
                "age_s": round(max(0, now_unix_ms - transfer.since_unix_ms) / 1e3, 1),
            }
            for transfer in list(self._open.values())[:MAX_TOLD]
        ]

    def describe(self, now_unix_ms: int) -> str:
        """All of them in a sentence for people; empty when there are none."""
        if not self._open:
            return ""
        readers = Counter(transfer.reader or "nobody yet" for transfer in self._open.values())
        by = ", ".join(f"{count} by {reader}" for reader, count in sorted(readers.items()))
        oldest = next(iter(self._open.values()))
        age_s = max(0, now_unix_ms - oldest.since_unix_ms) / 1e3
        pages = sum(transfer.pages for transfer in self._open.values())
        tokens = sum(transfer.tokens for transfer in self._open.values())
        prompts, are = ("1 prompt", "is") if len(self._open) == 1 else (f"{len(self._open)} prompts", "are")
        return (
            f"waits until {prompts} ({tokens} tokens, {pages} pages asked for) {are} read: {by}; "
            f"oldest {oldest.transfer_id}, {age_s:.1f} s"
        )
