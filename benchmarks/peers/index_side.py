"""One side of benchmarks/indexer.py, which starts it: an index under its own interpreter, driven through pipes.

Commands come as JSON, one a line, on stdin, and each is answered by a JSON line on stdout. Seconds are processor time
of all threads of this process; the garbage collector is off.

    {"do": "memory"}      {"bytes": grown while an index was filled, events made one by one}
    {"do": "fill"}        {"s": seconds of all stored events, made before from hashes}
    {"do": "fill_tokens"} {"s": the same from token ids}, {} from a side that takes hashes only
    {"do": "lookup"}      {"full": seconds, "system": .., "cold": .., "tokens": ..}; "tokens" from token ids on
    {"do": "answers"}     [[[worker, blocks], ...] of each question]
    {"do": "remove"}      {"s": seconds of all removed events}
    {"do": "drop"}        {} once the index is gone
    {"do": "hash"}        {form of the tokens: seconds of one hashing of 8192 tokens}

    python benchmarks/peers/index_side.py {kvmesh|dynamo} WORKLOAD CORE
"""

# ruff: noqa: D102 - methods are described by Side, and commands above

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from index_workload import KINDS, Workload, load

TOKEN_LOOKUP_TOKENS = 2_000_000
"""Of all prompts of the look-ups from token ids together, at most."""
HASHED_TOKENS = 8192
HASH_REPEATS = 50
WARM_UP = 20


class Side(ABC):
    """An index and the forms that it takes events and questions in. Forms are made outside of what is timed."""

    def __init__(self, workload: Workload) -> None:
        self.work = workload
        self.block = workload.tokens.shape[1]

    @abstractmethod
    def open(self) -> None:
        """A new, empty index."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abstractmethod
    def stored(self, event: Sequence[int]) -> Any:
        """Form of a row of ``Workload.stored``, with the engine's hash and the local hash of each block."""

    @abstractmethod
    def removed(self, event: Sequence[int]) -> Any:
        """Form of a row of ``Workload.removed``."""

    @abstractmethod
    def store(self, events: list[Any]) -> None:
        """Take in stored events; returns once all are in."""

    @abstractmethod
    def remove(self, events: list[Any]) -> None:
        """Take in removed events; returns once all are in."""

    @abstractmethod
    def by_hash(self, rows: np.ndarray) -> Any:
        """Form of a question whose blocks have been hashed."""

    @abstractmethod
    def by_tokens(self, rows: np.ndarray) -> Any:
        """Form of a question as token ids."""

    @abstractmethod
    def find(self, questions: list[Any]) -> None:
        """Answer questions by hash."""

    @abstractmethod
    def find_tokens(self, questions: list[Any]) -> None:
        """Answer questions by token ids."""

    @abstractmethod
    def answer(self, question: Any) -> dict[int, int]:
        """Leading blocks by worker, of a question by hash."""

    @abstractmethod
    def hashers(self) -> dict[str, Callable[[], object]]:
        """Ways to hash 8192 tokens."""

    def sample(self) -> np.ndarray:
        """8192 tokens, the same on both sides."""
        return np.random.default_rng(3).integers(0, 150_000, HASHED_TOKENS, dtype=np.int32)


class KvMesh(Side):
    """``kvmesh.events.index.PrefixIndex``, given arrays; of stored events also records with their tokens."""

    def open(self) -> None:
        from kvmesh.events.index import PrefixIndex, Source

        self._index = PrefixIndex(1 << 40)
        self._sources = [Source(str(worker)) for worker in range(self.work.workers)]
        for source in self._sources:
            self._index.add(source, model="m")
        self._writers = [self._index.writer(source) for source in self._sources]

    def close(self) -> None:
        del self._index, self._writers

    def stored(self, event: Sequence[int]) -> Any:
        worker, begin, end, _ = event
        return worker, self.work.engine[begin:end], self.work.local[begin:end], self._parent(event)

    def stored_tokens(self, event: Sequence[int]) -> Any:
        """Form of a row of ``Workload.stored`` with the engine's hash and the tokens of each block."""
        from kvmesh.events.records import Stored

        worker, begin, end, _ = event
        record = Stored(
            hashes=self.work.engine[begin:end].tolist(),
            parent=self._parent(event),
            token_ids=self.work.tokens[begin:end].reshape(-1),
            block_size=self.block,
        )
        return self._sources[worker], [record]

    def removed(self, event: Sequence[int]) -> Any:
        worker, begin, end = event
        return worker, np.ascontiguousarray(self.work.engine[begin:end][::-1])

    def store(self, events: list[Any]) -> None:
        stores, block = [writer.store for writer in self._writers], self.block
        for worker, hashes, local, parent in events:
            stores[worker](hashes, local, parent, block)

    def store_tokens(self, events: list[Any]) -> None:
        """Take in stored events with tokens, which are hashed, as in the service."""
        apply = self._index.apply
        for source, records in events:
            apply(source, records)

    def remove(self, events: list[Any]) -> None:
        discards = [writer.discard for writer in self._writers]
        for worker, hashes in events:
            discards[worker](hashes)

    def by_hash(self, rows: np.ndarray) -> Any:
        return self.work.prefix[rows]

    def by_tokens(self, rows: np.ndarray) -> Any:
        return self.work.tokens[rows].reshape(-1)

    def find(self, questions: list[Any]) -> None:
        match = self._index.match_hashes
        for question in questions:
            match(question, model="m")

    def find_tokens(self, questions: list[Any]) -> None:
        match = self._index.match
        for question in questions:
            match(question, model="m")

    def answer(self, question: Any) -> dict[int, int]:
        matches = self._index.match_hashes(question, model="m")
        return {int(match.instance_id): match.device_tokens // self.block for match in matches}

    def hashers(self) -> dict[str, Callable[[], object]]:
        from kvmesh.hashing import local_hashes

        tokens = self.sample()
        ids = tokens.tolist()
        return {"list": lambda: local_hashes(ids, self.block), "int32": lambda: local_hashes(tokens, self.block)}

    def _parent(self, event: Sequence[int]) -> int | None:
        return None if event[3] < 0 else int(self.work.engine[event[3]])


class Dynamo(Side):
    """``dynamo.llm.RadixTree`` through its Python API: events as JSON with both hashes of each block, made before."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._llm = importlib.import_module("dynamo.llm")

    def open(self) -> None:
        self._tree = self._llm.RadixTree()
        self._events = 0

    def close(self) -> None:
        del self._tree

    def stored(self, event: Sequence[int]) -> Any:
        worker, begin, end, parent = event
        work = self.work
        blocks = [
            {"block_hash": engine, "tokens_hash": local}
            for engine, local in zip(work.engine[begin:end].tolist(), work.local[begin:end].tolist(), strict=True)
        ]
        before = None if parent < 0 else int(work.engine[parent])
        return worker, self._event({"stored": {"parent_hash": before, "blocks": blocks}})

    def removed(self, event: Sequence[int]) -> Any:
        worker, begin, end = event
        return worker, self._event({"removed": {"block_hashes": self.work.engine[begin:end][::-1].tolist()}})

    def store(self, events: list[Any]) -> None:
        apply = self._tree.apply_event
        for worker, event in events:
            apply(worker, event)
        self._tree.find_matches([1])  # answered after everything before it

    def remove(self, events: list[Any]) -> None:
        self.store(events)

    def by_hash(self, rows: np.ndarray) -> Any:
        return self.work.local[rows].tolist()

    def by_tokens(self, rows: np.ndarray) -> Any:
        return self.work.tokens[rows].reshape(-1).tolist()

    def find(self, questions: list[Any]) -> None:
        find = self._tree.find_matches
        for question in questions:
            _ = find(question).scores

    def find_tokens(self, questions: list[Any]) -> None:
        find, hashes, block = self._tree.find_matches, self._llm.compute_block_hash_for_seq, self.block
        for question in questions:
            _ = find(hashes(question, block)).scores

    def answer(self, question: Any) -> dict[int, int]:
        return {worker: blocks for (worker, _rank), blocks in self._tree.find_matches(question).scores.items()}

    def hashers(self) -> dict[str, Callable[[], object]]:
        ids = self.sample().tolist()
        return {"list": lambda: self._llm.compute_block_hash_for_seq(ids, self.block)}

    def _event(self, data: dict[str, Any]) -> bytes:
        self._events += 1
        event = {"event_id": self._events, "dp_rank": 0, "data": data}
        return json.dumps(event, separators=(",", ":")).encode()


SIDES: dict[str, type[Side]] = {"kvmesh": KvMesh, "dynamo": Dynamo}


class Commands:
    """What can be asked on stdin."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._work = side.work
        self._forms: dict[str, list[Any]] = {}

    def memory(self) -> dict[str, int]:
        self._side.open()
        trim()
        before = resident_bytes()
        for event in self._work.stored.tolist():
            self._side.store([self._side.stored(event)])
        trim()
        grown = resident_bytes() - before
        self.drop()
        return {"bytes": grown}

    def fill(self) -> dict[str, float]:
        self._side.open()
        events = self._form("stored", partial(_listed, self._side.stored, self._work.stored.tolist()))
        return {"s": timed(lambda: self._side.store(events))}

    def fill_tokens(self) -> dict[str, float]:
        if not isinstance(self._side, KvMesh):
            return {}
        side = self._side
        side.open()
        events = self._form("stored_tokens", partial(_listed, side.stored_tokens, self._work.stored.tolist()))
        taken = {"s": timed(lambda: side.store_tokens(events))}
        self.drop()
        return taken

    def lookup(self) -> dict[str, float]:
        took = {}
        for number, kind in enumerate(KINDS):
            rows = self._work.queries[self._work.kinds == number]
            questions = self._form(kind, partial(_listed, self._side.by_hash, rows))
            self._side.find(questions[:WARM_UP])
            took[kind] = timed(partial(self._side.find, questions)) / len(questions)
        few = self._work.queries[: max(8, TOKEN_LOOKUP_TOKENS // self._work.queries.shape[1] // self._side.block)]
        questions = self._form("tokens", partial(_listed, self._side.by_tokens, few))
        took["tokens"] = timed(partial(self._side.find_tokens, questions)) / len(questions)
        return took

    def answers(self) -> list[list[tuple[int, int]]]:
        side = self._side
        return [sorted(side.answer(side.by_hash(rows)).items()) for rows in self._work.queries]

    def remove(self) -> dict[str, float]:
        events = self._form("removed", partial(_listed, self._side.removed, self._work.removed.tolist()))
        return {"s": timed(lambda: self._side.remove(events))}

    def drop(self) -> dict[str, float]:
        self._side.close()
        trim()
        return {}

    def hash(self) -> dict[str, float]:
        took = {}
        for form, function in self._side.hashers().items():
            function()
            took[form] = timed(partial(_repeated, function)) / HASH_REPEATS
        return took

    def _form(self, name: str, make: Callable[[], list[Any]]) -> list[Any]:
        made = self._forms.get(name)
        if made is None:
            made = self._forms[name] = make()
        return made


def _listed(form: Callable[[Any], Any], rows: Iterable[Any]) -> list[Any]:
    return list(map(form, rows))


def _repeated(function: Callable[[], object]) -> None:
    for _ in range(HASH_REPEATS):
        function()


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    name, path, core = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    commands = Commands(SIDES[name](load(Path(path))))
    gc.disable()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(commands, json.loads(line)["do"])()), flush=True)


if __name__ == "__main__":
    main()
