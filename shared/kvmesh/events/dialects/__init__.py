"""The ways in which engines write one event, a module each.

``tagged_map``: vLLM since mid-2026, TensorRT-LLM, SGLang's newest, KVMesh. ``positional``: older vLLM and llm-d, older
SGLang. ``mooncake``: its master. A dialect turns one event's msgpack into a record of :mod:`kvmesh.events.records`,
with the checks of ``normalise``; ``tokens`` and ``identity`` read what dialects tell in common. Every event shows its
dialect itself, so that one stream may mix them.
"""

from __future__ import annotations

import msgspec

from kvmesh.events.dialects import mooncake, positional, tagged_map
from kvmesh.events.dialects.base import DecodedEvent, RejectedError
from kvmesh.events.keyed import KeyRingPart

__all__ = ["DIALECTS", "DecodedEvent", "RejectedError", "decode_event"]

DIALECTS = (tagged_map.NAME, tagged_map.KEYED_NAME, positional.NAME, positional.SGLANG_NAME, mooncake.NAME)
"""Every name that is counted."""


def decode_event(event: memoryview, keys: KeyRingPart | None = None) -> DecodedEvent:
    """One event of a batch, whatever it is written in.

    Args:
        event: one msgpack value.
        keys: by which keyed events may be read.

    Raises:
        RejectedError: it cannot be used.
    """
    first = event[0] if event else 0xC0
    try:
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            if mooncake.is_mooncake(event):
                try:
                    return mooncake.decode(event)
                except msgspec.ValidationError:
                    pass  # tokens that look like the key
            return tagged_map.decode(event, keys)
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            return positional.decode(event)
    except (msgspec.DecodeError, RecursionError):
        raise RejectedError("malformed") from None
    raise RejectedError("unknown_shape")
