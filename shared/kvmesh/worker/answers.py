"""The answer to a planned request: one JSON body, or a stream of server-sent events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kvmesh.models.tokenizer import Tokenizer
from kvmesh.protocol.disagg import CtxUsage, DisaggregatedParams
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.fanout import merge_usage
from kvmesh.protocol.openai.requests import ApiKind, ChatCompletionRequest
from kvmesh.protocol.openai.responses import (
    ChatLogprobs,
    ChatResponse,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
    chat_choice,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    response_id,
    usage,
)
from kvmesh.protocol.openai.sse import DONE, ChunkEncoder
from kvmesh.worker.disagg import context_params
from kvmesh.worker.plans import Plan, PlannedSequence
from kvmesh.worker.runs import Delta

__all__ = ["Answerer"]

Observer = Callable[[PlannedSequence, Delta], None]
"""Hears of every delta as it comes, for metrics."""
_Item = tuple[int, Delta | ApiError]


class Answerer:
    """Runs plans and builds their answers.

    Args:
        tokenizer: the model's.
        ctx_info_endpoints: control endpoints of the transceivers, by attention data-parallel rank.
        observe: told of every delta.
    """

    def __init__(self, tokenizer: Tokenizer, ctx_info_endpoints: Sequence[str | None], observe: Observer) -> None:
        self._tokenizer = tokenizer
        self._endpoints = ctx_info_endpoints
        self._observe = observe

    async def whole(self, plan: Plan) -> CompletionResponse | ChatResponse:
        """The complete response.

        Raises:
            ApiError: any of the sequences failed; the others are stopped.
        """
        collected: list[list[Delta]] = [[] for _ in plan.sequences]
        async with _deltas(plan) as deltas:
            async for index, delta in deltas:
                self._observe(plan.sequences[index], delta)
                collected[index].append(delta)
        kind = _kind(plan)
        choices = [
            self._choice(plan, sequence, _joined(deltas))
            for sequence, deltas in zip(plan.sequences, collected, strict=True)
        ]
        response = ChatResponse if kind == "chat" else CompletionResponse
        return response(
            id=response_id(kind, plan.request_id),
            created=plan.created,
            model=plan.request.model,
            choices=choices,
            usage=self._usage(plan),
        )

    async def events(self, plan: Plan) -> AsyncIterator[bytes]:
        """Server-sent events, from the first chunk to ``[DONE]``.

        The first event comes only when the engine has produced something, so that an early failure still has a status.

        Raises:
            ApiError: any of the sequences failed; nothing follows.
        """
        request = plan.request
        encoders = [
            ChunkEncoder(
                _kind(plan),
                id=response_id(_kind(plan), plan.request_id),
                model=request.model,
                created=plan.created,
                include_usage=request.include_usage,
                index=sequence.spec.index,
            )
            for sequence in plan.sequences
        ]
        begun = [False] * len(encoders)
        async with _deltas(plan) as deltas:
            async for index, delta in deltas:
                sequence = plan.sequences[index]
                self._observe(sequence, delta)
                if not begun[index]:
                    begun[index] = True
                    ids = sequence.prompt_token_ids.tolist() if request.return_token_ids else None
                    if first := encoders[index].first(ids):
                        yield first
                yield self._chunk(plan, sequence, encoders[index], delta)
        if request.include_usage:
            yield encoders[0].usage(self._usage(plan))
        yield DONE

    def _chunk(self, plan: Plan, sequence: PlannedSequence, encoder: ChunkEncoder, delta: Delta) -> bytes:
        return encoder.chunk(
            delta.text,
            logprobs=self._logprobs(plan, delta),
            token_ids=delta.token_ids if plan.request.return_token_ids else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            disaggregated_params=self._params(plan, sequence, delta),
        )

    def _choice(self, plan: Plan, sequence: PlannedSequence, delta: Delta) -> Any:
        """The choice of a finished sequence, in the form of the request's API."""
        build: Callable[..., Any] = chat_choice if _kind(plan) == "chat" else completion_choice
        return build(
            sequence.spec.index,
            delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=self._logprobs(plan, delta),
            token_ids=delta.token_ids if plan.request.return_token_ids else None,
            prompt_token_ids=_prompt_ids(plan, sequence),
            disaggregated_params=self._params(plan, sequence, delta),
        )

    def _logprobs(self, plan: Plan, delta: Delta) -> CompletionLogprobs | ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        token_bytes = self._tokenizer.token_bytes.of
        if isinstance(plan.request, ChatCompletionRequest):
            return chat_logprobs(delta.logprobs, token_bytes, top=plan.request.top_logprobs or 0)
        top = plan.request.logprobs or 0
        return completion_logprobs(delta.logprobs, token_bytes, text_offsets=delta.offsets, top=top)

    def _params(self, plan: Plan, sequence: PlannedSequence, delta: Delta) -> DisaggregatedParams | None:
        """What the router needs for the second leg; None unless this was a first leg that has one."""
        if plan.leg.kind != "context" or delta.finish_reason is None:
            return None
        run = sequence.run
        rank = run.request.dp_rank or 0
        return context_params(
            plan.leg, delta.token_ids, delta.logprobs, run.handoff, dp_rank=rank, endpoint=self._endpoints[rank]
        )

    def _usage(self, plan: Plan) -> Usage:
        return merge_usage([(item.spec.prompt_index, _usage_of(plan, item)) for item in plan.sequences])


@asynccontextmanager
async def _deltas(plan: Plan) -> AsyncIterator[AsyncIterator[tuple[int, Delta]]]:
    """The deltas of all sequences as they come, each with its sequence's position; leaving stops them all."""
    if len(plan.sequences) == 1:
        single = _numbered(plan.sequences[0])
        try:
            yield single
        finally:
            await single.aclose()  # type: ignore[attr-defined]
        return
    send, receive = anyio.create_memory_object_stream[_Item](math.inf)
    failure: ApiError | None = None
    async with anyio.create_task_group() as tasks:
        with receive:
            with send:
                for position, sequence in enumerate(plan.sequences):
                    tasks.start_soon(_pump, sequence, position, send.clone())
            try:
                yield _received(receive)
            except ApiError as error:
                failure = error  # leaves the task group bare, not in an exception group
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _numbered(sequence: PlannedSequence) -> AsyncIterator[tuple[int, Delta]]:
    deltas = sequence.run.deltas()
    try:
        async for delta in deltas:
            yield 0, delta
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]


async def _pump(sequence: PlannedSequence, position: int, send: MemoryObjectSendStream[_Item]) -> None:
    with send:
        deltas = sequence.run.deltas()
        try:
            async for delta in deltas:
                send.send_nowait((position, delta))
        except ApiError as error:
            send.send_nowait((position, error))  # raised where the answer is built, not inside the task group
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]


async def _received(receive: MemoryObjectReceiveStream[_Item]) -> AsyncIterator[tuple[int, Delta]]:
    async for position, item in receive:
        if isinstance(item, ApiError):
            raise item
        yield position, item


def _usage_of(plan: Plan, sequence: PlannedSequence) -> Usage:
    """A sequence's usage; its prompt side as the context server counted it, where there was one."""
    run = sequence.run
    ctx = (
        plan.leg.ctx_usage
        or run.ctx_usage
        or CtxUsage(prompt_tokens=run.prompt_tokens, cached_tokens=run.cached_tokens)
    )
    return usage(ctx.prompt_tokens, run.completion_tokens, ctx.cached_tokens)


def _joined(deltas: list[Delta]) -> Delta:
    """All deltas of a sequence as one."""
    token_ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    last = deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        token_ids,
        logprobs if has_logprobs else None,
        [offset for delta in deltas for offset in delta.offsets],
        last.finish_reason,
        last.stop_reason,
    )


def _kind(plan: Plan) -> ApiKind:
    return "chat" if isinstance(plan.request, ChatCompletionRequest) else "completions"


def _prompt_ids(plan: Plan, sequence: PlannedSequence) -> list[int] | None:
    """A first leg always tells the prompt's ids: they are the prompt of the second."""
    wanted = plan.request.return_token_ids or plan.leg.kind == "context"
    return sequence.prompt_token_ids.tolist() if wanted else None
