"""What the engine tells its front: collected during a step, sent as one message."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.engine.sequence import Sequence
from kvmesh.protocol.engine import FinishReason, FromEngine, RequestFailed, TokenBatch, TokenOutput
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.sampling import TokenLogprob

__all__ = ["Outbox", "failure_of"]


def failure_of(request_id: str, error: ApiError) -> RequestFailed:
    """``error`` as a message."""
    return RequestFailed(
        request_id=request_id,
        status=error.status,
        message=error.message,
        error_type=error.type,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


class Outbox:
    """Collects a step's outputs.

    Args:
        send: delivers one message; must not block.
    """

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self._outputs: list[TokenOutput] = []

    def tokens(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None = None,
        *,
        finish: FinishReason | None = None,
        handoff: bytes = b"",
    ) -> None:
        """New tokens of a sequence; with ``finish`` its last output."""
        stopped = finish == "stop" and bool(token_ids)
        self._outputs.append(
            TokenOutput(
                request_id=seq.request_id,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish,
                stop_token_id=token_ids[-1] if stopped else None,
                prompt_tokens=seq.history.prompt_length,
                cached_tokens=seq.num_cached or 0,
                handoff=handoff,
                ctx_usage=seq.ctx_usage,
                timings=seq.timings if finish is not None else None,
            )
        )

    def fail(self, request_id: str, error: ApiError) -> None:
        """A sequence ended with an error. Sent after the tokens collected so far."""
        self.flush()
        self._send(failure_of(request_id, error))

    def flush(self) -> None:
        """Send the outputs of this step."""
        if self._outputs:
            self._send(TokenBatch(self._outputs))
            self._outputs = []
