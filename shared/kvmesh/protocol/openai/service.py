"""Small bodies beside generation: ``/v1/models``, ``/tokenize`` and ``/detokenize`` (vLLM's shapes)."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.protocol.openai.requests import ChatMessage

__all__ = [
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorDetail",
    "ErrorResponse",
    "ModelCard",
    "ModelList",
    "TokenizeRequest",
    "TokenizeResponse",
]


class ModelCard(msgspec.Struct, kw_only=True):
    """One served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvmesh"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """``GET /v1/models``."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Text of token ids, special tokens included."""

    prompt: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong and what to do."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every error."""

    error: ErrorDetail
