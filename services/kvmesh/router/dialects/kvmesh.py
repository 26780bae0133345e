"""KVMesh's own workers, and TensorRT-LLM's: OpenAI requests with ``disaggregated_params``."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from kvmesh.protocol.disagg import GENERATION_FIRST, CtxUsage, DisaggregatedParams
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member
from kvmesh.protocol.openai.requests import ApiKind, ChatCompletionRequest, CompletionRequest
from kvmesh.protocol.openai.responses import encode
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.dialects.base import EarlyLegs, Outgoing, Prefilled
from kvmesh.router.work import Work

__all__ = ["KvMeshDialect"]

PATHS: dict[ApiKind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
UNFINISHED = ("length", "not_finished")
"""Finish reasons of a context leg that has more to come: TensorRT-LLM's servers say ``length`` after one token."""

NO_WISH = RankWish()
_INTERNAL_CHOICE_FIELDS = ("disaggregated_params", "prompt_token_ids", "token_ids")


class KvMeshDialect:
    """See :class:`kvmesh.router.dialects.base.Dialect`."""

    name = "kvmesh"
    rewrites_usage = True
    """KVMesh's generation servers repeat ``ctx_usage``; TensorRT-LLM's, which speak the same protocol, do not."""

    def whole(self, work: Work, wish: RankWish = NO_WISH) -> Outgoing:
        """See :class:`kvmesh.router.dialects.base.Dialect`."""
        named, params = _conversation(work), None
        if named is not None or wish.rank is not None:
            params = DisaggregatedParams(
                request_type="context_and_generation",
                conversation_id=named,
                dp_rank=wish.rank,
                dp_matched_tokens=wish.matched_tokens,
            )
        return Outgoing(PATHS[work.kind], encode(_leg(work.request, params, stream=work.request.stream)))

    def prefill(self, work: Work, transfer_id: int, wish: RankWish = NO_WISH) -> Outgoing:
        """See :class:`kvmesh.router.dialects.base.Dialect`."""
        params = DisaggregatedParams(
            request_type="context_only",
            disagg_request_id=transfer_id,
            conversation_id=_conversation(work),
            dp_rank=wish.rank,
            dp_matched_tokens=wish.matched_tokens,
        )
        return Outgoing(PATHS[work.kind], encode(_leg(work.request, params, stream=None)))

    def read_prefill(self, work: Work, body: bytes) -> Prefilled:
        """See :class:`kvmesh.router.dialects.base.Dialect`."""
        try:
            response = msgspec.json.decode(body)
            choices = response["choices"]
            [choice] = choices
            finish_reason = choice["finish_reason"]
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise _incomplete("exactly one choice") from None
        usage = _usage(response, work)
        # Only this router knows how many tokens were asked for: "length" after one of one is the end.
        finished = finish_reason not in UNFINISHED or work.first_token_only
        handoff = _handoff(choice, required=not finished)
        if finished and finish_reason == "not_finished":
            choice["finish_reason"] = "length"
        for field in _INTERNAL_CHOICE_FIELDS:
            if field == "disaggregated_params" or not work.request.return_token_ids:
                choice.pop(field, None)
        return Prefilled(finished, handoff, usage, response)

    def decode(self, work: Work, prefilled: Prefilled, transfer_id: int, wish: RankWish = NO_WISH) -> Outgoing:
        """See :class:`kvmesh.router.dialects.base.Dialect`."""
        params = msgspec.structs.replace(
            prefilled.handoff,
            request_type="generation_only",
            disagg_request_id=transfer_id,
            conversation_id=_conversation(work),
            ctx_usage=prefilled.usage,
            dp_rank=wish.rank,
            dp_matched_tokens=wish.matched_tokens,
        )
        return Outgoing(PATHS[work.kind], encode(_leg(work.request, params, stream=work.request.stream)))

    def both(
        self,
        work: Work,
        context: Member,
        transfer_id: int,
        context_wish: RankWish = NO_WISH,
        generation_wish: RankWish = NO_WISH,
    ) -> EarlyLegs | None:
        """See :class:`kvmesh.router.dialects.base.Dialect`.

        A rank of the context server is ordered where there are several: the generation server asks one of them.
        """
        if not context.ctx_addresses and context.ctx_info_endpoint is None:
            return None
        rank, address = None, next(iter(context.ctx_addresses), None)
        if (ranks := len(context.ctx_addresses)) > 1:
            rank = _ordered_rank(work, transfer_id, context_wish, ranks)
            address = context.ctx_addresses[rank]
        early = DisaggregatedParams(
            request_type="context_only",
            disagg_request_id=transfer_id,
            ctx_dp_rank=rank,
            schedule_style=GENERATION_FIRST,
            conversation_id=_conversation(work),
        )
        late = msgspec.structs.replace(
            early,
            request_type="generation_only",
            ctx_request_id=transfer_id,
            ctx_info_endpoint=context.ctx_info_endpoint,
            encoded_opaque_state=address,
            dp_rank=generation_wish.rank,
            dp_matched_tokens=generation_wish.matched_tokens,
        )
        path = PATHS[work.kind]
        return EarlyLegs(
            Outgoing(path, encode(_leg(work.request, early, stream=None))),
            Outgoing(path, encode(_leg(work.request, late, stream=work.request.stream))),
            rank,
        )

    def abort(self, transfer_id: int) -> Outgoing:
        """See :class:`kvmesh.router.dialects.base.Dialect`."""
        return Outgoing("/abort", encode({"disagg_request_id": transfer_id}))


def _leg(
    request: CompletionRequest | ChatCompletionRequest, params: DisaggregatedParams | None, *, stream: bool | None
) -> CompletionRequest | ChatCompletionRequest:
    """A worker's request: one leg of a single sequence.

    A conversation has been rendered and tokenised: its last message alone goes along, as the field is required.
    """
    options = request.stream_options if stream else None
    if isinstance(request, ChatCompletionRequest):
        return msgspec.structs.replace(
            request,
            messages=request.messages[-1:],
            stream=stream,
            stream_options=options,
            disaggregated_params=params,
            conversation_params=None,
        )
    return msgspec.structs.replace(
        request, stream=stream, stream_options=options, disaggregated_params=params, conversation_params=None
    )


def _conversation(work: Work) -> str | None:
    """Told in ``disaggregated_params``: TensorRT-LLM's servers have known it there for longer."""
    conversation = work.request.conversation_params
    return None if conversation is None else conversation.conversation_id


def _ordered_rank(work: Work, transfer_id: int, wish: RankWish, ranks: int) -> int:
    """The rank of a context server that takes a leg: that of the conversation, else the best, else one in turn."""
    conversation = _conversation(work)
    if conversation is not None:
        return zlib.crc32(conversation.encode()) % ranks
    return (transfer_id if wish.rank is None else wish.rank) % ranks


def _usage(response: dict[str, Any], work: Work) -> CtxUsage:
    usage = response.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return CtxUsage(
        prompt_tokens=usage.get("prompt_tokens", work.prompt_tokens), cached_tokens=details.get("cached_tokens") or 0
    )


def _handoff(choice: dict[str, Any], *, required: bool) -> DisaggregatedParams:
    raw = choice.get("disaggregated_params")
    if raw is None:
        if required:
            raise _incomplete("disaggregated_params")
        return DisaggregatedParams(request_type="context_only")
    try:
        handoff = msgspec.convert(raw, DisaggregatedParams)
    except msgspec.ValidationError as error:
        raise _incomplete(f"disaggregated_params ({error})") from None
    for field in ("ctx_request_id", "disagg_request_id") if required else ():
        if getattr(handoff, field) is None:
            raise _incomplete(f"disaggregated_params.{field}")
    return handoff


def _incomplete(what: str) -> ApiError:
    return ApiError(
        502,
        f"The context server's answer lacks {what}; check that its version fits the router's.",
        type="server_error",
        code="bad_context_answer",
    )
