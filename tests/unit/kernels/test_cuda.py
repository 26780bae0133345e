"""The CUDA kernels: they compile with nvcc, and compute what the CPU kernels do (emulated, and on a GPU)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.kernels import build, layers, ops, pages
from kvmesh.kernels.library import CUDA_LIBRARY, CudaLibrary

pytestmark = pytest.mark.slow

EMULATION = Path(__file__).with_name("cuda_emulation")
LAYER_OPERATIONS = (
    "rms_norm", "add_rms_norm", "silu_and_mul", "gelu_tanh_and_mul", "store_kv", "rope_store_kv", "paged_attention",
)  # fmt: skip
PAGE_OPERATIONS = ("gather_pages", "scatter_pages", "copy_pages")
OPERATIONS = dict.fromkeys(LAYER_OPERATIONS, layers) | dict.fromkeys(PAGE_OPERATIONS, pages)


@pytest.mark.parametrize("source", build.cuda_sources(), ids=lambda path: path.name)
def test_compiles_with_nvcc(source, tmp_path):
    build.compile_cuda_object(source, tmp_path / "object.o")


@pytest.fixture(scope="module")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    compiler = shutil.which("g++")
    assert compiler is not None
    target = tmp_path_factory.mktemp("cuda") / "libkvmesh_cuda_emulated.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{EMULATION}", "-Wno-unknown-pragmas", "-x", "c++"]
    result = subprocess.run(
        [*command, *map(str, build.cuda_sources()), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return CudaLibrary(target)


@pytest.fixture
def emulated(emulated_library, monkeypatch) -> None:
    """Send the operations on CPU tensors to the emulated CUDA library."""
    for name, module in OPERATIONS.items():
        kernel = emulated_library.kernel(name)
        monkeypatch.setattr(module, f"_{name}", lambda *arguments, kernel=kernel: kernel(*arguments, None))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "window", "soft_cap"), [(64, 0, 0.0), (64, 21, 0.0), (40, 0, 5.0), (128, 0, 0.0), (160, 9, 0.0)]
)
def test_attention_equals_reference(make_pages, attention_reference, dtype, head_dim, window, soft_cap):
    query_lens, context_lens = [1, 0, 23, 3], [70, 4, 40, 33]
    case = make_pages(context_lens, kv_heads=2, head_dim=head_dim, tokens_per_block=16, dtype=dtype)
    check_attention(case, attention_reference, query_lens, context_lens, dtype, window, soft_cap)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("window", [0, 600])
def test_attention_with_split_keys_equals_reference(make_pages, attention_reference, window):
    query_lens, context_lens = [1, 17, 2], [2500, 40, 900]
    case = make_pages(context_lens, kv_heads=1, head_dim=32, tokens_per_block=128, dtype=torch.float32)
    check_attention(case, attention_reference, query_lens, context_lens, torch.float32, window, 0.0)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("window", [9, 1500])
def test_nothing_left_of_the_windows_is_read(make_pages, leave_windows, attention_reference, window):
    query_lens, context_lens = [1, 40, 3], [2500, 2100, 60]
    case = make_pages(context_lens, kv_heads=1, head_dim=32, tokens_per_block=16, dtype=torch.float32)
    holes = leave_windows(case, query_lens, context_lens, window)
    assert (holes.block_tables == -1).any()
    check_attention(
        holes, lambda _, *rest: attention_reference(case, *rest), query_lens, context_lens, torch.float32, window, 0.0
    )


def check_attention(case, reference, query_lens, context_lens, dtype, window, soft_cap):
    dim, heads = case.kv.head_dim, 3 * case.kv.num_kv_heads
    q = torch.randn(sum(query_lens), heads, dim).to(dtype)
    out = torch.empty_like(q)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32)
    ops.paged_attention(out, q, case.kv, case.block_tables, starts, lens, dim**-0.5, window, soft_cap)
    expected = reference(case, q, query_lens, context_lens, dim**-0.5, window, soft_cap)
    tolerance = 3e-6 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def on_both(
    monkeypatch: pytest.MonkeyPatch, library: CudaLibrary, name: str, call: Callable[[], list[torch.Tensor]]
) -> None:
    """Compare what an operation leaves behind on the CPU library and on the emulated one."""
    expected = call()
    kernel = library.kernel(name)
    with monkeypatch.context() as patch:
        patch.setattr(OPERATIONS[name], f"_{name}", lambda *arguments: kernel(*arguments, None))
        actual = call()
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-2 if a.dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_equals_cpu(monkeypatch, emulated_library, dtype):
    x, residual, weight = torch.randn(5, 300).to(dtype), torch.randn(5, 300).to(dtype), torch.randn(300).to(dtype)
    heads, head_weight = torch.randn(4, 3, 64).to(dtype), torch.randn(64).to(dtype)

    def norm():
        out, out_heads = torch.empty_like(x), torch.empty_like(heads)
        ops.rms_norm(out, x, weight, 1e-5)
        ops.rms_norm(out_heads, heads, head_weight, 1e-5, 1.0)
        return [out, out_heads]

    def add_norm():
        out, total = torch.empty_like(x), residual.clone()
        ops.add_rms_norm(out, total, x, weight, 1e-5, 1.0)
        return [out, total]

    def gelu():
        out = torch.empty(5, 150, dtype=dtype)
        ops.gelu_tanh_and_mul(out, x)
        return [out]

    def silu():
        out = torch.empty(5, 150, dtype=dtype)
        ops.silu_and_mul(out, x)
        return [out]

    on_both(monkeypatch, emulated_library, "rms_norm", norm)
    on_both(monkeypatch, emulated_library, "add_rms_norm", add_norm)
    on_both(monkeypatch, emulated_library, "silu_and_mul", silu)
    on_both(monkeypatch, emulated_library, "gelu_tanh_and_mul", gelu)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_stores_equal_cpu(monkeypatch, emulated_library, make_pages, kv_dtype):
    q, k, v = torch.randn(6, 4, 40), torch.randn(6, 2, 40), torch.randn(6, 2, 40)
    angles = torch.rand(50, 10) * 6
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    positions, slots = torch.tensor([0, 7, 49, 3, 2, 1], dtype=torch.int32), torch.tensor([9, 0, -1, 5, 14, 2])

    def store():
        case = make_pages([16], kv_heads=2, head_dim=40, tokens_per_block=4, dtype=kv_dtype)
        ops.store_kv(k, v, case.kv, slots)
        return [case.pool]

    def rope_store():
        case = make_pages([16], kv_heads=2, head_dim=40, tokens_per_block=4, dtype=torch.float32)
        rotated_q, rotated_k = q.clone(), k.clone()
        ops.rope_store_kv(rotated_q, rotated_k, v, cos, sin, positions, case.kv, slots)
        stored = torch.nan_to_num(case.pool.view(torch.float32))
        return [rotated_q, rotated_k, stored]

    on_both(monkeypatch, emulated_library, "store_kv", store)
    on_both(monkeypatch, emulated_library, "rope_store_kv", rope_store)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("page_bytes", "stride"), [(4096, 4096), (1000, 1003), (70_000, 70_016)])
def test_page_moves(page_bytes, stride):
    source = np.random.default_rng(0).integers(0, 256, 6 * stride, dtype=np.uint8)
    ids, target = np.array([4, 0, 5], dtype=np.int32), np.zeros_like(source)
    run = np.empty(3 * page_bytes, dtype=np.uint8)
    ops.gather_pages(run.ctypes.data, source.ctypes.data, ids, page_bytes, stride)
    assert np.array_equal(run.reshape(3, -1), source.reshape(6, -1)[ids, :page_bytes])
    ops.scatter_pages(target.ctypes.data, run.ctypes.data, ids, page_bytes, stride)
    assert np.array_equal(target.reshape(6, -1)[ids, :page_bytes], run.reshape(3, -1))
    ops.copy_pages(target.ctypes.data, np.array([1], np.int32), source.ctypes.data, np.array([2], np.int32), page_bytes)
    assert np.array_equal(target[page_bytes : 2 * page_bytes], source[2 * page_bytes : 3 * page_bytes])
    to, origin = np.array([3, 1], np.int32), np.array([2, 5], np.int32)
    ops.copy_pages(target.ctypes.data + 10, to, source.ctypes.data + 7, origin, 500, stride, stride)
    assert np.array_equal(target.reshape(6, -1)[to, 10:510], source.reshape(6, -1)[origin, 7:507])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(not CUDA_LIBRARY.is_file(), reason="libkvmesh_cuda.so is not built (kvmesh.kernels.build --cuda)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_on_a_gpu(make_pages, attention_reference, dtype):
    query_lens, context_lens = [1, 70, 17], [2500, 130, 17]
    case = make_pages(context_lens, kv_heads=3, head_dim=64, tokens_per_block=32, dtype=dtype)
    q = torch.randn(sum(query_lens), 9, 64).to(dtype)
    expected = attention_reference(case, q, query_lens, context_lens, 0.125, 0, 0.0)
    pool = case.pool.cuda()
    out = torch.empty_like(q, device="cuda")
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device="cuda")
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    kv = case.kv._replace(base=pool.data_ptr())
    ops.paged_attention(out, q.cuda(), kv, case.block_tables.cuda(), starts, lens, 0.125)
    tolerance = 3e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
