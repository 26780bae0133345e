"""The memory of a CUDA GPU as a device of the cache."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import DeviceBuffer, DeviceMemoryError, Fence
from kvmesh.cache.runs import page_runs

__all__ = ["CudaDevice"]

_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: page-locked for every GPU of the process."""


class CudaDevice:
    """Memory of one CUDA GPU, allocated through torch so that both share one context and one allocator.

    Args:
        index: the GPU's index.
    """

    is_host_memory: ClassVar[bool] = False

    def __init__(self, index: int = 0) -> None:
        import torch

        self._torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"

    @property
    def free_bytes(self) -> int:
        """Free bytes as the driver reports them."""
        import torch

        free, _total = torch.cuda.mem_get_info(self._torch_device)
        return int(free)

    def allocate(self, nbytes: int, reserve_bytes: int | None = None) -> DeviceBuffer:
        """A zeroed buffer.

        Raises:
            DeviceMemoryError: the GPU has not enough free memory, or a reserve is asked for.
        """
        import torch

        if reserve_bytes is not None and reserve_bytes > nbytes:
            raise self._cannot_reserve()
        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"cannot allocate {nbytes} bytes: {error}") from error
        return DeviceBuffer(tensor.data_ptr(), nbytes, fd=None, owner=tensor)

    def resize(self, buffer: DeviceBuffer, nbytes: int) -> None:
        """See :meth:`Device.resize`; only the present size will do.

        Raises:
            DeviceMemoryError: the size would change.
        """
        if nbytes != buffer.nbytes:
            raise self._cannot_reserve()

    def _cannot_reserve(self) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"{self.name} cannot reserve addresses, so its pools keep their sizes: "
            "rebalancing pools (enable_kv_pool_rebalance) needs a device that can"
        )

    def free(self, buffer: DeviceBuffer) -> None:
        """Give ``buffer`` back to torch's allocator."""
        buffer.drop()

    def copy_pages(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> None:
        """Copy whole pages on the current stream."""
        import torch

        source = src.tensor.view(-1, page_bytes)
        target = dst.tensor.view(-1, page_bytes)
        to = torch.from_numpy(dst_slots.astype(np.int64)).to(self._torch_device)
        frm = torch.from_numpy(src_slots.astype(np.int64)).to(self._torch_device)
        target[to] = source[frm]

    def register_host(self, memory: NDArray[np.uint8]) -> None:
        """Page-lock ``memory``, in place: torch's own pinned allocations are rounded up to powers of two.

        Raises:
            DeviceMemoryError: CUDA refuses.
        """
        import torch

        with torch.cuda.device(self._torch_device):
            status = int(_cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
        if status != 0:
            # CUDA keeps the error for whoever asks next: let that be somebody who does not mind.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._torch_device)
            raise DeviceMemoryError(f"cannot page-lock {memory.nbytes} bytes of host memory: CUDA error {status}")

    def unregister_host(self, memory: NDArray[np.uint8]) -> None:
        """See :meth:`Device.unregister_host`."""
        _cudart().cudaHostUnregister(memory.ctypes.data)

    def download(
        self,
        dst: NDArray[np.uint8],
        dst_rows: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> Fence:
        """See :meth:`Device.download`: one copy per run of neighbours, on the current stream."""
        import torch

        source, target = src.tensor, torch.from_numpy(dst)
        for run in page_runs(src_slots, dst_rows):
            nbytes = run.length * page_bytes
            frm, to = run.src * page_bytes, run.dst * page_bytes
            target[to : to + nbytes].copy_(source[frm : frm + nbytes], non_blocking=True)
        return self._fence()

    def upload(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: NDArray[np.uint8],
        src_rows: NDArray[np.int32],
        page_bytes: int,
    ) -> Fence:
        """See :meth:`Device.upload`: one copy per run of neighbours, on the current stream."""
        import torch

        source, target = torch.from_numpy(src), dst.tensor
        for run in page_runs(src_rows, dst_slots):
            nbytes = run.length * page_bytes
            frm, to = run.src * page_bytes, run.dst * page_bytes
            target[to : to + nbytes].copy_(source[frm : frm + nbytes], non_blocking=True)
        return self._fence()

    def _fence(self) -> Fence:
        import torch

        fence: Fence = torch.cuda.current_stream(self._torch_device).record_event()
        return fence


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
