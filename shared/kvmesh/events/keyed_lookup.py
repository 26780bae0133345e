"""Who holds how much of a prompt, when some workers tell keyed names instead of tokens (``kvmesh.events.keyed``)."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.events.index import DEFAULT_TENANT, PrefixIndex
from kvmesh.events.keyed import KeyRing
from kvmesh.events.records import LoraKey
from kvmesh.hashing import ReuseScope, TokenIds, salt_id
from kvmesh.protocol.match import WorkerMatch

__all__ = ["KeyedLookup", "Lookup", "lookup_of"]

Lookup = Callable[..., list[WorkerMatch]]
"""With the arguments of :meth:`kvmesh.events.index.PrefixIndex.match`."""


class KeyedLookup:
    """Asks an index with the prompt, and with its disguise for each key and block size.

    Args:
        index: what is known.
        keys: by which its keyed blocks were read.
    """

    def __init__(self, index: PrefixIndex, keys: KeyRing) -> None:
        self._index = index
        self._keys = keys

    def match(
        self,
        token_ids: TokenIds,
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        lora: LoraKey = None,
        cache_salt: str | None = None,
        block_size: int | None = None,
    ) -> list[WorkerMatch]:
        """See :meth:`kvmesh.events.index.PrefixIndex.match`; of two answers about a worker the longer one counts."""
        index = self._index
        found = index.match(
            token_ids, model=model, tenant=tenant, lora=lora, cache_salt=cache_salt, block_size=block_size
        )
        if isinstance(lora, str):
            return found  # the workers that name blocks know adapters by number
        scope = ReuseScope(lora, None if cache_salt is None else salt_id(cache_salt))
        sizes = self._keys.block_sizes if block_size is None else self._keys.block_sizes & {block_size}
        for key in self._keys:
            for size in sizes:
                prompt = key.disguise(token_ids, size, scope)
                found += index.match(prompt, model=model, tenant=tenant, cache_salt=key.salt, block_size=size)
        return found if len(found) < 2 else _longest(found)


def lookup_of(index: PrefixIndex, keys: KeyRing | None) -> Lookup:
    """What answers for an index: itself, where no keys are known."""
    return index.match if keys is None else KeyedLookup(index, keys).match


def _longest(matches: list[WorkerMatch]) -> list[WorkerMatch]:
    best: dict[tuple[str, int], WorkerMatch] = {}
    for match in matches:
        who = (match.instance_id, match.dp_rank)
        known = best.get(who)
        if known is None:
            best[who] = match
        else:
            best[who] = WorkerMatch(
                *who,
                max(known.device_tokens, match.device_tokens),
                max(known.host_tokens, match.host_tokens),
                max(known.disk_tokens, match.disk_tokens),
            )
    return list(best.values())
