"""Bodies of the indexer's HTTP face, in the shapes that Mooncake's and Dynamo's clients send (``docs/indexer.md``)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.events.index import DEFAULT_TENANT
from kvmesh.hashing import sequence_hashes
from kvmesh.protocol.errors import bad_request
from kvmesh.protocol.match import MAX_BLOCK_TOKENS, MAX_DP_RANK, MAX_TTL_S

__all__ = ["HashQuery", "Prediction", "Query", "RegisterBody", "Unregister"]

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_DP_RANK)]
BlockSize = Annotated[int, msgspec.Meta(gt=0, le=MAX_BLOCK_TOKENS)]
Instance = NonEmpty | int
"""Dynamo's instances are numbers; they are known by their decimal digits here."""

_HASH_MASK = 2**64 - 1


class _Named(msgspec.Struct, kw_only=True):
    """A model, however a client calls the field: ``model``, ``model_name`` (Dynamo) or ``modelname`` (Mooncake)."""

    model: str | None = None
    model_name: str | None = None
    modelname: str | None = None
    tenant_id: str | None = None
    """Null and absent: the default tenant."""

    @property
    def model_named(self) -> str:
        """The model.

        Raises:
            ApiError: 400, none is named.
        """
        for name in (self.model, self.model_name, self.modelname):
            if name:
                return name
        raise bad_request("Name the model: 'model', 'model_name' or 'modelname'.", param="model")

    @property
    def tenant(self) -> str:
        """The tenant."""
        return self.tenant_id or DEFAULT_TENANT


class RegisterBody(_Named, kw_only=True):
    """``POST /register``: follow a publisher that no coordinator knows."""

    instance_id: Instance
    endpoint: str | None = None
    """Its stream. Absent with ``events: none``, and with ``bind``."""
    replay_endpoint: str | None = None
    events: Annotated[str, msgspec.Meta(pattern="^(zmq|none)$")] = "zmq"
    """``none``: it publishes nothing; what is predicted of it is all that is known."""
    bind: bool = False
    """Wait until the publisher connects to the indexer's ``listen_endpoint``, instead of connecting to it."""
    topic: str = ""
    """With ``bind``: the topic that the publisher sends, by which it is told from others."""
    type: str = "vLLM"
    """Which engine it is; nothing depends on it, every event says how it is written."""
    lora_name: str | None = None
    """Adapter of blocks that name none."""
    block_size: BlockSize | None = None
    """Said by every stored event; needed with ``events: none``."""
    dp_rank: Rank | None = None
    additionalsalt: str | None = None
    """Salt of blocks that name none; queries find them with it as ``cache_salt``."""
    additional_salt: str | None = None
    """The same, as Dynamo's clients write it."""
    single_group: bool = False
    """It tells one layer group only, the widest: its blocks count even if that group has a window."""

    @property
    def salt(self) -> str | None:
        """The salt; an empty one is none."""
        return self.additionalsalt or self.additional_salt or None


class Unregister(_Named, kw_only=True):
    """``POST /unregister``."""

    instance_id: Instance
    dp_rank: Rank | None = None
    """One rank only; all of them when absent."""


class _Question(_Named, kw_only=True):
    lora_name: str | None = None
    lora_id: int | None = None
    instance_id: Instance | None = None
    """Only this worker."""
    block_size: BlockSize | None = None
    """Only workers with blocks of so many tokens."""
    cache_salt: str | None = None

    @property
    def lora(self) -> str | int | None:
        """The adapter, by name before number; an empty name is none."""
        return self.lora_name or self.lora_id

    @property
    def salt(self) -> str | None:
        """The salt; an empty one is none."""
        return self.cache_salt or None


class Query(_Question, kw_only=True):
    """``POST /query``: who holds how much of these tokens."""

    token_ids: list[int]


class HashQuery(_Question, kw_only=True):
    """``POST /query_by_hash``: the same for the XXH3 hashes of a prompt's blocks, signed or unsigned."""

    seq_hashes: list[int] | None = None
    """Rolling hashes: each names its block and all before it."""
    block_hash: list[int] | None = None
    """The same, as earlier Mooncake clients call it."""
    block_hashes: list[int] | None = None
    """Hashes of the blocks alone, as Dynamo's clients send them; they are chained here."""

    def prefix_hashes(self) -> NDArray[np.uint64]:
        """Rolling hashes, uint64 ``[n]``.

        Raises:
            ApiError: 400, there are none.
        """
        rolling = self.seq_hashes if self.seq_hashes is not None else self.block_hash
        if rolling is not None:
            return _hashes(rolling)
        if self.block_hashes is None:
            raise bad_request("Send 'seq_hashes' (rolling) or 'block_hashes' (of each block).", param="seq_hashes")
        return sequence_hashes(_hashes(self.block_hashes))


class Prediction(Query, kw_only=True):
    """``POST /predict``: a request with these tokens is on its way to ``instance_id``."""

    dp_rank: Rank = 0
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] | None = None
    """How long it counts unless its events come; absent: as the settings say."""

    def target(self) -> tuple[str, int]:
        """Worker and rank.

        Raises:
            ApiError: 400, no worker is named.
        """
        if self.instance_id is None:
            raise bad_request("Name the worker that gets the request: 'instance_id'.", param="instance_id")
        return str(self.instance_id), self.dp_rank


def _hashes(values: list[int]) -> NDArray[np.uint64]:
    return np.array([value & _HASH_MASK for value in values], dtype=np.uint64)
