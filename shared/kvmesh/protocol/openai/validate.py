"""Checks of a decoded request: ranges, combinations, and fields that are refused until they work.

Every failure is an :class:`~kvmesh.protocol.errors.ApiError` 400 whose ``param`` is the field; nothing is ignored.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvmesh.protocol.disagg import DisaggregatedParams, RequestType
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.openai.cache import conversation_id_of, retention_of
from kvmesh.protocol.openai.requests import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationRequest
from kvmesh.protocol.sampling import MAX_TEMPERATURE, REPETITION_PENALTIES

__all__ = ["MAX_N", "check_token_ids", "request_type_of", "validate_chat", "validate_completion", "validate_request"]

MAX_N = 128
"""OpenAI's limit of choices per prompt."""
MAX_STOP_STRINGS = 16
"""OpenAI allows 4; other servers allow more and clients rely on it."""
MAX_LOGPROBS = 20
"""OpenAI's limit for chat; its completions API allows 5, other servers 20."""
MAX_SEED = 2**63
MAX_TOKEN_ID = 2**31 - 1

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_REQUEST_TYPES: tuple[RequestType, ...] = ("context_only", "generation_only", "context_and_generation")
_ROLES = ("system", "developer", "user", "assistant")


class _Range(NamedTuple):
    """Closed interval, except where ``above`` excludes the lower end. ``None`` is no limit."""

    low: float
    high: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        low = value > self.low if self.above else value >= self.low
        return low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        bound = f"greater than {self.low:g}" if self.above else f"at least {self.low:g}"
        return bound if self.high is None else f"{bound} and at most {self.high:g}"


_RANGES: dict[str, _Range] = {
    "max_tokens": _Range(1),
    "temperature": _Range(0, MAX_TEMPERATURE),
    "top_p": _Range(0, 1, above=True),
    "n": _Range(1, MAX_N),
    "seed": _Range(-MAX_SEED, MAX_SEED - 1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "top_k": _Range(-1, MAX_TOKEN_ID),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(*REPETITION_PENALTIES),
    "min_tokens": _Range(0),
    "priority": _Range(-(2**31), 2**31 - 1),
}


def validate_request(request: CompletionRequest | ChatCompletionRequest, *, vocab_size: int | None = None) -> None:
    """Check a request of either API.

    Args:
        request: the decoded body.
        vocab_size: when given, token ids in ``logit_bias`` and ``stop_token_ids`` must be smaller.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    if isinstance(request, CompletionRequest):
        validate_completion(request, vocab_size=vocab_size)
    else:
        validate_chat(request, vocab_size=vocab_size)


def validate_completion(request: CompletionRequest, *, vocab_size: int | None = None) -> None:
    """Check a completions request; see :func:`validate_request`."""
    _check_common(request, vocab_size)
    if request.echo:
        raise _unsupported("echo", "returning the prompt is not supported yet")
    if request.suffix:
        raise _unsupported("suffix", "insertion is not supported")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of", "choosing the best of several is not supported; leave it out or set it to n")
    _check_range("logprobs", request.logprobs, _Range(0, MAX_LOGPROBS))


def validate_chat(request: ChatCompletionRequest, *, vocab_size: int | None = None) -> None:
    """Check a chat request; see :func:`validate_request`."""
    _check_common(request, vocab_size)
    _check_range("max_completion_tokens", request.max_completion_tokens, _Range(1))
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise bad_request(
            "'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_completion_tokens"
        )
    _check_range("top_logprobs", request.top_logprobs, _Range(0, MAX_LOGPROBS))
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    _check_tools(request)
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise _unsupported("response_format", "structured output is not supported yet")
    if request.modalities not in (None, ["text"]):
        raise _unsupported("modalities", "only text is generated")
    if not request.messages:
        raise bad_request("'messages' is empty; send at least one message.", param="messages", code="empty_array")
    for index, message in enumerate(request.messages):
        _check_message(index, message)


def request_type_of(params: DisaggregatedParams | None) -> RequestType:
    """The leg a request asks for, in lower case (§5.1).

    A request without parameters is served whole, and so is one that has no ``request_type`` and nothing that belongs to
    a leg: at most a ``conversation_id``.

    Raises:
        ApiError: 400 when ``request_type`` is none of the three known ones, or missing beside a leg's fields.
    """
    if params is None:
        return "context_and_generation"
    if params.request_type is None:
        if params != DisaggregatedParams(conversation_id=params.conversation_id):
            raise bad_request(
                "'request_type' is missing; only a request with no more than 'conversation_id' here may leave it out.",
                param="disaggregated_params.request_type",
                code="missing_required_parameter",
            )
        return "context_and_generation"
    wanted = params.request_type.lower()
    for known in _REQUEST_TYPES:
        if wanted == known:
            return known
    raise bad_request(
        f"Unknown request_type '{params.request_type}'; use one of {', '.join(_REQUEST_TYPES)}.",
        param="disaggregated_params.request_type",
    )


def check_token_ids(param: str, token_ids: list[int], vocab_size: int | None) -> None:
    """Refuse ids that no token of the vocabulary has.

    Raises:
        ApiError: 400 naming ``param``.
    """
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limit):
        bad = next(token for token in token_ids if not 0 <= token < limit)
        raise bad_request(f"Token id {bad} in '{param}' is not in [0, {limit}).", param=param, code="invalid_token_id")


def _check_common(request: GenerationRequest, vocab_size: int | None) -> None:
    for name, limits in _RANGES.items():
        _check_range(name, getattr(request, name), limits)
    if not request.model:
        raise bad_request("'model' is empty; name a model of /v1/models.", param="model")
    if request.stream_options is not None and not request.stream:
        raise bad_request("'stream_options' is allowed only when 'stream' is true.", param="stream_options")
    stop = request.stop_strings
    if len(stop) > MAX_STOP_STRINGS:
        raise bad_request(f"'stop' has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop")
    if "" in stop:
        raise bad_request("'stop' has an empty string; leave it out.", param="stop")
    stop_ids = request.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_ids, vocab_size)
    if request.min_tokens and vocab_size is not None and len(set(stop_ids)) >= vocab_size:
        raise bad_request(
            "'stop_token_ids' has every token, so none is left for 'min_tokens'; stop at fewer.", param="stop_token_ids"
        )
    if request.logit_bias:
        check_token_ids("logit_bias", list(request.logit_bias), vocab_size)
        if not all(-100 <= bias <= 100 for bias in request.logit_bias.values()):
            raise bad_request("Every value of 'logit_bias' must be between -100 and 100.", param="logit_bias")
    if request.cache_salt == "":
        raise bad_request("'cache_salt' is empty; leave it out to share the cache.", param="cache_salt")
    retention_of(request.kv_cache_retention_config)
    conversation_id_of(request.conversation_params, request.disaggregated_params)
    if request.request_id is not None and not _REQUEST_ID.fullmatch(request.request_id):
        raise bad_request("'request_id' must be 1 to 128 letters, digits or any of '._:-'.", param="request_id")
    if request.prompt_token_ids is not None:
        check_token_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    request_type_of(request.disaggregated_params)


def _check_range(name: str, value: float | None, limits: _Range) -> None:
    if value is not None and not limits.holds(value):
        raise bad_request(f"'{name}' is {value}; it must be {limits}.", param=name, code="invalid_value")


def _check_tools(request: ChatCompletionRequest) -> None:
    reason = "tool calling is not supported yet"
    if request.tools:
        raise _unsupported("tools", reason)
    if request.tool_choice not in (None, "none"):
        raise _unsupported("tool_choice", reason)
    if request.functions:
        raise _unsupported("functions", reason)
    if request.function_call not in (None, "none"):
        raise _unsupported("function_call", reason)


def _check_message(index: int, message: ChatMessage) -> None:
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise bad_request(
            f"The role '{message.role}' is not supported; use one of {', '.join(_ROLES)}.", param=f"{where}.role"
        )
    for name in ("tool_calls", "tool_call_id", "function_call"):
        if getattr(message, name):
            raise _unsupported(f"{where}.{name}", "tool calling is not supported yet")
    if message.content is None:
        raise bad_request("A message needs content.", param=f"{where}.content")
    if isinstance(message.content, list):
        for part_index, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                raise _unsupported(f"{where}.content[{part_index}]", "only parts of type 'text' are supported yet")


def _unsupported(param: str, reason: str) -> ApiError:
    return bad_request(f"'{param}' is refused: {reason}.", param=param, code="unsupported_parameter")
