from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.config.transfer_backend import (
    Resolved,
    ServerFacts,
    TransceiverConfigError,
    resolve,
)

CUDA = ServerFacts(pool_device="cuda")
CPU = ServerFacts(pool_device="cpu")
NIXL, UCX, MOONCAKE, MPI = (f"TRTLLM_USE_{name}_KVCACHE" for name in ("NIXL", "UCX", "MOONCAKE", "MPI"))
INFLIGHT = "TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL"


def config(backend: str | None = "DEFAULT", runtime: str | None = "auto", **fields: Any) -> CacheTransceiverConfig:
    return CacheTransceiverConfig(backend=backend, transceiver_runtime=runtime, **fields)  # type: ignore[arg-type]


def decide(settings: CacheTransceiverConfig, facts: ServerFacts = CPU, **environment: str) -> Resolved:
    resolved = resolve(settings, environment, facts)
    assert resolved is not None
    return resolved


def test_no_backend_turns_the_transceiver_off() -> None:
    assert resolve(config(None), {NIXL: "1"}, CUDA) is None


@pytest.mark.parametrize(
    ("facts", "environment", "backend"),
    [
        (CUDA, {}, "NIXL"),
        (CPU, {}, "BUILTIN"),
        (CPU, {UCX: "1"}, "UCX"),
        (CUDA, {NIXL: "1", UCX: "1"}, "NIXL"),
        (CPU, {NIXL: "1"}, "NIXL"),
        (CPU, {MOONCAKE: "1", MPI: "1"}, "MOONCAKE"),
        (CPU, {UCX: "0", MPI: "1"}, "MPI"),
        (CPU, {UCX: "true"}, "BUILTIN"),
    ],
)
def test_default_asks_the_environment_then_the_pools(
    facts: ServerFacts, environment: dict[str, str], backend: str
) -> None:
    resolved = decide(config(), facts, **environment)
    assert resolved.backend == backend
    assert any("prefer cache_transceiver_config.backend" in warning for warning in resolved.warnings) == (
        "1" in environment.values()
    )


@pytest.mark.parametrize("backend", ["NIXL", "UCX", "MOONCAKE", "MPI"])
def test_an_explicit_backend_is_never_replaced(backend: str) -> None:
    resolved = decide(config(backend), CPU, **{MPI: "1", UCX: "1"})
    assert resolved.backend == backend
    assert any("deprecated" in warning for warning in resolved.warnings) == (backend == "MPI")


def test_several_selectors_are_ambiguous_only_with_inflight_cancel() -> None:
    assert decide(config(runtime="CPP"), **{NIXL: "1", INFLIGHT: "1"}).backend == "NIXL"
    with pytest.raises(TransceiverConfigError, match=f"{NIXL}, {UCX} are all set"):
        decide(config(runtime="CPP"), **{NIXL: "1", UCX: "1", INFLIGHT: "1"})


@pytest.mark.parametrize(
    ("settings", "facts", "runtime"),
    [
        (config(), CUDA, "PYTHON"),
        (config(), CPU, "PYTHON"),
        (config("UCX"), CPU, "CPP"),
        (config("NIXL", kv_transfer_timeout_ms=None), CPU, "CPP"),
        (config("NIXL", None), CPU, "CPP"),
        (config("NIXL", "CPP"), CPU, "CPP"),
        (config("NIXL"), ServerFacts(model_runtime="CPP"), "CPP"),
    ],
)
def test_runtime(settings: CacheTransceiverConfig, facts: ServerFacts, runtime: str) -> None:
    assert decide(settings, facts).runtime == runtime


def test_a_fall_back_is_only_logged() -> None:
    (warning,) = decide(config("NIXL", kv_transfer_timeout_ms=None)).warnings
    assert "auto falls back to CPP" in warning
    assert "kv_transfer_timeout_ms" in warning
    assert decide(config("UCX")).warnings == (), "it has no other runtime"


@pytest.mark.parametrize(
    ("settings", "facts", "environment", "message"),
    [
        (config("UCX", "PYTHON"), CUDA, {}, "only supports NIXL and the built-in plane, not UCX; set"),
        (config("NIXL", "PYTHON", kv_transfer_timeout_ms=None), CUDA, {}, "finite kv_transfer_timeout_ms; set one, or"),
        (config("NIXL", "PYTHON"), ServerFacts(cp_size=2), {}, "cp_size == 1, got 2"),
        (config("NIXL", "CPP"), ServerFacts(mamba_manager="v2_hybrid"), {}, "v2_hybrid Mamba"),
        (config("NIXL", "CPP"), ServerFacts(mamba_manager="mixed"), {}, "mixed Mamba"),
        (config("NIXL", "PYTHON"), ServerFacts(mamba_manager="cpp"), {}, "C\\+\\+ Mamba"),
        (config("NIXL", "PYTHON"), CUDA, {INFLIGHT: "1"}, "needs transceiver_runtime: CPP"),
        (config("UCX", "CPP"), CUDA, {INFLIGHT: "1"}, "UCX"),
        (config("NIXL", "CPP", kv_transfer_timeout_ms=None), CUDA, {INFLIGHT: "1"}, "finite"),
    ],
)
def test_rejections(
    settings: CacheTransceiverConfig, facts: ServerFacts, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(TransceiverConfigError, match=message):
        decide(settings, facts, **environment)


@pytest.mark.parametrize(
    ("settings", "model_runtime", "cause"),
    [
        (config("NIXL", "CPP"), None, "transceiver_runtime is CPP: "),
        (config("NIXL", None), None, "transceiver_runtime is unset, which means CPP: "),
        (config("UCX"), None, r"is auto and falls back to CPP \(the Python transceiver .*not UCX\)"),
        (config("MPI"), None, r"is auto and falls back to CPP \(.*not MPI\)"),
        (config("NIXL", kv_transfer_timeout_ms=None), None, r"falls back to CPP \(.*finite kv_transfer_timeout_ms\)"),
        (config("NIXL"), "CPP", "is auto, and the model asks for CPP"),
    ],
)
def test_staging_of_cuda_pools_is_refused_before_there_is_any_memory(
    settings: CacheTransceiverConfig, model_runtime: Any, cause: str
) -> None:
    facts = ServerFacts(pool_device="cuda", model_runtime=model_runtime)
    with pytest.raises(TransceiverConfigError, match=f"{cause}.*cannot read CUDA pools; set .*: PYTHON"):
        decide(settings, facts)


def test_a_missing_library_names_the_extra_and_nothing_takes_its_place() -> None:
    nothing = frozenset({"BUILTIN"})
    for settings, device, extra in [
        (config("NIXL"), "cpu", "engine"),
        (config(), "cuda", "engine"),
        (config("UCX"), "cpu", "ucx"),
        (config("MOONCAKE"), "cpu", "mooncake"),
        (config("MPI"), "cpu", "mpi"),
    ]:
        with pytest.raises(TransceiverConfigError, match=rf"make venv EXTRAS={extra}"):
            decide(settings, ServerFacts(pool_device=device, installed=nothing))  # type: ignore[arg-type]
    assert decide(config(), ServerFacts(pool_device="cpu", installed=nothing)).backend == "BUILTIN"  # type: ignore[arg-type]


def test_libraries_are_found_without_importing_them() -> None:
    code = (
        "import sys; from kvmesh.config.transfer_backend import installed_backends;"
        "assert 'BUILTIN' in installed_backends();"
        "assert not {'nixl_cu13', 'nixl_cu12', 'ucxx', 'mooncake', 'mpi4py'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# T4 and the static rejections of pipelined transfer.


def test_pipelined_transfer_selects_python() -> None:
    resolved = decide(config("NIXL", None, enable_pipelined_transfer=True))
    assert resolved.runtime == "PYTHON"
    assert "enable_pipelined_transfer selects" in resolved.warnings[0]


@pytest.mark.parametrize(
    ("backend", "runtime", "fields", "facts", "message"),
    [
        ("UCX", None, {}, {}, "the backend must be NIXL, not UCX"),
        ("NIXL", "CPP", {}, {}, "transceiver_runtime must be PYTHON, not CPP"),
        ("NIXL", "auto", {"kv_cache_bounce_size_mb": 64}, {}, "kv_cache_bounce_size_mb must be 0, not 64"),
        ("NIXL", "auto", {}, {"enable_chunked_prefill": False}, "enable_chunked_prefill is required"),
        ("NIXL", "auto", {}, {"mamba_manager": "v2_hybrid"}, "recurrent-state"),
        ("NIXL", "auto", {}, {"reuse_policy": "per_conversation"}, "all_reusable, not per_conversation"),
        ("NIXL", "auto", {}, {"reuse_policy": "per_request"}, "all_reusable, not per_request"),
        ("NIXL", "auto", {}, {"cp_size": 2}, "cp_size must be 1, not 2"),
        (
            "DEFAULT",
            None,
            {},
            {"pool_device": "cpu"},
            "the backend must be NIXL, not DEFAULT, which is the built-in",
        ),
        ("NIXL", "auto", {}, {"pp_size": 2}, "pipeline_parallel_size must be 1, not 2"),
    ],
)
def test_pipelined_rejections(
    backend: str, runtime: str | None, fields: dict[str, Any], facts: dict[str, Any], message: str
) -> None:
    settings = config(backend, runtime, enable_pipelined_transfer=True, **fields)
    with pytest.raises(TransceiverConfigError, match=message):
        decide(settings, ServerFacts(**{"pool_device": "cuda", **facts}))


def test_several_blockers_come_in_one_message() -> None:
    settings = config("NIXL", "PYTHON", enable_pipelined_transfer=True, kv_cache_bounce_size_mb=64)
    with pytest.raises(TransceiverConfigError) as error:
        decide(settings, ServerFacts(pool_device="cuda", enable_chunked_prefill=False))
    assert str(error.value).endswith(
        "cannot be used: enable_chunked_prefill is required; kv_cache_bounce_size_mb must be 0, not 64"
    )


def test_bounce_needs_host_memory() -> None:
    with pytest.raises(TransceiverConfigError, match=r"kv_cache_bounce_size_mb works on pools in host memory"):
        decide(config("NIXL", kv_cache_bounce_size_mb=8), CUDA)
    assert decide(config("NIXL", kv_cache_bounce_size_mb=8), CPU).warnings == ()


@pytest.mark.parametrize(
    ("runtime", "fields", "warning"),
    [
        ("CPP", {"kv_cache_bounce_size_mb": 8}, "kv_cache_bounce_size_mb has no effect"),
        ("PYTHON", {"max_tokens_in_buffer": 64}, "max_tokens_in_buffer has no effect"),
    ],
)
def test_what_a_runtime_has_no_use_for_is_said(runtime: str, fields: dict[str, int], warning: str) -> None:
    """§2b."""
    assert any(warning in said for said in decide(config("DEFAULT", runtime, **fields), CPU).warnings)
    other = "CPP" if runtime == "PYTHON" else "PYTHON"
    assert decide(config("DEFAULT", other, **fields), CPU).warnings == ()
