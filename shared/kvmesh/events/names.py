"""How buffered events name blocks: the four settings of ``kv_cache_event_hash_algo`` (semantics §4.2).

The cache tells blocks by its own keys; a naming turns those into hashes of the algorithm that consumers were promised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, Protocol

from kvmesh.hashing import V1_ROOT, ReuseScope, TokenIds, v1_block_keys, wire_hash, wire_hashes
from kvmesh.telemetry import get_logger

__all__ = [
    "BlockNames",
    "EventHash",
    "EventHashAlgo",
    "KeyNames",
    "NamedRun",
    "V1ChainNames",
    "block_names",
    "effective_event_algo",
]

EventHashAlgo = Literal["v1_block_key", "v2_sha256", "v2_sha256_64"]

EventHash = str | int
"""Lowercase hex of 32 bytes with ``v2_sha256``, else an unsigned 64-bit number."""

_log = get_logger("events")


class NamedRun(NamedTuple):
    """Consecutive blocks that became reusable."""

    scope: ReuseScope
    parent_key: bytes | None
    """Key of the block before the first one; None: it starts a sequence."""
    keys: Sequence[bytes]
    token_ids: TokenIds
    """int32 ``[n, tokens_per_block]``, or ``[1, k]`` with fewer for one partial block."""


class BlockNames(Protocol):
    """Hashes of blocks, from the keys that the cache knows them by."""

    def learn(self, runs: Sequence[NamedRun]) -> None:
        """What became reusable in one step, in all layer groups."""
        ...

    def of(self, keys: Sequence[bytes]) -> list[EventHash]:
        """Names of blocks that were learnt and are not forgotten."""
        ...

    def of_parent(self, key: bytes) -> EventHash:
        """Name of a block that others continue. It may be gone, where they are inside a window."""
        ...

    def forget(self, keys: Collection[bytes]) -> None:
        """These blocks are in no layer group any more."""
        ...


def effective_event_algo(
    setting: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"], *, manager_v2: bool
) -> tuple[EventHashAlgo, str | None]:
    """The algorithm that a manager's events use, and a warning where it is not what was asked for.

    V1 blocks are only known by their own hash; V2 blocks can be named by every algorithm.
    """
    if not manager_v2:
        if setting in ("v2_sha256", "v2_sha256_64"):
            return "v1_block_key", f"kv_cache_event_hash_algo {setting} needs the V2 manager; V1 uses v1_block_key"
        return "v1_block_key", None
    return ("v2_sha256" if setting == "auto" else setting), None


def block_names(
    algo: EventHashAlgo, *, manager_v2: bool, tokens_per_block: int, vocab_size: int | None = None
) -> BlockNames:
    """The naming of ``algo``.

    Args:
        algo: from :func:`effective_event_algo`.
        manager_v2: whose keys there are.
        tokens_per_block: length of a full block.
        vocab_size: token ids from here on stand for something else than text.
    """
    if algo == "v2_sha256":
        return KeyNames(lambda keys: [key.hex() for key in keys])
    if algo == "v2_sha256_64" or not manager_v2:
        return KeyNames(wire_hashes)
    return V1ChainNames(tokens_per_block, vocab_size)


class KeyNames:
    """Names that the key alone gives: nothing has to be remembered.

    Args:
        name: names of many keys.
    """

    def __init__(self, name: Callable[[Sequence[bytes]], Sequence[EventHash]]) -> None:
        self._name = name

    def learn(self, runs: Sequence[NamedRun]) -> None:
        """See :class:`BlockNames`; there is nothing to learn."""

    def of(self, keys: Sequence[bytes]) -> list[EventHash]:
        """See :class:`BlockNames`."""
        return list(self._name(keys))

    def of_parent(self, key: bytes) -> EventHash:
        """See :class:`BlockNames`."""
        return self._name([key])[0]

    def forget(self, keys: Collection[bytes]) -> None:
        """See :class:`BlockNames`; there is nothing to forget."""


class V1ChainNames:
    """``v1_block_key`` for blocks of a V2 cache: a chain of its own, beside that of the keys.

    A block that V1's rules cannot name, because it holds something else than text or its parent's V1 hash is not known,
    has the first 8 bytes of its V2 key instead, and so have all blocks that continue it.

    Args:
        tokens_per_block: length of a full block.
        vocab_size: token ids from here on, and negative ones, are not text; None: all are.
    """

    def __init__(self, tokens_per_block: int, vocab_size: int | None = None) -> None:
        self._tokens_per_block = tokens_per_block
        self._vocab_size = vocab_size
        self._names: dict[bytes, int] = {}
        self._by_key: set[bytes] = set()
        """The blocks that are named by their V2 key."""
        self._warned = False

    def learn(self, runs: Sequence[NamedRun]) -> None:
        """See :class:`BlockNames`. A block that is known already, from another layer group, keeps its name.

        A windowed group may tell a block without the one before it, which another group tells later in the same step.
        """
        waiting = list(runs)
        while waiting:
            later: list[NamedRun] = []
            for run in waiting:
                if run.parent_key is None or run.parent_key in self._names:
                    self._learn(run)
                else:
                    later.append(run)
            if len(later) == len(waiting):
                self._learn(later.pop(0))  # Nobody tells its parent: it has to do without.
            waiting = later

    def of(self, keys: Sequence[bytes]) -> list[EventHash]:
        """See :class:`BlockNames`."""
        return [self._names[key] for key in keys]

    def of_parent(self, key: bytes) -> EventHash:
        """See :class:`BlockNames`."""
        name = self._names.get(key)
        return wire_hash(key) if name is None else name

    def forget(self, keys: Collection[bytes]) -> None:
        """See :class:`BlockNames`."""
        for key in keys:
            del self._names[key]
        self._by_key.difference_update(keys)

    def _learn(self, run: NamedRun) -> None:
        unknown = [at for at, key in enumerate(run.keys) if key not in self._names]
        if len(unknown) == len(run.keys):
            self._name(run)
            return
        for at in unknown:
            parent_key = run.keys[at - 1] if at else run.parent_key
            self._name(NamedRun(run.scope, parent_key, run.keys[at : at + 1], run.token_ids[at : at + 1]))

    def _name(self, run: NamedRun) -> None:
        _, parent_key, keys, token_ids = run
        parent = V1_ROOT if parent_key is None else self._names.get(parent_key)
        chained = 0 if parent is None or parent_key in self._by_key else len(keys)
        if chained and self._vocab_size is not None:
            foreign = ((token_ids < 0) | (token_ids >= self._vocab_size)).any(axis=1)
            chained = int(foreign.argmax()) if foreign.any() else chained
        names: list[int] = []
        if parent is not None and chained:
            names = v1_block_keys(
                token_ids[:chained].reshape(-1),
                self._tokens_per_block,
                parent,
                lora_id=run.scope.lora_id,
                salt=run.scope.salt,
                include_partial=True,
            ).tolist()
        if chained < len(keys):
            self._warn()
            names += wire_hashes(keys[chained:])
            self._by_key.update(keys[chained:])
        self._names.update(zip(keys, names, strict=True))

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("KV events: v1_block_key cannot name some blocks; they are named by their V2 keys")
