"""Request bodies of ``/v1/completions`` and ``/v1/chat/completions``, with the extensions of vLLM and TensorRT-LLM.

``decode_completion`` and ``decode_chat`` turn bytes into structs or raise an OpenAI-style 400 naming the field.
Ranges and fields that are not supported are checked by :mod:`kvmesh.protocol.openai.validate`.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeVar, get_args

import msgspec

from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.openai.cache import ConversationParams, KvCacheRetention

__all__ = [
    "ApiKind",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "ContentPart",
    "GenerationRequest",
    "PromptInput",
    "StreamOptions",
    "decode_chat",
    "decode_completion",
    "decode_request",
]

ApiKind = Literal["completions", "chat"]
PromptInput = str | list[str | int | list[int]]
"""A text, a list of texts, one prompt as token ids, or a list of those."""


class StreamOptions(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``stream_options`` of a streaming request."""

    include_usage: bool | None = None
    """Send one more chunk, with the usage and no choices, before ``[DONE]``."""
    include_obfuscation: bool | None = None
    """Accepted as OpenAI's clients may send it; chunks are never padded."""


class GenerationRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What both APIs share. ``None`` is the same as absent for every optional field."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None

    # vLLM's and TensorRT-LLM's extensions
    top_k: int | None = None
    """-1 and 0 both mean all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_cache_retention_config: KvCacheRetention | None = None
    """How long the blocks of the prompt and of the answer are worth keeping."""
    conversation_params: ConversationParams | None = None
    """Names the conversation of which this is a turn."""
    priority: int | None = None
    request_id: str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    prompt_token_ids: list[int] | None = None
    """Between router and worker: the prompt as the router tokenised it; a worker takes it instead of rendering."""

    # fields that clients send by habit, checked by ``validate`` where a value would change the answer
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Names a conversation for the router's ``conversation`` policy; otherwise without effect."""

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings as a list, empty when none."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: PromptInput
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its BOS and the like to a text prompt (default: yes)."""


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One part of a message; only ``type: text`` is supported, other types are refused by name."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatCompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # accepted only with the value that means "no such thing"
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None


_UNSUPPORTED: dict[str, str] = {
    "lora_request": "LoRA adapters are not supported yet",
    "lora": "LoRA adapters are not supported yet",
    "tools": "tool calling is a feature of /v1/chat/completions and is not supported yet",
    "response_format": "structured output is not supported yet",
    "guided_json": "structured output is not supported yet",
    "guided_regex": "structured output is not supported yet",
    "guided_choice": "structured output is not supported yet",
    "guided_grammar": "structured output is not supported yet",
    "structured_outputs": "structured output is not supported yet",
    "use_beam_search": "beam search is not supported yet",
    "length_penalty": "beam search is not supported yet",
    "early_stopping": "beam search is not supported yet",
    "prompt_logprobs": "log-probabilities of prompt tokens are not supported yet",
    "truncate_prompt_tokens": "prompts are never cut; send at most the model's context",
    "chat_template": "the model's own template is used; a template in the request is not allowed",
    "continue_final_message": "continuing an assistant message is not supported yet",
    "bad_words": "banned words are not supported yet; use logit_bias",
    "reasoning_effort": "no served model takes it",
    "verbosity": "no served model takes it",
    "audio": "only text is generated",
    "prediction": "predicted outputs are not supported yet",
    "web_search_options": "there is no web search here",
}
"""Fields that other servers know: refused with a reason, never ignored."""

_PATH = re.compile(r" - at (?:`(?:key|value)` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")

RequestT = TypeVar("RequestT", bound=GenerationRequest)

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Decode a completions body. Raises :class:`ApiError` 400 naming the field at fault."""
    return _decode(_completion_decoder, body, CompletionRequest)


def decode_chat(body: bytes) -> ChatCompletionRequest:
    """Decode a chat completions body. Raises :class:`ApiError` 400 naming the field at fault."""
    return _decode(_chat_decoder, body, ChatCompletionRequest)


def decode_request(kind: ApiKind, body: bytes) -> CompletionRequest | ChatCompletionRequest:
    """Decode the body of either API. Raises :class:`ApiError` 400 naming the field at fault."""
    return decode_completion(body) if kind == "completions" else decode_chat(body)


def _decode(decoder: msgspec.json.Decoder[RequestT], body: bytes, type_: type[RequestT]) -> RequestT:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _raise_invalid(str(error), type_)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad_request(f"The request body is not valid JSON: {reason}.", code="invalid_json") from None


def _raise_invalid(message: str, type_: type[msgspec.Struct]) -> NoReturn:
    """Turn msgspec's sentence into OpenAI's error, with the field's path as ``param``."""
    path = _PATH.search(message)
    where = path.group(1) if path else ""
    if unknown := _UNKNOWN.search(message):
        raise _unknown_field(where, unknown.group(1), type_)
    if missing := _MISSING.search(message):
        param = f"{where}.{missing.group(1)}" if where else missing.group(1)
        raise bad_request(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    reason = _PATH.sub("", message)
    subject = f"Invalid value for '{where}'" if where else "Invalid request body"
    raise bad_request(f"{subject}: {reason}.", param=where or None, code="invalid_type")


def _struct_at(path: str, type_: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The class of the object at a path like ``kv_cache_retention_config.token_range_retention_configs[0]``."""
    for part in filter(None, path.split(".")):
        [field] = (field for field in msgspec.structs.fields(type_) if field.name == part.partition("[")[0])
        [type_] = _structs_in(field.type)
    return type_


def _structs_in(annotation: Any) -> list[type[msgspec.Struct]]:
    """The structs in an annotation such as ``list[TokenRange] | None``: one, wherever fields are checked."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [struct for part in get_args(annotation) for struct in _structs_in(part)]


def _unknown_field(where: str, name: str, type_: type[msgspec.Struct]) -> ApiError:
    param = f"{where}.{name}" if where else name
    if not where and name in _UNSUPPORTED:
        return bad_request(f"'{name}' is refused: {_UNSUPPORTED[name]}.", param=name, code="unsupported_parameter")
    near = get_close_matches(name, _struct_at(where, type_).__struct_fields__, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return bad_request(f"Unrecognized request argument: '{param}'.{hint}", param=param, code="unknown_parameter")
