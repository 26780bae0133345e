"""What must be equal for two prompts to share blocks, and who holds them."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.events.records import LoraKey
from kvmesh.hashing import salt_id

__all__ = ["DEFAULT_TENANT", "Scope", "Source", "salts_on_the_wire"]

DEFAULT_TENANT = "default"


class Source(NamedTuple):
    """One stream of events: a rank of a worker."""

    instance_id: str
    dp_rank: int = 0


class Scope(NamedTuple):
    """Prompts share blocks only inside one scope."""

    model: str
    tenant: str = DEFAULT_TENANT
    lora: LoraKey = None
    salt: str | None = None
    """As it stands in the events; see :func:`salts_on_the_wire`."""


def salts_on_the_wire(cache_salt: str | None) -> tuple[str | None, ...]:
    """What events call a request's salt: its number with KVMesh's workers, the text itself with vLLM's and SGLang's."""
    return (None,) if cache_salt is None else (str(salt_id(cache_salt)), cache_salt)
