"""Kernels over paged KV memory: a native CPU library, a CUDA library, and the Python operations over both.

Importing this package loads nothing. `kvmesh.kernels._native` (hashing) works without torch; `kvmesh.kernels.ops`
needs it.
"""
