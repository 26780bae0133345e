"""Programs: the kernel calls of one step, recorded once and repeated without Python.

A decode step of a small model makes hundreds of kernel calls whose arguments never change from step to step while the
batch has the same shape: the same buffers, the same weights, other contents. Recording them saves the Python work
between them, as CUDA graphs do on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.kernels import _native
from kvmesh.kernels.library import check

__all__ = ["Program"]


class Program:
    """Recorded calls of `kvmesh.kernels.ops` on CPU memory.

    Only those operations are recorded: what torch or numpy does meanwhile happens once and is not repeated. Addresses,
    shapes and strides are fixed by the recording; the contents of tensors (block tables, positions, lengths included)
    are read anew by every run. The caller keeps every tensor alive; nothing here refers to them.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls = _native.Program()

    def __len__(self) -> int:
        """Return the number of recorded calls."""
        return len(self._calls)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Execute and record the operations that the calling thread makes in the context; forget earlier ones.

        Raises:
            RuntimeError: The thread is recording already.
        """
        self._calls.start()
        try:
            yield
        finally:
            self._calls.stop()

    def run(self) -> None:
        """Repeat the recorded calls in order, the GIL released throughout.

        Raises:
            KernelError: An operation refused its arguments (a context length that does not fit, say); the calls after
                it were not made.
        """
        failure = self._calls.run()
        if failure is not None:
            check(*failure)
