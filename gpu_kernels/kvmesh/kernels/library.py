"""Load the native kernel libraries and describe their C functions (csrc/include/kvmesh_kernels.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvmesh.kernels import _native

__all__ = [
    "ABI_VERSION",
    "CPU_LIBRARY",
    "CUDA_LIBRARY",
    "CpuLibrary",
    "CudaLibrary",
    "Kernel",
    "KernelError",
    "check",
    "load_cpu",
    "load_cuda",
]

ABI_VERSION: Final = 3
CPU_LIBRARY: Final = Path(__file__).with_name("libkvmesh_cpu.so")
CUDA_LIBRARY: Final = Path(__file__).with_name("libkvmesh_cuda.so")

Kernel = Callable[..., int]
_HOW: Final = "`python -m kvmesh.kernels.build`"

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

# Argument types of the CUDA operations, in front of the stream. (The CPU library describes its own.)
_CUDA_ARGUMENTS: Final = {
    "rms_norm": (_P, _I64, _P, _I64, _P, _I64, _I64, _I64, _F32, _F32, _I32),
    "add_rms_norm": (_P, _I64, _P, _I64, _P, _I64, _P, _I64, _I64, _F32, _F32, _I32),
    "silu_and_mul": (_P, _I64, _P, _I64, _I64, _I64, _I32),
    "gelu_tanh_and_mul": (_P, _I64, _P, _I64, _I64, _I64, _I32),
    "store_kv": (_P, _I64, _P, _I64, _I32, _P, _P, _I64),
    "rope_store_kv": (_P, _I64, _P, _I64, _P, _I64, _I32, _P, _P, _P, _P, _P, _I64, _I32, _I32),
    "paged_attention": (_P, _I64, _P, _I64, _I32, _P, _P, _I64, _P, _P, _I64, _I32, _I32, _F32, _I32, _F32),
    "gather_pages": (_P, _P, _P, _I64, _I64, _I64),
    "scatter_pages": (_P, _P, _P, _I64, _I64, _I64),
    "copy_pages": (_P, _P, _I64, _P, _P, _I64, _I64, _I64),
}
_MESSAGES: Final = {
    -1: "unsupported dtype",
    -2: "inconsistent shapes",
    -3: "out of memory",
    -4: "the device reported an error",
}


class KernelError(RuntimeError):
    """A kernel library is missing, or refused a call."""


class KernelLibrary:
    """A native library whose functions share a prefix. Calls release the GIL."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._library = ctypes.CDLL(str(path))
        self._prefix = prefix
        found = int(self.function("abi_version", ctypes.c_int)())
        if found != ABI_VERSION:
            msg = f"{path.name} has interface {found}, this package needs {ABI_VERSION}: rebuild it with {_HOW}"
            raise KernelError(msg)

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Return the exported function `<prefix><name>` with the given C types."""
        function = self._library[self._prefix + name]
        function.restype = result
        function.argtypes = arguments
        return function


class CpuLibrary(KernelLibrary):
    """The kernels on host memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "kvmesh_cpu_")
        self._entry = self.function("entry", ctypes.c_void_p, ctypes.c_char_p)

    def kernel(self, name: str) -> Kernel:
        """Return an operation, which returns 0 or a status for `check`."""
        return _native.Kernel(self._entry(name.encode()))


class CudaLibrary(KernelLibrary):
    """The kernels on GPU memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "kvmesh_cuda_")

    def kernel(self, name: str) -> Kernel:
        """Return an operation, which takes the stream as its last argument; it returns 0 or a status for `check`."""
        return self.function(name, ctypes.c_int, *_CUDA_ARGUMENTS[name], _P)


def check(status: int, operation: str) -> None:
    """Raise for a status other than 0.

    Raises:
        KernelError: Naming the operation and what it refused.
    """
    if status != 0:
        msg = f"{operation}: {_MESSAGES.get(status, f'status {status}')}"
        raise KernelError(msg)


@lru_cache(maxsize=1)
def load_cpu() -> CpuLibrary:
    """Return the CPU library, loaded once per process.

    Raises:
        KernelError: The library is not built, or was built from other sources.
    """
    if not CPU_LIBRARY.is_file():
        msg = f"{CPU_LIBRARY} is missing: build it with {_HOW}"
        raise KernelError(msg)
    return CpuLibrary(CPU_LIBRARY)


@lru_cache(maxsize=1)
def load_cuda() -> CudaLibrary:
    """Return the CUDA library, loaded once per process.

    Raises:
        KernelError: The library is not built (it needs nvcc and is not part of the default install).
    """
    if not CUDA_LIBRARY.is_file():
        msg = f"{CUDA_LIBRARY} is missing: build it with `python -m kvmesh.kernels.build --cuda` where nvcc is"
        raise KernelError(msg)
    return CudaLibrary(CUDA_LIBRARY)
