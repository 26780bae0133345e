"""From an OpenAI request to the sequences that the engine runs, one for each choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from kvmesh.config.worker import WorkerRole
from kvmesh.models.tokenizer import ChatTemplateError, IncrementalDetokenizer, Tokenizer
from kvmesh.protocol.engine import Generate
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.openai.cache import conversation_id_of, retention_of
from kvmesh.protocol.openai.chat import template_messages
from kvmesh.protocol.openai.fanout import SequenceSpec, fan_out, prompts_of
from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest
from kvmesh.protocol.openai.sampling import sampling_params
from kvmesh.protocol.openai.validate import check_token_ids, validate_request
from kvmesh.protocol.retention import RetentionConfig
from kvmesh.worker.disagg import Leg, leg_of, rank_wish
from kvmesh.worker.runs import SequenceRun, TokenSource

__all__ = ["ModelFacts", "Plan", "PlannedSequence", "Planner"]

INLINE_TOKENISE_CHARS = 2000
"""Shorter texts are tokenised in place: a thread hop costs as much as they do (tens of microseconds)."""
MAX_TOKENISER_THREADS = 2


class ModelFacts(NamedTuple):
    """What requests are checked against."""

    name: str
    max_seq_len: int
    vocab_size: int


class PlannedSequence(NamedTuple):
    """One choice to be."""

    spec: SequenceSpec
    prompt_token_ids: np.ndarray
    """int32 ``[n]``."""
    run: SequenceRun


class Plan(NamedTuple):
    """A checked request and its sequences, in the order of their choice indexes."""

    request: CompletionRequest | ChatCompletionRequest
    request_id: str
    created: int
    leg: Leg
    sequences: list[PlannedSequence]

    def note_details(self) -> None:
        """Have the engine note what only spans need: somebody records this request. Before it runs."""
        for sequence in self.sequences:
            sequence.run.request.traced = True


class Planner:
    """Checks, tokenises and fans out requests for one engine."""

    def __init__(
        self, engine: TokenSource, tokenizer: Tokenizer, facts: ModelFacts, role: WorkerRole, timeout_s: float
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._facts = facts
        self._role = role
        self._timeout_s = timeout_s
        self._threads = anyio.CapacityLimiter(MAX_TOKENISER_THREADS)

    async def plan(self, request: CompletionRequest | ChatCompletionRequest, request_id: str) -> Plan:
        """Turn a decoded request into sequences.

        Raises:
            ApiError: 400 or 404 naming what is wrong with the request.
        """
        validate_request(request, vocab_size=self._facts.vocab_size)
        if request.model != self._facts.name:
            raise ApiError(
                404,
                f"The model '{request.model}' is not served here; this server has '{self._facts.name}'.",
                code="model_not_found",
                param="model",
            )
        leg = leg_of(request.disaggregated_params, self._role)
        specs = fan_out(request)
        if leg.kind != "aggregated" and len(specs) != 1:
            raise bad_request("A leg of a disaggregated request is one prompt with n=1.", param="n")
        prompts = await self._prompts(request)
        retention = retention_of(request.kv_cache_retention_config)
        conversation_id = conversation_id_of(request.conversation_params, request.disaggregated_params)
        sequences = [
            self._sequence(request, spec, prompts[spec.prompt_index], leg, request_id, retention, conversation_id)
            for spec in specs
        ]
        return Plan(request, request_id, int(time.time()), leg, sequences)

    async def _prompts(self, request: CompletionRequest | ChatCompletionRequest) -> list[np.ndarray]:
        if request.prompt_token_ids is not None:
            if isinstance(request, CompletionRequest) and (num_prompts := len(prompts_of(request.prompt))) > 1:
                raise bad_request(
                    f"'prompt_token_ids' is one prompt and 'prompt' has {num_prompts}; send 'prompt' alone.",
                    param="prompt_token_ids",
                )
            return [self._checked("prompt_token_ids", request.prompt_token_ids)]
        if isinstance(request, ChatCompletionRequest):
            return [await self._off_loop(lambda: self._render(request), sum(map(_length, request.messages)))]
        prompts = prompts_of(request.prompt)
        special = request.add_special_tokens is not False
        return [
            self._checked("prompt", prompt)
            if isinstance(prompt, list)
            else await self._off_loop(lambda text=prompt: self._encode(text, special), len(prompt))  # type: ignore[misc]
            for prompt in prompts
        ]

    async def _off_loop(self, work: Callable[[], np.ndarray], chars: int) -> np.ndarray:
        if chars <= INLINE_TOKENISE_CHARS:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    def _render(self, request: ChatCompletionRequest) -> np.ndarray:
        try:
            text = self._tokenizer.apply_chat_template(
                template_messages(request),
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=request.chat_template_kwargs,
            )
        except ChatTemplateError as error:
            param = "messages" if error.variable is None else f"chat_template_kwargs.{error.variable}"
            raise bad_request(str(error), param=param, code="chat_template_error") from None
        return self._encode(text, add_special=False, param="messages")

    def _encode(self, text: str, add_special: bool, param: str = "prompt") -> np.ndarray:
        try:
            ids = self._tokenizer.encode(text, add_special=add_special)
        except ValueError as error:
            raise bad_request(str(error), param=param) from None
        if not len(ids):
            raise bad_request("The prompt is empty; send at least one token.", param=param, code="empty_prompt")
        return ids

    def _checked(self, param: str, ids: list[int]) -> np.ndarray:
        if not ids:
            raise bad_request("The prompt is empty; send at least one token.", param=param, code="empty_prompt")
        check_token_ids(param, ids, self._facts.vocab_size)
        return np.asarray(ids, dtype=np.int32)

    def _sequence(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        spec: SequenceSpec,
        ids: np.ndarray,
        leg: Leg,
        request_id: str,
        retention: RetentionConfig | None,
        conversation_id: str | None,
    ) -> PlannedSequence:
        sampling = sampling_params(
            request, prompt_tokens=len(ids), max_seq_len=self._facts.max_seq_len, choice_index=spec.index
        )
        seed = spec.seed if leg.seed is None else leg.seed
        wish = rank_wish(request.disaggregated_params, leg)
        generate = Generate(
            # Two callers may give the same id; inside the engine each sequence has its own.
            request_id=f"{request_id}-{spec.index}-{secrets.token_hex(4)}",
            prompt_token_ids=ids.tobytes(),
            sampling=msgspec.structs.replace(sampling, seed=seed),
            kind=leg.kind,
            transfer_id=leg.transfer_id,
            first_tokens=list(leg.first_tokens),
            handoff=leg.handoff,
            generation_first=leg.generation_first,
            ctx_address=leg.ctx_address,
            cache_salt=request.cache_salt,
            retention=retention,
            conversation_id=conversation_id if spec.index == 0 else None,
            dp_rank=wish.rank,
            dp_matched_tokens=wish.matched_tokens,
            priority=request.priority or 0,
            deadline_s=self._timeout_s,
        )
        run = SequenceRun(
            self._engine,
            generate,
            IncrementalDetokenizer(self._tokenizer, request.skip_special_tokens is not False),
            # Generation first, the text is the generation server's: a stop string in the first token is its to find.
            stops=() if leg.kind == "context" and leg.generation_first else request.stop_strings,
            include_stop=bool(request.include_stop_str_in_output),
            eos_token_ids=self._tokenizer.eos_token_ids,
            first_logprobs=leg.first_logprobs,
        )
        return PlannedSequence(spec, ids, run)


def _length(message: object) -> int:
    content = getattr(message, "content", None)
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text or "") for part in content or ())
