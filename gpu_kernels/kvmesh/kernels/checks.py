"""Checks of the arguments that the operations share, and the call into the CUDA library."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from kvmesh.kernels.library import Kernel, KernelError, check, load_cuda
from kvmesh.kernels.paged import COMPUTE_DTYPES

__all__ = ["GROUPED", "call_cuda", "compute_dtype", "require", "token_stride"]

GROUPED: Final = 3
"""Dimensions of a tensor whose tokens consist of heads."""


def require(condition: bool, operation: str, problem: str) -> None:
    """Raise unless `condition` holds.

    Raises:
        KernelError: Naming the operation and the problem.
    """
    if not condition:
        msg = f"{operation}: {problem}"
        raise KernelError(msg)


def token_stride(tensor: Tensor) -> int:
    """Return the elements between tokens, having checked that a token is contiguous."""
    stride = tensor.stride()
    if stride[-1] != 1 or (len(stride) == GROUPED and stride[1] != tensor.shape[2]):
        msg = f"a tensor of shape {tuple(tensor.shape)} and strides {stride} is not contiguous inside a token"
        raise KernelError(msg)
    return stride[0]


def compute_dtype(first: Tensor, *others: Tensor) -> int:
    """Return the C code of the dtype that all the tensors share."""
    dtype = first.dtype
    for tensor in others:
        if tensor.dtype is not dtype:
            msg = f"tensors differ in dtype: {dtype} and {tensor.dtype}"
            raise KernelError(msg)
    code = COMPUTE_DTYPES.get(dtype)
    if code is None:
        msg = f"unsupported dtype {dtype}; use float32, float16 or bfloat16"
        raise KernelError(msg)
    return code


@lru_cache(maxsize=64)
def _cuda_kernel(name: str) -> Kernel:
    return load_cuda().kernel(name)


def call_cuda(name: str, tensor: Tensor, arguments: tuple[Any, ...]) -> None:
    """Enqueue an operation on the current stream of the tensor's device."""
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream().cuda_stream
        check(_cuda_kernel(name)(*arguments, stream), name)
