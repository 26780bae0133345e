"""Whatever happens between a worker and its reader, the index is the worker's truth again once the stream is quiet."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Tier
from kvmesh.events.subscriber import Batch, Connected, Disconnected, Reset
from kvmesh.hashing import local_hashes, sequence_hashes

SOURCE = Source("w")
BLOCK = 2
STEPS = 120

Chain = tuple[int, ...]


class Engine:
    """A worker that stores and removes chains; says what it did in events and knows what it holds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_hash = rng.randrange(1, 2**63)
        self.held: dict[Chain, int] = {}

    def step(self) -> list[dict[str, Any]]:
        rng = self._rng
        action = rng.random()
        if action < 0.65 or not self.held:
            return self._store()
        if action < 0.97:
            root = rng.choice(list(self.held))
            gone = sorted((chain for chain in self.held if chain[: len(root)] == root), key=len, reverse=True)
            return [{"type": "BlockRemoved", "block_hashes": [self.held.pop(chain) for chain in gone]}]
        self.held.clear()
        return [{"type": "AllBlocksCleared"}]

    def _store(self) -> list[dict[str, Any]]:
        parent = self._rng.choice([(), *self.held])
        chain = parent
        hashes: list[int] = []
        blocks: list[int] = []
        for _ in range(self._rng.randrange(1, 4)):
            chain = (*chain, self._rng.randrange(4))
            if chain in self.held:
                break
            self._next_hash += 1
            self.held[chain] = self._next_hash
            hashes.append(self._next_hash)
            blocks.append(chain[-1])
        if not hashes:
            return []
        return [
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": self.held[parent] if parent else None,
                "token_ids": np.repeat(blocks, BLOCK).tolist(),
                "block_size": BLOCK,
            }
        ]


def keys_of(chains: set[Chain]) -> set[int]:
    return {
        int(sequence_hashes(local_hashes(np.repeat(np.array(chain, np.int32), BLOCK), BLOCK))[-1]) for chain in chains
    }


@pytest.mark.parametrize("seed", range(8))
async def test_loss_repetition_reordering_and_restarts(
    seed: int, wire_publisher: Callable[..., Any], follow: Any, event_payload: Callable[..., bytes]
) -> None:
    rng = random.Random(seed)
    publisher = wire_publisher()
    index = PrefixIndex()
    index.add(SOURCE, model="m")

    def deliver(item: Batch | Reset | Connected | Disconnected) -> None:
        match item:
            case Batch():
                index.apply(SOURCE, item.records.records)
            case Reset():
                index.clear(SOURCE)

    async with follow(publisher, deliver=deliver) as following:
        engine = Engine(rng)
        sequence, ts = 0, 0.0
        delayed: list[tuple[int, bytes]] = []
        for _ in range(STEPS):
            if rng.random() < 0.02:  # the worker dies and starts again
                engine, sequence, delayed = Engine(rng), 0, []
                publisher.kept = {}
            ts += 1.0
            data = event_payload(*engine.step(), ts=ts)
            publisher.kept[sequence] = data
            fate = rng.random()
            if fate < 0.15:
                delayed.append((sequence, data))
            elif fate > 0.3:
                publisher.send(sequence, data)
                if fate > 0.95:
                    publisher.send(sequence, data)
            if delayed and rng.random() < 0.3:
                publisher.send(*delayed.pop(rng.randrange(len(delayed))))
            sequence += 1
            if rng.random() < 0.2:
                await anyio.sleep(0.001)
        publisher.publish(sequence, event_payload(ts=ts + 1))
        truth = keys_of(set(engine.held))
        with anyio.move_on_after(5):
            while held(index) != truth or following.subscriber.applied != sequence:  # noqa: ASYNC110
                await anyio.sleep(0.002)
    assert held(index) == truth
    for chain in engine.held:
        (match,) = index.match(np.repeat(np.array(chain, np.int32), BLOCK), model="m")
        assert match.device_tokens == len(chain) * BLOCK


def held(index: PrefixIndex) -> set[int]:
    return {block.prefix_hash for block in index.dump(SOURCE) if block.tier == Tier.DEVICE}
