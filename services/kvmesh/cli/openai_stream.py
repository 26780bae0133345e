"""Streaming from an OpenAI-compatible server, with the times that matter to whoever reads along."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from kvmesh.net.client import HttpClient, PeerUnreachableError

__all__ = ["StreamTimes", "stream"]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


class StreamTimes:
    """When the pieces of one answer came, and what the server counted."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.arrivals_s: list[float] = []
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.done = False
        """Whether the stream ended with ``[DONE]``; without it the answer is cut off."""
        self.error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From the request to the first piece; 0 when none came."""
        return self.arrivals_s[0] - self.started_s if self.arrivals_s else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; 0 for fewer than two."""
        tokens = self.completion_tokens or len(self.arrivals_s)
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (tokens - 1) if tokens > 1 and self.arrivals_s else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces (inter-token latency where a piece is a token)."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def complete(self) -> bool:
        """Whether the answer ended well."""
        return self.done and self.error is None and self.finish_reason is not None


async def stream(
    http: HttpClient,
    url: str,
    body: dict[str, Any],
    times: StreamTimes,
    *,
    timeout_s: float,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[str]:
    """Text as it comes from ``/v1/chat/completions`` or ``/v1/completions``; ``times`` is filled along the way.

    Args:
        http: an open client.
        url: full URL of the endpoint.
        body: the request; ``stream`` and ``stream_options.include_usage`` are set here.
        times: gets the figures.
        timeout_s: bound of the whole answer.
        headers: such as an API key.

    Raises:
        PeerUnreachableError: the server cannot be reached, or broke off.
        ApiError: it refused.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    decoder = msgspec.json.Decoder(_Chunk)
    async with http.open("POST", url, body=request, timeout_s=timeout_s, headers=headers) as response:
        try:
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    times.done = True
                    return
                for text in _take(decoder.decode(data), times):
                    times.arrivals_s.append(time.perf_counter())
                    yield text
        except (TimeoutError, aiohttp.ClientError) as error:
            raise PeerUnreachableError(f"the answer broke off: {error or type(error).__name__}") from error


def _take(chunk: _Chunk, times: StreamTimes) -> list[str]:
    """Note what a chunk says, and give its text."""
    if chunk.error is not None:
        times.error = str(chunk.error.get("message", "error"))
    if chunk.usage is not None:
        times.prompt_tokens = chunk.usage.prompt_tokens
        times.completion_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        times.cached_tokens = details.cached_tokens if details is not None else 0
    texts = []
    for choice in chunk.choices:
        times.finish_reason = choice.finish_reason or times.finish_reason
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            texts.append(text)
    return texts
