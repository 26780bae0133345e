"""One sequence from the engine's tokens to text: detokenisation, stop strings and what the client counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.engine import Generate, RequestTimings, TokenOutput
from kvmesh.protocol.sampling import TokenLogprob
from kvmesh.worker.stops import StopMatcher

__all__ = ["Delta", "Detokenizer", "SequenceRun", "TokenSource"]


class Detokenizer(Protocol):
    """Tokens to text, never splitting a character."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is complete after these tokens."""

    def flush(self) -> str:
        """What is left of an unfinished character, as replacement characters."""


class TokenSource(Protocol):
    """What a run needs of an engine."""

    def generate(self, request: Generate) -> AsyncIterator[TokenOutput]:
        """Outputs of one sequence; closing the iterator early aborts it."""

    def abort(self, request_id: str) -> None:
        """Stop a sequence and whatever it still holds."""


class Delta(NamedTuple):
    """What one engine step added to a sequence."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    offsets: list[int]
    """Characters of the whole text before each token."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class SequenceRun:
    """Runs one sequence; iterate :meth:`deltas` to its end, then read the totals.

    Args:
        engine: where the tokens come from.
        request: what the engine is asked for.
        detokenizer: a fresh one.
        stops: stop strings.
        include_stop: keep the stop string or stop token's text in the text.
        eos_token_ids: tokens whose stopping is not reported as a stop reason.
        first_logprobs: of the tokens that came with the hand-off.
    """

    def __init__(
        self,
        engine: TokenSource,
        request: Generate,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        first_logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        self.request = request
        self.prompt_tokens = len(request.prompt_token_ids) // 4
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._decoded_length = 0
        self.handoff = b""
        self.ctx_usage: CtxUsage | None = None
        """Generation first: usage as the context server counted it."""
        self.timings: RequestTimings | None = None
        self._engine = engine
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include_stop)
        self._include_stop = include_stop
        self._eos_token_ids = eos_token_ids
        self._first_logprobs = list(first_logprobs)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the client is to see, in order; the last one has a finish reason.

        Raises:
            ApiError: the engine failed the sequence, or died.
        """
        async with aclosing(self._engine.generate(self.request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                try:
                    delta = self._delta(output)
                except BaseException:
                    self._engine.abort(self.request.request_id)  # a hand-off too: nobody will come for its pages
                    raise
                if delta.finish_reason is not None:
                    if output.finish_reason == "not_finished" and delta.finish_reason != "not_finished":
                        # A stop string ended the text at the context server: nobody will come for the pages.
                        self._engine.abort(self.request.request_id)
                    yield delta
                    return
                if delta.token_ids:
                    yield delta

    def _delta(self, output: TokenOutput) -> Delta:
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.timings = output.timings or self.timings
        self.handoff = output.handoff or self.handoff
        self.ctx_usage = output.ctx_usage or self.ctx_usage
        logprobs = self._logprobs(output)
        text, token_ids, offsets, stop = self._text(output)
        finish: str | None = output.finish_reason
        reason: int | str | None = None
        if stop is not None:
            finish, reason = "stop", stop
        elif finish == "stop" and output.stop_token_id not in self._eos_token_ids:
            reason = output.stop_token_id
        if finish is not None and stop is None:
            text += self._finish_text()
        self.completion_tokens += len(token_ids)
        logprobs = None if logprobs is None else logprobs[: len(token_ids)]
        return Delta(text, token_ids, logprobs, offsets, finish, reason)

    def _text(self, output: TokenOutput) -> tuple[str, list[int], list[int], str | None]:
        """Text, tokens, offsets and stop string of an output; tokens after a stop string are not the client's."""
        tokens = output.token_ids
        shown = len(tokens)
        if output.stop_token_id is not None and not self._include_stop:
            shown -= 1  # counted and listed, as every token that was computed, but not part of the text
        text = ""
        offsets = []
        for position in range(shown):
            piece = self._detokenizer.push(tokens[position : position + 1])
            offsets.append(self._decoded_length)
            self._decoded_length += len(piece)
            if self.completion_tokens + position + 1 <= self.request.sampling.min_tokens:
                text += piece
                continue
            match = self._matcher.push(piece)
            text += match.text
            if match.stop is not None:
                return text, tokens[: position + 1], offsets, match.stop
        offsets += [self._decoded_length] * (len(tokens) - shown)
        return text, tokens, offsets, None

    def _finish_text(self) -> str:
        match = self._matcher.push(self._detokenizer.flush())
        return match.text if match.stop is not None else match.text + self._matcher.flush()

    def _logprobs(self, output: TokenOutput) -> list[TokenLogprob] | None:
        if self.request.sampling.logprobs is None:
            return None
        if output.logprobs is None and self._first_logprobs:
            known, self._first_logprobs = self._first_logprobs, []
            return known
        return output.logprobs
