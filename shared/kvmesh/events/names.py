"""How buffered events name blocks: the four settings of ``kv_cache_event_hash_algo`` (semantics §4.2).

The cache tells blocks by its own keys; a naming turns those into hashes of the algorithm that consumers were promised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

from kvmesh.hashing import V1_ROOT, ReuseScope, TokenIds, v1_block_keys, wire_hash, wire_hashes
from kvmesh.telemetry import get_logger

__all__ = [
    "BlockNames",
    "EventHash",
    "EventHashAlgo",
    "KeyNames",
    "V1ChainNames",
    "block_names",
    "effective_event_algo",
]

EventHashAlgo = Literal["v1_block_key", "v2_sha256", "v2_sha256_64"]

EventHash = str | int
"""Lowercase hex of 32 bytes with ``v2_sha256``, else an unsigned 64-bit number."""

_log = get_logger("events")


class BlockNames(Protocol):
    """Hashes of blocks, from the keys that the cache knows them by."""

    def stored(
        self, scope: ReuseScope, parent_key: bytes | None, keys: Sequence[bytes], token_ids: TokenIds
    ) -> tuple[EventHash | None, list[EventHash]]:
        """Name consecutive blocks (tokens int32 ``[n, k]``) that became reusable, and the one before them."""
        ...

    def of(self, keys: Sequence[bytes]) -> list[EventHash]:
        """Names of blocks that were named before and are not forgotten."""
        ...

    def forget(self, keys: Collection[bytes]) -> None:
        """These blocks are gone."""
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

    def stored(
        self,
        scope: ReuseScope,  # noqa: ARG002 - of the protocol
        parent_key: bytes | None,
        keys: Sequence[bytes],
        token_ids: TokenIds,  # noqa: ARG002
    ) -> tuple[EventHash | None, list[EventHash]]:
        """See :class:`BlockNames`."""
        return None if parent_key is None else self._name([parent_key])[0], self.of(keys)

    def of(self, keys: Sequence[bytes]) -> list[EventHash]:
        """See :class:`BlockNames`."""
        return list(self._name(keys))

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

    def stored(
        self, scope: ReuseScope, parent_key: bytes | None, keys: Sequence[bytes], token_ids: TokenIds
    ) -> tuple[EventHash | None, list[EventHash]]:
        """See :class:`BlockNames`. Blocks that are known already, from another layer group, keep their names."""
        if parent_key is None:
            parent: int | None = None
            chained = len(keys)
        else:
            parent = self._names.get(parent_key)
            chained = 0 if parent is None or parent_key in self._by_key else len(keys)
            if parent is None:
                parent = wire_hash(parent_key)
        if all(key in self._names for key in keys):
            return parent, self.of(keys)
        if chained and self._vocab_size is not None:
            foreign = ((token_ids < 0) | (token_ids >= self._vocab_size)).any(axis=1)
            chained = int(foreign.argmax()) if foreign.any() else chained
        names: list[int] = []
        if chained:
            names = v1_block_keys(
                token_ids[:chained].reshape(-1),
                self._tokens_per_block,
                V1_ROOT if parent is None else parent,
                lora_id=scope.lora_id,
                salt=scope.salt,
                include_partial=True,
            ).tolist()
        if chained < len(keys):
            self._warn()
            names += wire_hashes(keys[chained:])
            self._by_key.update(keys[chained:])
        self._names.update(zip(keys, names, strict=True))
        return parent, list(names)

    def of(self, keys: Sequence[bytes]) -> list[EventHash]:
        """See :class:`BlockNames`."""
        return [self._names[key] for key in keys]

    def forget(self, keys: Collection[bytes]) -> None:
        """See :class:`BlockNames`."""
        for key in keys:
            del self._names[key]
        self._by_key.difference_update(keys)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("KV events: v1_block_key cannot name some blocks; they are named by their V2 keys")
