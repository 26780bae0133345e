"""Events and questions of a fleet with popular system prompts, as arrays that either side of a comparison reads.

Half of a prompt is one of some system prompts (zipf, exponent 1.05), the other half one of its 50 users' own. A system
prompt has two home workers; a prompt goes to one of them four times of five, else to any worker. A worker that lacks
blocks of a prompt tells them in stored events of at most 64 blocks, until as many blocks are held as wanted, counted
for each worker. Removed are the users' halves, deepest blocks first, until a fifth of the blocks is gone.

Questions: half of them a prompt that some worker holds (``full``), a quarter one whose system prompt alone is held
(``system``), a quarter new text (``cold``). Engine hashes are random numbers, one for each block of text, as engines
that hash alike would tell them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH_BLOCKS", "KINDS", "Workload", "generate", "load", "save"]

KINDS = ("full", "system", "cold")
BATCH_BLOCKS = 64
"""At most so many blocks in an event."""
USERS = 50
ZIPF = 1.05
HOMES = 2
AT_HOME = 0.8
REMOVED = 0.2
VOCABULARY = 150_000
DRAWN_AT_ONCE = 4096
SATURATED = 0.99
"""Of what is drawn: every prompt is known everywhere, no more blocks are to be had."""


class Workload(NamedTuple):
    """Blocks are rows of ``tokens``; everything else names rows."""

    tokens: NDArray[np.int32]
    """``[rows, block]``."""
    local: NDArray[np.uint64]
    """``[rows]``: hash of the block's own tokens."""
    prefix: NDArray[np.uint64]
    """``[rows]``: rolling hash of everything up to the block."""
    engine: NDArray[np.uint64]
    """``[rows]``: what engines call the block."""
    stored: NDArray[np.int64]
    """``[events, 4]``: worker, first row, row after the last, row of the parent or -1."""
    removed: NDArray[np.int64]
    """``[events, 3]``: worker, first row, row after the last; to be named last row first."""
    queries: NDArray[np.int64]
    """``[queries, blocks]``: rows."""
    kinds: NDArray[np.int8]
    """``[queries]``: place in ``KINDS``."""
    shape: NDArray[np.int64]
    """Workers, and blocks held over all of them."""

    @property
    def workers(self) -> int:
        """How many there are."""
        return int(self.shape[0])

    @property
    def held_blocks(self) -> int:
        """Blocks held, counted for each worker."""
        return int(self.shape[1])


def save(workload: Workload, path: Path) -> None:
    """Write it to a file."""
    with path.open("wb") as file:
        np.savez(file, **workload._asdict())


def load(path: Path) -> Workload:
    """Read what :func:`save` has written."""
    with np.load(path) as arrays:
        return Workload(**{name: arrays[name] for name in Workload._fields})


class _Chains:
    """Gives rows to system prompts and to users' halves, as they are first needed."""

    def __init__(self, half: int) -> None:
        self._half = half
        self._begins: dict[tuple[int, int], int] = {}
        self.order: list[int | None] = []
        """For each half given so far, row where the half before it begins; None: it is the first half."""

    def system(self, number: int) -> int:
        """First row of a system prompt."""
        return self._begin((number, -1), None)

    def user(self, number: int, user: int) -> int:
        """First row of a user's half."""
        return self._begin((number, user), self.system(number))

    def fresh(self, after: int | None) -> int:
        """First row of a half that nobody else has."""
        self.order.append(after)
        return (len(self.order) - 1) * self._half

    def _begin(self, key: tuple[int, int], after: int | None) -> int:
        begin = self._begins.get(key)
        if begin is None:
            begin = self._begins[key] = self.fresh(after)
        return begin


def generate(
    held_blocks: int, workers: int, prompt_tokens: int, *, block: int = 16, queries: int = 600, seed: int = 7
) -> Workload:
    """A workload in which ``workers`` hold ``held_blocks`` together."""
    rng = np.random.default_rng(seed)
    half = prompt_tokens // block // 2
    systems = 2 * max(1, -(-held_blocks // (half * (USERS + 1))))
    weights = 1.0 / np.arange(1, systems + 1) ** ZIPF
    weights /= weights.sum()
    chains = _Chains(half)
    homes = rng.integers(0, workers, (systems, HOMES))
    stored: list[tuple[int, int, int, int]] = []
    has_system: list[set[int]] = [set() for _ in range(workers)]
    has: list[dict[tuple[int, int], None]] = [{} for _ in range(workers)]
    held = 0
    while held < held_blocks:
        drawn = zip(
            rng.choice(systems, DRAWN_AT_ONCE, p=weights).tolist(),
            rng.integers(0, USERS, DRAWN_AT_ONCE).tolist(),
            rng.random(DRAWN_AT_ONCE).tolist(),
            rng.integers(0, workers, DRAWN_AT_ONCE).tolist(),
            rng.integers(0, HOMES, DRAWN_AT_ONCE).tolist(),
            strict=True,
        )
        known = 0
        for system, user, chance, anywhere, home in drawn:
            worker = int(homes[system, home]) if chance < AT_HOME else anywhere
            if (system, user) in has[worker]:
                known += 1
                continue
            has[worker][system, user] = None
            begin = chains.system(system)
            if system not in has_system[worker]:
                has_system[worker].add(system)
                held += _told(stored, worker, begin, half, -1)
            held += _told(stored, worker, chains.user(system, user), half, begin + half - 1)
            if held >= held_blocks:
                break
        if known > SATURATED * DRAWN_AT_ONCE:
            break
    pairs = [(worker, prompt) for worker in range(workers) for prompt in has[worker]]
    asked, kinds = _questions(rng, chains, pairs, half, queries)
    removed = _removals(rng, chains, pairs, half, REMOVED * held)
    tokens, local, prefix = _texts(rng, chains, half, block)
    return Workload(
        tokens=tokens,
        local=local,
        prefix=prefix,
        engine=rng.integers(1, 2**63, len(tokens), dtype=np.uint64),
        stored=np.array(stored, np.int64),
        removed=np.array(removed, np.int64),
        queries=asked,
        kinds=kinds,
        shape=np.array([workers, held], np.int64),
    )


def _told(stored: list[tuple[int, int, int, int]], worker: int, begin: int, half: int, parent: int) -> int:
    stored += [
        (worker, first, min(begin + half, first + BATCH_BLOCKS), parent if first == begin else first - 1)
        for first in range(begin, begin + half, BATCH_BLOCKS)
    ]
    return half


def _questions(
    rng: np.random.Generator, chains: _Chains, pairs: list[tuple[int, tuple[int, int]]], half: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    rows = np.empty((count, 2, half), np.int64)
    kinds = np.array([(0, 0, 1, 2)[i % 4] for i in range(count)], np.int8)
    steps = np.arange(half)
    for i, picked in enumerate(rng.integers(0, len(pairs), count).tolist()):
        system, user = pairs[picked][1]
        first = chains.fresh(None) if kinds[i] == KINDS.index("cold") else chains.system(system)
        second = chains.user(system, user) if kinds[i] == KINDS.index("full") else chains.fresh(first)
        rows[i] = first + steps, second + steps
    return rows.reshape(count, 2 * half), kinds


def _removals(
    rng: np.random.Generator, chains: _Chains, pairs: list[tuple[int, tuple[int, int]]], half: int, wanted: float
) -> list[tuple[int, int, int]]:
    removed: list[tuple[int, int, int]] = []
    gone = 0
    for picked in rng.permutation(len(pairs)).tolist():
        if gone >= wanted:
            break
        worker, (system, user) = pairs[picked]
        begin = chains.user(system, user)
        removed += [(worker, max(begin, end - BATCH_BLOCKS), end) for end in range(begin + half, begin, -BATCH_BLOCKS)]
        gone += half
    return removed


def _texts(
    rng: np.random.Generator, chains: _Chains, half: int, block: int
) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
    # Only the side that generates can hash; the other reads the file.
    from kvmesh.hashing import local_hashes, sequence_hashes

    rows = len(chains.order) * half
    tokens = rng.integers(0, VOCABULARY, (rows, block), dtype=np.int32)
    local = local_hashes(tokens.reshape(-1), block)
    prefix = np.empty(rows, np.uint64)
    for number, after in enumerate(chains.order):
        begin = number * half
        parent: Any = None if after is None else int(prefix[after + half - 1])
        prefix[begin : begin + half] = sequence_hashes(local[begin : begin + half], parent)
    return tokens, local, prefix
