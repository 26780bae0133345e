"""The bytes of the cache's levels: device pools, host memory, files; and how pages move between them."""

from kvmesh.cache.storage.storage import Storage

__all__ = ["Storage"]
