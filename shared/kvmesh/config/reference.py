"""The configuration reference page, generated: ``python -m kvmesh.config.reference > docs/configuration.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from kvmesh.config.block_reuse import BlockReuseConfig
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.config.coordinator import CoordinatorSettings
from kvmesh.config.curve import CurveSettings
from kvmesh.config.disagg import (
    ConditionalDisaggConfig,
    DisaggClusterConfig,
    DisaggConfig,
    DisaggServers,
    MinimalInstances,
    OtlpConfig,
)
from kvmesh.config.discovery import DnsSource, EndpointSliceSource, StaticSource
from kvmesh.config.index import RouterIndexSettings
from kvmesh.config.indexer import IndexerSettings
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.kv_events import KVEventsConfig
from kvmesh.config.llm_args import NEUTRAL_ONLY, TRANSLATED, WITHOUT_EFFECT
from kvmesh.config.mamba_state import MambaStateConfig
from kvmesh.config.mesh import MeshSettings
from kvmesh.config.pool_rebalance import KvPoolRebalanceConfig
from kvmesh.config.router import RouterSettings
from kvmesh.config.routing import ConversationPolicy, KvCacheAwarePolicy, LoadBalancingPolicy, RoundRobinPolicy
from kvmesh.config.support import state_of
from kvmesh.config.tls import EtcdTlsSettings, TlsSettings
from kvmesh.config.type_text import constraint_text, default_text, type_text
from kvmesh.config.worker import EventWireSettings, WorkerSettings

__all__ = ["render"]

_INTRODUCTION = """\
# Configuration reference

This page is generated from the classes in `kvmesh.config` by `python -m kvmesh.config.reference`; change the classes,
not the page.

## Where settings come from

Each service reads its settings from four places; an earlier one beats a later one, field by field:

1. flags, such as `--port 9000`; nested fields with a dot: `kv_cache_config.max_tokens`
2. environment variables: `KVMESH_` and the field in capitals, nested fields after a double underscore:
   `KVMESH_PORT=9000`, `KVMESH_KV_CACHE_CONFIG__MAX_TOKENS=4096`; lists are comma-separated or YAML, mappings are YAML,
   `null` unsets
3. a YAML file, given with `--config`
4. the defaults below

Unknown keys are errors that name the nearest right one. Values are converted where that is unambiguous (`"5"` is an
int), except in the two snapshot offset lists, which take integers only. Names carry their units.

In a Kubernetes pod, set `enableServiceLinks: false`: a service named `kvmesh` would otherwise define `KVMESH_PORT`.

## States

| state | meaning |
|---|---|
| implemented | the field does what its description says |
| implemented for ... | so for these values; a server refuses to start with any other |
| accepted without effect | any value is accepted and does nothing here; a server warns once when it is set |
| not supported yet | the classes accept every valid value, but a server refuses to start unless it is the default |
| deprecated alias | copied to the field that it names, with a warning; giving both is an error |
"""

_PUBLIC: tuple[type[BaseModel], ...] = (
    KvCacheConfig,
    BlockReuseConfig,
    MambaStateConfig,
    KvPoolRebalanceConfig,
    KVEventsConfig,
    CacheTransceiverConfig,
)
_SERVICES: tuple[type[BaseModel], ...] = (
    WorkerSettings,
    EventWireSettings,
    RouterSettings,
    RouterIndexSettings,
    RoundRobinPolicy,
    LoadBalancingPolicy,
    KvCacheAwarePolicy,
    ConversationPolicy,
    IndexerSettings,
    CoordinatorSettings,
    StaticSource,
    DnsSource,
    EndpointSliceSource,
    MeshSettings,
    TlsSettings,
    EtcdTlsSettings,
    CurveSettings,
)
_DISAGG: tuple[type[BaseModel], ...] = (
    DisaggConfig,
    DisaggServers,
    ConditionalDisaggConfig,
    DisaggClusterConfig,
    MinimalInstances,
    OtlpConfig,
)

_PUBLIC_INTRODUCTION = """\
## The public classes

Fields, defaults and rules are those of TensorRT-LLM's classes of the same names, so that its `kv_cache_config:` and
`cache_transceiver_config:` sections work unchanged. The helpers of those classes that mirror C++ objects
(`from_pybind`, `maybe_to_pybind` and the like) do not exist: there is no C++ object here to mirror. `model_validate`
and `model_dump` convert from and to plain data; deprecated aliases are left out of dumps.
"""

_WORKER_FILE_INTRODUCTION = """\
## TensorRT-LLM's worker file

A worker's `--config` takes the file of `trtllm-serve --config` (`--extra_llm_api_options`) as it is. Keys that are
fields of `WorkerSettings` mean the same; the others are:
"""

_DISAGG_INTRODUCTION = """\
## TensorRT-LLM's disaggregated file

A router takes the file of `trtllm-serve disaggregated -c` as it is; a worker takes its section of it when its role is
given; `kvmesh up` starts as many servers as it has instances. Any top-level key that is not in `DisaggConfig` is
inherited by both sections as an LLM argument; the same key with a different value in a section is an error, as is a
number of `urls` other than `num_instances`. An `http(s)://` address in `disagg_cluster.cluster_uri` is taken as the
coordinator's; leases and heartbeats are then the coordinator's business. `kvmesh coordinator` and `kvmesh up` take an
`etcd://` address there as the coordinator's `etcd_endpoints`.
"""


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    yield _PUBLIC_INTRODUCTION
    for kind in _PUBLIC:
        yield from _section(kind)
    yield "## The services\n"
    for kind in _SERVICES:
        yield from _section(kind)
    yield _WORKER_FILE_INTRODUCTION
    yield "| keys | what happens |"
    yield "|---|---|"
    yield f"| {_names(TRANSLATED)} | implemented under another name here |"
    yield f"| {_names(WITHOUT_EFFECT)} | accepted without effect; one warning names them |"
    yield f"| {_names(NEUTRAL_ONLY)} | accepted with their neutral value, otherwise not supported yet |"
    yield "| anything else | an error that names the nearest right key |\n"
    yield _DISAGG_INTRODUCTION
    for kind in _DISAGG:
        yield from _section(kind, with_state=False)


def _section(kind: type[BaseModel], *, with_state: bool = True) -> Iterator[str]:
    yield f"### {kind.__name__}\n"
    yield f"{_plain(inspect.getdoc(kind) or '')}\n"
    columns = ["field", "type", "default", "constraint", *(["state"] if with_state else []), "description"]
    yield _row(columns)
    yield _row("---" for _ in columns)
    for name, field in kind.model_fields.items():
        cells = [f"`{name}`", f"`{type_text(field.annotation)}`", f"`{default_text(field)}`", constraint_text(field)]
        yield _row([*cells, *([state_of(kind, name)] if with_state else []), _plain(field.description or "")])
    yield ""


def _row(cells: Iterable[str]) -> str:
    # A bar inside a cell ends the cell, in code spans too, unless it is escaped.
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(docstring: str) -> str:
    """A docstring on one line, with Markdown's single backquotes."""
    return " ".join(docstring.replace("``", "`").split())


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


if __name__ == "__main__":
    sys.stdout.write(render())
