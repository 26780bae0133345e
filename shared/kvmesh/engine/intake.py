"""Admission: turns a request message into a sequence, or says exactly why it can never run.

Everything a client can get wrong is refused here, for that request alone; past this point a sequence always fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from kvmesh.engine.sampler import Sampler
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.tokens import TokenArray, TokenHistory
from kvmesh.hashing import ReuseScope, salt_id
from kvmesh.net.clock import Clock
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.engine import Generate, RequestTimings
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.sampling import MAX_TEMPERATURE, REPETITION_PENALTIES, SamplingParams
from kvmesh.protocol.transfer import Aux
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.transceiver.slices import pipelining_obstacle

__all__ = ["Intake", "IntakeLimits"]

_TOKEN_BYTES = 4
_QUEUE_RETRY_AFTER_S = 1


class IntakeLimits(NamedTuple):
    """What one sequence may ask for."""

    vocab_size: int
    max_seq_len: int
    """Tokens of prompt and output together that the model and the server's settings allow."""
    max_cached_tokens: int
    """Tokens of one sequence that fit into the cache when it is otherwise empty."""
    max_num_tokens: int
    chunked_prefill: bool
    max_queue: int
    """Sequences that may wait; more are answered 429 at once."""
    transfers: bool
    """Whether this engine has a transceiver."""
    pipelined: bool = False
    """Whether prompts are sent slice by slice (``enable_pipelined_transfer``)."""


class Intake:
    """Builds sequences.

    Args:
        limits: what a sequence may ask for.
        sampler: makes the sampling state.
        clock: for arrival times and deadlines.
    """

    def __init__(self, limits: IntakeLimits, sampler: Sampler, clock: Clock) -> None:
        self.limits = limits
        self._sampler = sampler
        self._clock = clock
        self._arrivals = 0
        self._handoff_decoder = msgspec.msgpack.Decoder(HandOff)

    def admit(self, request: Generate, num_waiting: int) -> Sequence:
        """The sequence of ``request``.

        Raises:
            ApiError: 400 when it can never run here, 429 when ``num_waiting`` fills the queue.
        """
        if num_waiting >= self.limits.max_queue:
            raise ApiError(
                429,
                f"The engine's queue is full ({num_waiting} requests wait); send the request again later.",
                type="rate_limit_error",
                code="queue_full",
                retry_after_s=_QUEUE_RETRY_AFTER_S,
            )
        prompt = self._prompt(request)
        self._check_sampling(request.sampling)
        self._check_length(request, prompt.size)
        if request.lora_id is not None:
            raise bad_request("not supported yet: LoRA adapters", param="lora_id")
        handoff = self._check_leg(request)
        history = TokenHistory(prompt)
        for token in request.first_tokens if handoff is not None else ():
            history.append(token)
        state = self._sampler.state(request.sampling, history)
        if request.sampling.min_tokens > 0 and len(state.end_ids) >= self.limits.vocab_size:
            raise bad_request(
                "Every token ends the sequence, so none is left for min_tokens; give fewer stop_token_ids.",
                param="stop_token_ids",
            )
        self._arrivals += 1
        return Sequence(
            request_id=request.request_id,
            kind=request.kind,
            params=request.sampling,
            history=history,
            state=state,
            scope=ReuseScope(None, None if request.cache_salt is None else salt_id(request.cache_salt)),
            arrival=self._arrivals,
            priority=request.priority,
            deadline_s=None if request.deadline_s is None else self._clock.monotonic_s() + request.deadline_s,
            transfer_id=request.transfer_id,
            handoff=handoff,
            generation_first=request.generation_first and request.kind != "aggregated",
            ctx_address=request.ctx_address if request.kind == "generation" and request.generation_first else b"",
            pipelined=self.limits.pipelined and request.kind == "context" and request.generation_first,
            retention=request.retention,
            conversation_id=request.conversation_id,
            probe=request.probe,
            traced=request.traced,
            timings=RequestTimings(arrived_ns=self._clock.unix_ns()),
        )

    def source_of(self, request: Generate) -> HandOff | bytes | None:
        """Where a generation request wants its prompt from, if it says so; for declining it when it is refused.

        That is the hand-off that came with it; generation first, the address of the context server.
        """
        if request.kind != "generation":
            return None
        if request.generation_first:
            return request.ctx_address or None
        try:
            return self._handoff_decoder.decode(request.handoff)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def check_aux(self, aux: Aux) -> None:
        """Check the tokens that came with a prompt; how many there are was checked on arrival.

        Raises:
            ApiError: 502, one is outside the vocabulary.
        """
        entries = aux.first_logprobs
        ids = [
            *aux.first_tokens,
            *(entry.token_id for entry in entries),
            *(one for entry in entries for one, _ in entry.top),
        ]
        if not all(0 <= token < self.limits.vocab_size for token in ids):
            raise ApiError(
                502,
                "The context server's first token is outside the vocabulary.",
                type="server_error",
                code="bad_first_token",
            )

    def _prompt(self, request: Generate) -> TokenArray:
        data = request.prompt_token_ids
        if not data or len(data) % _TOKEN_BYTES:
            raise bad_request("The prompt is empty; send at least one token.", param="prompt")
        prompt = np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
        self._check_ids((int(prompt.min()), int(prompt.max())), "prompt")
        return prompt

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        for token in ids:
            if not 0 <= token < self.limits.vocab_size:
                raise bad_request(
                    f"Token id {token} is outside the model's vocabulary of {self.limits.vocab_size} tokens.",
                    param=param,
                )

    def _check_sampling(self, params: SamplingParams) -> None:
        self._check_ids(params.logit_bias, "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        lowest, highest = REPETITION_PENALTIES
        checks = (
            (params.max_tokens >= 1, "max_tokens must be at least 1", "max_tokens"),
            (0 <= params.min_tokens <= params.max_tokens, "min_tokens must be between 0 and max_tokens", "min_tokens"),
            (
                0 <= params.temperature <= MAX_TEMPERATURE,
                f"temperature must be 0 to {MAX_TEMPERATURE:g}",
                "temperature",
            ),
            (params.top_k >= 0, "top_k must not be negative", "top_k"),
            (0 < params.top_p <= 1, "top_p must be above 0 and at most 1", "top_p"),
            (0 <= params.min_p <= 1, "min_p must be between 0 and 1", "min_p"),
            (
                lowest <= params.repetition_penalty <= highest,
                f"repetition_penalty must be {lowest:g} to {highest:g}",
                "repetition_penalty",
            ),
        )
        for holds, sentence, param in checks:
            if not holds:
                raise bad_request(f"{sentence[0].upper()}{sentence[1:]}.", param=param)

    def _check_length(self, request: Generate, prompt_length: int) -> None:
        limits = self.limits
        total = prompt_length + request.sampling.max_tokens
        if total > limits.max_seq_len:
            raise bad_request(
                f"The prompt has {prompt_length} tokens and max_tokens is {request.sampling.max_tokens}: {total} "
                f"together, but this model takes at most {limits.max_seq_len}. Shorten the prompt or lower max_tokens.",
                param="max_tokens" if prompt_length < limits.max_seq_len else "prompt",
                code="context_length_exceeded",
            )
        # The last token's KV is never needed; a context server needs the prompt's only.
        cached = prompt_length if request.kind == "context" else total - 1
        if cached > limits.max_cached_tokens:
            raise bad_request(
                f"The request needs the KV cache of {cached} tokens ({prompt_length} of them the prompt), but this "
                f"server's cache holds {limits.max_cached_tokens}. Shorten it, or give the server more memory.",
                param="prompt" if prompt_length > limits.max_cached_tokens else "max_tokens",
                code="context_length_exceeded",
            )
        if not limits.chunked_prefill and prompt_length > limits.max_num_tokens:
            raise bad_request(
                f"The prompt has {prompt_length} tokens, but this server computes at most {limits.max_num_tokens} at "
                "once because chunked prefill is off.",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_leg(self, request: Generate) -> HandOff | None:
        if request.kind == "aggregated":
            return None
        if not self.limits.transfers:
            raise bad_request(
                "This server moves no KV cache: set cache_transceiver_config.backend, or send whole requests.",
                param="disaggregated_params",
                code="transfer_disabled",
            )
        if request.transfer_id <= 0:
            raise bad_request("The disaggregated request id is missing.", param="disaggregated_params")
        if request.kind == "context":
            self._check_pipelining(request)
            return None
        if not request.generation_first:
            return self._check_handoff(request)
        if not request.ctx_address or request.first_tokens:
            raise bad_request(
                "A generation-first request names its context server, and has no first tokens yet.",
                param="disaggregated_params",
            )
        return None

    def _check_pipelining(self, request: Generate) -> None:
        if not self.limits.pipelined or request.sampling.max_tokens == 1:
            return  # One token needs no generation server, so nothing is sent.
        if (obstacle := pipelining_obstacle(generation_first=request.generation_first)) is not None:
            raise bad_request(obstacle, param="disaggregated_params.schedule_style", code="not_pipelined")

    def _check_handoff(self, request: Generate) -> HandOff:
        if not request.first_tokens:
            raise bad_request(
                "'first_gen_tokens' is empty; it comes from the context server's answer.", param="disaggregated_params"
            )
        self._check_ids(request.first_tokens, "first_gen_tokens")
        if len(request.first_tokens) > request.sampling.max_tokens:
            raise bad_request("There are more first tokens than max_tokens allows.", param="max_tokens")
        try:
            handoff = self._handoff_decoder.decode(request.handoff)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise bad_request(
                f"The hand-off is not what a context server gave out: {error}.",
                param="disaggregated_params",
                code="invalid_handoff",
            ) from None
        if handoff.protocol != PROTOCOL_VERSION:
            raise ApiError(
                400,
                f"The context server speaks protocol {handoff.protocol} and this server {PROTOCOL_VERSION}; upgrade "
                "the older one.",
                code="protocol_mismatch",
            )
        return handoff
