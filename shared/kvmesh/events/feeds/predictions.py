"""Prompts that were just sent somewhere: they count as held there until the worker's events come, or for some time."""

from __future__ import annotations

from functools import partial

from kvmesh.events.feeds.feed import Feed
from kvmesh.events.feeds.gate import Gate
from kvmesh.events.index import PrefixIndex
from kvmesh.events.records import LoraKey
from kvmesh.hashing import TokenIds

__all__ = ["Predictions"]


class Predictions:
    """Of all sources.

    Args:
        index: to fill.
        gate: of the index.
        predicted_ttl_s: how long a prediction that does not say counts.
        approximate_ttl_s: how long one of a worker without events counts.
    """

    def __init__(self, index: PrefixIndex, gate: Gate, *, predicted_ttl_s: float, approximate_ttl_s: float) -> None:
        self._index = index
        self._gate = gate
        self._predicted_ttl_s = predicted_ttl_s
        self._approximate_ttl_s = approximate_ttl_s
        self.total = 0
        self.refused_total = 0

    def predict(
        self,
        feed: Feed | None,
        token_ids: TokenIds,
        *,
        model: str,
        lora: LoraKey = None,
        cache_salt: str | None = None,
        block_size: int | None = None,
        ttl_s: float | None = None,
    ) -> bool:
        """A worker will soon hold a prompt: it counts as held for ``ttl_s``, or until its events say so.

        False when the worker is not followed, serves another model, or its block size is not known.

        Args:
            feed: of the worker; None: it is not followed.
            token_ids: int32 ``[n]``, the whole prompt.
            model: as in :meth:`PrefixIndex.predict`.
            lora: as there.
            cache_salt: as there.
            block_size: where the feed says none.
            ttl_s: in seconds; None: as the settings say.
        """
        size = 0 if feed is None else feed.block_size or block_size or 0
        if feed is None or feed.model != model or not size:
            self.refused_total += 1
            return False
        if feed.approximate:
            ttl_s = max(ttl_s or 0.0, self._approximate_ttl_s)
        predict = partial(
            self._index.predict,
            feed.source,
            token_ids,
            model=model,
            tenant=feed.tenant,
            lora=lora,
            cache_salt=cache_salt,
            block_size=size,
            ttl_s=self._predicted_ttl_s if ttl_s is None else ttl_s,
        )
        self.total += 1
        if self._gate.closed:
            self._gate.wait(predict)
        else:
            predict()
        return True
