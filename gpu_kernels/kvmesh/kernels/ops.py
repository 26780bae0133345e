"""The kernels as Python operations over torch tensors and raw page addresses: the public face of this package.

Outputs are allocated by the caller. Each call dispatches on its tensors' device: host memory to the CPU library, CUDA
memory to the CUDA library on the current stream. Calls release the GIL.
"""

from __future__ import annotations

from kvmesh.kernels.layers import (
    add_rms_norm,
    gelu_tanh_and_mul,
    paged_attention,
    rms_norm,
    rope_store_kv,
    silu_and_mul,
    store_kv,
)
from kvmesh.kernels.library import KernelError
from kvmesh.kernels.page_lists import PageList, gather_lists, scatter_lists, scatter_lists_checksummed
from kvmesh.kernels.paged import PagedKv
from kvmesh.kernels.pages import (
    checksum_pages,
    copy_pages,
    copy_pages_checksummed,
    gather_pages,
    page_bounds,
    scatter_pages,
)
from kvmesh.kernels.program import Program
from kvmesh.kernels.quantized import (
    QuantizedWeight,
    QuantKind,
    dequantize,
    dequantize_rows,
    quantized_linear,
    quantized_linear_max_tokens,
)
from kvmesh.kernels.runtime import cpu_level, get_num_threads, philox_uint32, set_cpu_level, set_num_threads

__all__ = [
    "KernelError",
    "PageList",
    "PagedKv",
    "Program",
    "QuantKind",
    "QuantizedWeight",
    "add_rms_norm",
    "checksum_pages",
    "copy_pages",
    "copy_pages_checksummed",
    "cpu_level",
    "dequantize",
    "dequantize_rows",
    "gather_lists",
    "gather_pages",
    "gelu_tanh_and_mul",
    "get_num_threads",
    "page_bounds",
    "paged_attention",
    "philox_uint32",
    "quantized_linear",
    "quantized_linear_max_tokens",
    "rms_norm",
    "rope_store_kv",
    "scatter_lists",
    "scatter_lists_checksummed",
    "scatter_pages",
    "set_cpu_level",
    "set_num_threads",
    "silu_and_mul",
    "store_kv",
]
