"""The ways in which engines write one event, a module each.

``tagged_map``: vLLM since mid-2026, TensorRT-LLM, KVMesh. ``positional``: older vLLM and llm-d, SGLang. A dialect turns
one event's msgpack into a record of :mod:`kvmesh.events.records`, with the checks of ``normalise``. The first byte of
an event tells its dialect, so that one stream may mix them.
"""

from __future__ import annotations

from kvmesh.events.dialects import positional, tagged_map
from kvmesh.events.dialects.base import Dialect, RejectedError

__all__ = ["Dialect", "RejectedError", "dialect_of"]


def dialect_of(event: memoryview) -> Dialect:
    """The dialect of one msgpack value.

    Raises:
        RejectedError: it is neither a map nor an array.
    """
    first = event[0] if event else 0xC0
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return tagged_map.DIALECT
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return positional.DIALECT
    raise RejectedError("unknown_shape")
