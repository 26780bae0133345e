"""Streams of single sequences as one stream: choices told apart by index, one usage, one ``[DONE]``."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.protocol.openai.fanout import SequenceSpec, merge_usage
from kvmesh.protocol.openai.responses import Usage, encode
from kvmesh.protocol.openai.sse import DONE, event_data, sse_event
from kvmesh.router.answer import broken_off

__all__ = ["StreamMerger"]


class StreamMerger:
    """Feed it complete events of any sequence in any order; what it gives back goes to the client.

    Args:
        response_id: the ``id`` of every chunk.
    """

    def __init__(self, response_id: str) -> None:
        self._id = response_id
        self._head: dict[str, Any] = {}
        """Fields of the first chunk that all chunks share."""
        self._usage: dict[int, tuple[int, Usage]] = {}

    def feed(self, sequence: SequenceSpec, events: bytes) -> bytes:
        """The events with the choice's index; usage is kept back, ends are dropped.

        Raises:
            ApiError: 502 when an event is no chunk.
        """
        out = []
        for event in events.split(b"\n\n"):
            data = event_data(event)
            if not data or data == b"[DONE]":
                continue
            try:
                chunk = msgspec.json.decode(data)
                usage = chunk.get("usage")
                if usage is not None:
                    self._usage[sequence.index] = sequence.prompt_index, msgspec.convert(usage, Usage)
                if not chunk["choices"]:
                    continue
                for choice in chunk["choices"]:
                    choice["index"] = sequence.index
            except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
                raise broken_off("with an event that is no chunk") from None
            if not self._head:
                self._head = {
                    key: chunk[key] for key in ("object", "created", "model", "system_fingerprint") if key in chunk
                }
            out.append(sse_event(encode({**chunk, **self._head, "id": self._id})))
        return b"".join(out)

    def end(self) -> bytes:
        """The usage chunk, when the sequences sent theirs, and ``[DONE]``."""
        if not self._usage:
            return DONE
        parts = [self._usage[index] for index in sorted(self._usage)]
        total = msgspec.to_builtins(merge_usage(parts))
        return sse_event(encode({"id": self._id, **self._head, "choices": [], "usage": total})) + DONE
