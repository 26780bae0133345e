"""Which backend and which runtime a server uses: pure decisions from the configuration, the environment and facts.

Rejections are sentences for the person who wrote the configuration; several blockers of pipelined transfer are joined
into one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kvmesh.config.cache_transceiver import CacheTransceiverConfig

__all__ = [
    "BackendName",
    "Resolved",
    "RuntimeName",
    "ServerFacts",
    "TransceiverConfigError",
    "installed_backends",
    "resolve",
    "resolve_backend",
    "resolve_runtime",
]

BackendName = Literal["BUILTIN", "NIXL", "UCX", "MOONCAKE", "MPI"]
RuntimeName = Literal["PYTHON", "CPP"]

ENVIRONMENT_SELECTORS: Final[tuple[tuple[str, BackendName], ...]] = (
    ("TRTLLM_USE_NIXL_KVCACHE", "NIXL"),
    ("TRTLLM_USE_UCX_KVCACHE", "UCX"),
    ("TRTLLM_USE_MOONCAKE_KVCACHE", "MOONCAKE"),
    ("TRTLLM_USE_MPI_KVCACHE", "MPI"),
)
"""In order of precedence, for ``backend: DEFAULT`` only."""

INFLIGHT_CANCEL_VARIABLE: Final = "TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL"


class _Library(NamedTuple):
    name: str
    modules: tuple[str, ...]
    """Any of which will do."""
    extra: str


LIBRARIES: Final[Mapping[BackendName, _Library]] = {
    "NIXL": _Library("NIXL", ("nixl_cu13", "nixl_cu12"), "engine"),
    "UCX": _Library("ucxx", ("ucxx",), "ucx"),
    "MOONCAKE": _Library("Mooncake's transfer engine", ("mooncake",), "mooncake"),
    "MPI": _Library("mpi4py and MPICH", ("mpi4py",), "mpi"),
}

PYTHON_BACKENDS: Final[frozenset[BackendName]] = frozenset({"NIXL", "BUILTIN"})


class TransceiverConfigError(ValueError):
    """The transceiver cannot be built as configured; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the decision needs to know about the server beside its ``cache_transceiver_config``."""

    pool_device: Literal["cpu", "cuda"] = "cpu"
    installed: frozenset[BackendName] = frozenset({"BUILTIN", "NIXL", "UCX", "MOONCAKE", "MPI"})
    """The backends whose library is there."""
    model_runtime: RuntimeName | None = None
    """The runtime that the model declares as its preference."""
    mamba_manager: Literal["v2_hybrid", "cpp", "mixed"] | None = None
    """The cache manager of a recurrent-state model; None for attention-only models."""
    enable_chunked_prefill: bool = True
    cp_size: int = 1
    pp_size: int = 1
    reuse_policy: Literal["off", "all_reusable", "per_request", "per_conversation"] = "all_reusable"


class Resolved(NamedTuple):
    """The effective choice, and what to log about how it came about."""

    backend: BackendName
    runtime: RuntimeName
    warnings: tuple[str, ...] = ()


def installed_backends() -> frozenset[BackendName]:
    """The backends whose library is installed; none is imported."""
    found: set[BackendName] = {
        backend
        for backend, library in LIBRARIES.items()
        if any(importlib.util.find_spec(module) is not None for module in library.modules)
    }
    return frozenset(found | {"BUILTIN"})


def resolve(config: CacheTransceiverConfig, environment: Mapping[str, str], facts: ServerFacts) -> Resolved | None:
    """Everything that can be decided before memory exists; None when the transceiver is turned off.

    Raises:
        TransceiverConfigError: the configuration contradicts itself, the server or what is installed.
    """
    if config.backend is None:
        return None
    backend, backend_warnings = resolve_backend(config, environment, facts)
    runtime, runtime_warnings = resolve_runtime(config, environment, facts, backend)
    if runtime == "CPP" and facts.pool_device == "cuda":
        raise TransceiverConfigError(_cuda_obstacle(config, backend, facts))
    if backend not in facts.installed:
        library = LIBRARIES[backend]
        raise TransceiverConfigError(
            f"cache_transceiver_config.backend resolves to {backend}, which needs {library.name}; "
            f"run `make venv EXTRAS={library.extra}`"
            + ("" if facts.pool_device == "cuda" else ", or set backend: DEFAULT")
        )
    return Resolved(backend, runtime, backend_warnings + runtime_warnings)


def resolve_backend(
    config: CacheTransceiverConfig, environment: Mapping[str, str], facts: ServerFacts
) -> tuple[BackendName, tuple[str, ...]]:
    """The effective backend and warnings. ``config.backend`` must not be None.

    An explicit backend is never replaced. DEFAULT asks the environment selectors, then takes NIXL for CUDA pools and
    the built-in plane for CPU pools.

    Raises:
        TransceiverConfigError: the selectors are ambiguous while in-flight cancel is on.
    """
    warnings: list[str] = []
    if config.backend is None or config.backend == "DEFAULT":
        selected = [(name, backend) for name, backend in ENVIRONMENT_SELECTORS if environment.get(name) == "1"]
        if len(selected) > 1 and environment.get(INFLIGHT_CANCEL_VARIABLE) == "1":
            names = ", ".join(name for name, _ in selected)
            raise TransceiverConfigError(
                f"{INFLIGHT_CANCEL_VARIABLE}=1 needs one backend, but {names} are all set to 1; "
                "set cache_transceiver_config.backend"
            )
        if selected:
            name, backend = selected[0]
            warnings.append(f"{name} selects the {backend} backend; prefer cache_transceiver_config.backend: {backend}")
        else:
            backend = "NIXL" if facts.pool_device == "cuda" else "BUILTIN"
    else:
        backend = config.backend
    if backend == "MPI":
        warnings.append("the MPI transfer backend is deprecated; prefer DEFAULT or NIXL")
    return backend, tuple(warnings)


def resolve_runtime(
    config: CacheTransceiverConfig, environment: Mapping[str, str], facts: ServerFacts, backend: BackendName
) -> tuple[RuntimeName, tuple[str, ...]]:
    """The effective runtime and warnings.

    None means CPP. ``auto`` takes the model's preference, else PYTHON unless the backend or a missing timeout rules it
    out; that fall-back is only logged, and each server decides alone.

    Raises:
        TransceiverConfigError: a combination that cannot work.
    """
    warnings: list[str] = []
    configured = config.transceiver_runtime
    runtime: RuntimeName
    if configured == "auto":
        runtime = facts.model_runtime or "PYTHON"
        obstacle = _python_obstacle(config, backend)
        if facts.model_runtime is None and obstacle is not None:
            runtime = "CPP"
            # For the other backends that is the rule, and what the server says of its transceiver shows it.
            if backend in PYTHON_BACKENDS:
                warnings.append(f"transceiver_runtime: auto falls back to CPP: {obstacle}")
    elif configured is None and config.enable_pipelined_transfer and backend in PYTHON_BACKENDS:
        runtime = "PYTHON"
        warnings.append("enable_pipelined_transfer selects transceiver_runtime: PYTHON")
    else:
        runtime = configured or "CPP"

    if config.enable_pipelined_transfer and (blockers := _pipelining_blockers(config, facts, backend, runtime)):
        raise TransceiverConfigError("enable_pipelined_transfer cannot be used: " + "; ".join(blockers))
    if runtime == "PYTHON" and (obstacle := _python_obstacle(config, backend)) is not None:
        remedy = "" if backend not in PYTHON_BACKENDS else "set one, or "
        raise TransceiverConfigError(f"{obstacle}; {remedy}set transceiver_runtime to auto or CPP")
    if runtime == "PYTHON" and facts.cp_size != 1:
        raise TransceiverConfigError(f"the Python transceiver needs cp_size == 1, got {facts.cp_size}")
    if runtime == "PYTHON" and config.kv_cache_bounce_size_mb and facts.pool_device == "cuda":
        raise TransceiverConfigError(
            f"kv_cache_bounce_size_mb works on pools in host memory; set it to 0 on CUDA, not "
            f"{config.kv_cache_bounce_size_mb}"
        )
    if runtime == "CPP" and config.kv_cache_bounce_size_mb:
        warnings.append("kv_cache_bounce_size_mb has no effect with transceiver_runtime CPP")
    if runtime == "PYTHON" and config.max_tokens_in_buffer is not None:
        warnings.append("max_tokens_in_buffer has no effect with transceiver_runtime PYTHON")
    _check_mamba(facts, runtime)
    if environment.get(INFLIGHT_CANCEL_VARIABLE) == "1" and (
        runtime != "CPP" or backend != "NIXL" or config.kv_transfer_timeout_ms is None
    ):
        raise TransceiverConfigError(
            f"{INFLIGHT_CANCEL_VARIABLE}=1 needs transceiver_runtime: CPP, backend: NIXL and a finite "
            f"kv_transfer_timeout_ms; this server has {runtime}, {backend} and {config.kv_transfer_timeout_ms}"
        )
    return runtime, tuple(warnings)


def _python_obstacle(config: CacheTransceiverConfig, backend: BackendName) -> str | None:
    if backend not in PYTHON_BACKENDS:
        return f"the Python transceiver currently only supports NIXL and the built-in plane, not {backend}"
    if config.kv_transfer_timeout_ms is None:
        return "the Python transceiver requires a finite kv_transfer_timeout_ms"
    return None


def _cuda_obstacle(config: CacheTransceiverConfig, backend: BackendName, facts: ServerFacts) -> str:
    """Why a server with CUDA pools comes to the CPP runtime, which cannot read them, and what to change."""
    if config.transceiver_runtime != "auto":
        cause = f"is {'unset, which means CPP' if config.transceiver_runtime is None else 'CPP'}"
    elif facts.model_runtime == "CPP":
        cause = "is auto, and the model asks for CPP"
    else:
        cause = f"is auto and falls back to CPP ({_python_obstacle(config, backend)})"
    return (
        f"cache_transceiver_config.transceiver_runtime {cause}: it stages pages in host memory and cannot read CUDA "
        "pools; set transceiver_runtime: PYTHON, backend: NIXL and a finite kv_transfer_timeout_ms"
    )


def _pipelining_blockers(
    config: CacheTransceiverConfig, facts: ServerFacts, backend: BackendName, runtime: RuntimeName
) -> list[str]:
    blockers: list[str] = []
    if runtime == "CPP":
        named = "unset" if config.transceiver_runtime is None else config.transceiver_runtime
        blockers.append(f"transceiver_runtime must be PYTHON, not {named}")
    if backend != "NIXL":
        chosen = "DEFAULT, which is the built-in plane here" if backend == "BUILTIN" else backend
        blockers.append(f"the backend must be NIXL, not {chosen}")
    if not facts.enable_chunked_prefill:
        blockers.append("enable_chunked_prefill is required")
    if config.kv_cache_bounce_size_mb:
        blockers.append(f"kv_cache_bounce_size_mb must be 0, not {config.kv_cache_bounce_size_mb}")
    if facts.mamba_manager is not None:
        blockers.append("recurrent-state (Mamba, hybrid) cache managers cannot be pipelined")
    if facts.cp_size > 1:
        blockers.append(f"cp_size must be 1, not {facts.cp_size}")
    if facts.reuse_policy not in ("off", "all_reusable"):
        blockers.append(f"block_reuse_config.policy must be all_reusable, not {facts.reuse_policy}")
    if facts.pp_size > 1:
        blockers.append(f"pipeline_parallel_size must be 1, not {facts.pp_size}")
    return blockers


def _check_mamba(facts: ServerFacts, runtime: RuntimeName) -> None:
    if facts.mamba_manager in {"v2_hybrid", "mixed"} and runtime != "PYTHON":
        raise TransceiverConfigError(f"a {facts.mamba_manager} Mamba cache manager needs transceiver_runtime: PYTHON")
    if facts.mamba_manager == "cpp" and runtime == "PYTHON":
        raise TransceiverConfigError("a C++ Mamba cache manager cannot be used with transceiver_runtime: PYTHON")
