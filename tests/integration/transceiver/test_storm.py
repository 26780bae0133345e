"""Cancels at random moments, from both sides, over many transfers at once: no page is lost and the next one works."""

from __future__ import annotations

import random
import time
from typing import Any

Pair = Any
"""tests/integration/transceiver/conftest.py"""

ROUNDS = 3
TRANSFERS = 40


def test_cancel_storm(pair: Pair) -> None:
    chance = random.Random(3)
    for round_number in range(ROUNDS):
        first = 1000 * (round_number + 1)
        running = set(range(first, first + TRANSFERS))
        for transfer in running:
            handoff = pair.context.offer(transfer=transfer, pages=chance.sample(range(48), 6))
            if chance.random() < 0.9:
                pair.generation.ask(transfer=transfer, handoff=handoff, pages=chance.sample(range(48, 96), 6))
            if chance.random() < 0.5:
                pair.generation.cancel(transfer=transfer)
            if chance.random() < 0.3:
                pair.context.cancel(transfer=transfer)
            if chance.random() < 0.3:
                pair.generation.step(side="generation")
                pair.context.step(side="context")
        settle(pair, first)
        # Served at once.
        start_s = time.monotonic()
        pair.move(first + TRANSFERS, [1, 2, 3], [50, 51, 52])
        assert time.monotonic() - start_s < 5
    for peer in (pair.context, pair.generation):
        stats = peer.stats()
        assert stats["quarantined_pages"] == stats["send_sessions"] == stats["receive_sessions"] == 0
        assert stats["refused_total"] <= TRANSFERS * ROUNDS


def settle(pair: Pair, first: int) -> None:
    """Let finish what was not cancelled, and cancel what nobody asked for."""
    deadline_s = time.monotonic() + 30
    while pair.generation.held():
        pair.generation.step(side="generation")
        pair.context.step(side="context")
        assert time.monotonic() < deadline_s, (pair.generation.held(), pair.generation.stats())
    for transfer in range(first, first + TRANSFERS):
        pair.context.cancel(transfer=transfer)
    pair.release(pair.context, "context")
