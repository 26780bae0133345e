"""The memory of a cache as its peers see it: pools of the device, and of the host tier where they can be read, too."""

from __future__ import annotations

from kvmesh.cache.base import CacheManager
from kvmesh.transceiver import PoolMemory

__all__ = ["transfer_pools"]


def transfer_pools(manager: CacheManager) -> list[PoolMemory]:
    """Pools of the device, then, if every pool has pages there and they never move, those of the host tier."""
    pools = [
        PoolMemory(
            address=buffer.address,
            nbytes=buffer.reserve_bytes,
            num_pages=buffer.reserve_bytes // pool.page_bytes,
            page_bytes=pool.page_bytes,
            fd=buffer.fd,
            device="cpu" if buffer.fd is not None else "cuda",
        )
        for buffer, pool in zip(manager.pools, manager.layout.pools, strict=True)
    ]
    host = [
        PoolMemory(
            address=memory.address,
            nbytes=memory.reserve_bytes,
            num_pages=memory.reserve_bytes // pool.page_bytes,
            page_bytes=pool.page_bytes,
            fd=memory.fd,
        )
        for memory, pool in zip(manager.host_pools, manager.layout.pools, strict=False)
    ]
    readable = len(host) == len(pools) and all(memory.fd is not None and memory.num_pages for memory in host)
    return pools + host if readable else pools
