"""Server-sent events of both APIs: chunk encoding for one choice, error events, and framing of a byte stream."""

from __future__ import annotations

import msgspec

from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.requests import ApiKind
from kvmesh.protocol.openai.responses import (
    ChatDelta,
    ChatLogprobs,
    ChatStreamChoice,
    ChatStreamChunk,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
    completion_choice,
    encode,
)

__all__ = ["DONE", "SSE_HEADERS", "ChunkEncoder", "SseFramer", "error_event", "event_data", "sse_event"]

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well; never sent after an error."""

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""Response headers of a stream; the last one keeps nginx from buffering it."""


def sse_event(payload: bytes) -> bytes:
    """One event of a JSON payload (which has no line breaks)."""
    return b"data: " + payload + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which failed after its headers were sent; no ``[DONE]`` follows it."""
    return sse_event(encode(error.body()))


def event_data(event: bytes) -> bytes:
    """The payload of one complete event; empty for comments and events without data."""
    lines = (line.removeprefix(b"data:").strip() for line in event.splitlines() if line.startswith(b"data:"))
    return b"\n".join(lines)


class ChunkEncoder:
    """Encodes the chunks of one choice of one stream.

    Text-only chunks, nearly all of a stream, are joined from prepared bytes; the others go through structs. Both give
    the same JSON.

    Args:
        kind: which API.
        id: the response's id, the same in every chunk.
        model: the model's name, as the client asked for it.
        created: Unix seconds.
        include_usage: whether the client asked for a usage chunk; then every other chunk has ``"usage": null``.
        index: the choice's index.
    """

    def __init__(
        self, kind: ApiKind, *, id: str, model: str, created: int, include_usage: bool = False, index: int = 0
    ) -> None:
        self._kind = kind
        self._id = id
        self._model = model
        self._created = created
        self._usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET
        self._index = index
        marker = "\x00"
        template = self._chunk(marker, None, None, None, None, None, None)
        self._head, self._tail = template.rsplit(encode(marker), 1)

    def first(self, prompt_token_ids: list[int] | None = None) -> bytes:
        """The opening chunk: the role in the chat API; in the completions API only when there are ids to tell."""
        if self._kind == "chat":
            return self._chat_event(ChatDelta(role="assistant", content=""), prompt_token_ids=prompt_token_ids)
        return b"" if prompt_token_ids is None else self._chunk("", None, None, None, None, prompt_token_ids, None)

    def text(self, text: str) -> bytes:
        """A chunk with nothing but text: the fast path."""
        return self._head + encode(text) + self._tail

    def chunk(
        self,
        text: str,
        *,
        logprobs: CompletionLogprobs | ChatLogprobs | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> bytes:
        """A chunk with anything a choice can carry; with a ``finish_reason`` it is the choice's last."""
        if logprobs is None and token_ids is None and finish_reason is None and disaggregated_params is None:
            return self.text(text)
        return self._chunk(text, logprobs, token_ids, finish_reason, stop_reason, None, disaggregated_params)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk, without choices; sent after all choices finished, when the client asked for it."""
        if self._kind == "chat":
            chunk: ChatStreamChunk | CompletionResponse = ChatStreamChunk(
                id=self._id, created=self._created, model=self._model, choices=[], usage=usage
            )
        else:
            chunk = CompletionResponse(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)
        return sse_event(encode(chunk))

    def _chunk(
        self,
        text: str,
        logprobs: CompletionLogprobs | ChatLogprobs | None,
        token_ids: list[int] | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
        prompt_token_ids: list[int] | None,
        disaggregated_params: DisaggregatedParams | None,
    ) -> bytes:
        if self._kind == "chat":
            assert logprobs is None or isinstance(logprobs, ChatLogprobs)
            return self._chat_event(
                ChatDelta(content=text) if text or finish_reason is None else ChatDelta(),
                logprobs=logprobs,
                token_ids=token_ids,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                disaggregated_params=disaggregated_params,
            )
        assert logprobs is None or isinstance(logprobs, CompletionLogprobs)
        choice = completion_choice(
            self._index,
            text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            token_ids=token_ids,
            prompt_token_ids=prompt_token_ids,
            disaggregated_params=disaggregated_params,
        )
        chunk = CompletionResponse(
            id=self._id, created=self._created, model=self._model, choices=[choice], usage=self._usage
        )
        return sse_event(encode(chunk))

    def _chat_event(
        self,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        prompt_token_ids: list[int] | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> bytes:
        choice = ChatStreamChoice(
            index=self._index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=msgspec.UNSET if finish_reason is None else stop_reason,
            token_ids=msgspec.UNSET if token_ids is None else token_ids,
            prompt_token_ids=msgspec.UNSET if prompt_token_ids is None else prompt_token_ids,
            disaggregated_params=msgspec.UNSET if disaggregated_params is None else disaggregated_params,
        )
        chunk = ChatStreamChunk(
            id=self._id, created=self._created, model=self._model, choices=[choice], usage=self._usage
        )
        return sse_event(encode(chunk))


class SseFramer:
    """Cuts a byte stream at event borders: complete events go on at once, the rest waits for more bytes."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> int:
        """Bytes of an event whose end has not come yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Everything up to the end of the last complete event (maybe nothing); the bytes are not changed."""
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n\n")
        if end < 0:
            self._rest = data
            return b""
        end += 2
        self._rest = data[end:]
        return data[:end]
