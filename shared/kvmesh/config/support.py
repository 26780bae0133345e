"""What this version does with each field: the one table behind the start-up check and the reference page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from kvmesh.config.block_reuse import BlockReuseConfig
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.kv_events import KVEventsConfig
from kvmesh.config.mamba_state import MambaStateConfig
from kvmesh.config.pool_rebalance import KvPoolRebalanceConfig
from kvmesh.config.worker import WorkerSettings

__all__ = [
    "ALIASES",
    "DEFAULT_ONLY",
    "NO_EFFECT",
    "PARTIAL",
    "V1_ONLY",
    "Partial",
    "state_of",
    "unsupported_fields",
]


class Partial(NamedTuple):
    """A field that is built for some of its values."""

    values: str
    """Those values, for people."""
    accepts: Callable[[Any], bool]
    """Whether a value is among them."""


def _one_of(*values: Any) -> Partial:
    return Partial(", ".join(str(value) for value in values), lambda value: value in values)


NO_EFFECT: Mapping[type[BaseModel], Mapping[str, str]] = {
    KvCacheConfig: {
        "sink_token_length": "",
        "use_uvm": "",
    },
}
"""Accepted with any value, without effect; with a reason where there is more to say."""

V1_ONLY = "copy_on_partial_reuse"
"""The field of ``KvCacheConfig`` that V2 has no use for: it always copies."""

ALIASES: Mapping[type[BaseModel], Mapping[str, str]] = {
    KvCacheConfig: {
        "secondary_offload_min_priority": "cold_tier_offload_min_priority",
        "mamba_state_cache_interval": "mamba_state_config.periodic_snapshot_interval",
    },
    MambaStateConfig: {"enable_branch_snapshot": "block_reuse_config.enable_branch_snapshot"},
}
"""Deprecated names and the fields that they are copied to, under which they are judged."""

DEFAULT_ONLY: Mapping[type[BaseModel], frozenset[str]] = {
    KvCacheConfig: frozenset(
        {
            "mixed_precision_first_n", "mixed_precision_last_n", "mamba_ssm_cache_dtype",
            "mamba_ssm_stochastic_rounding", "mamba_ssm_philox_rounds", "cross_kv_cache_fraction",
        }
    ),
    MambaStateConfig: frozenset(MambaStateConfig.model_fields) - ALIASES[MambaStateConfig].keys(),
}  # fmt: skip
"""Accepted by the class, refused at start unless left at the default: the behaviour is not built yet."""

OWN_DTYPE_ONLY = "auto, and the data type that the model is served in"
"""What is built of ``dtype``; which one that is depends on the server."""

PARTIAL: Mapping[type[BaseModel], Mapping[str, Partial]] = {
    KvCacheConfig: {
        "dtype": Partial(OWN_DTYPE_ONLY, lambda dtype: dtype in ("auto", "float32", "float16", "bfloat16")),
    },
    WorkerSettings: {"context_parallel_size": _one_of(1)},
}
"""Built for some values; any other is refused at start. ``dtype`` has one more rule, for when the model is known."""

_WALKED = (BlockReuseConfig, MambaStateConfig, KvPoolRebalanceConfig, KVEventsConfig)


def unsupported_fields(config: BaseModel, prefix: str = "") -> Iterator[str]:
    """Every ``path=value`` in ``config`` and its nested classes that asks for behaviour which is not built yet."""
    kind = type(config)
    default_only = DEFAULT_ONLY.get(kind, frozenset())
    partial = PARTIAL.get(kind, {})
    for name, field in kind.model_fields.items():
        value = config.__dict__[name]  # past the descriptors of deprecated fields, which warn
        if isinstance(value, _WALKED):
            yield from unsupported_fields(value, f"{prefix}{name}.")
        elif name in default_only and value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}={value!r}"
        elif name in partial and not partial[name].accepts(value):
            yield f"{prefix}{name}={value!r} (this version has {partial[name].values})"


def state_of(kind: type[BaseModel], name: str) -> str:
    """What this version does with a field, for people."""
    if name in ALIASES.get(kind, {}):
        return f"deprecated alias of `{ALIASES[kind][name]}`"
    if (reason := NO_EFFECT.get(kind, {}).get(name)) is not None:
        return f"accepted without effect {reason}".rstrip()
    if kind is KvCacheConfig and name == V1_ONLY:
        return "implemented in V1; V2 always copies"
    if name in DEFAULT_ONLY.get(kind, ()):
        return "not supported yet: default only"
    if isinstance(kind.model_fields[name].get_default(call_default_factory=True), BaseModel):
        return "see its table"
    partial = PARTIAL.get(kind, {}).get(name)
    return f"implemented for {partial.values}" if partial else "implemented"
