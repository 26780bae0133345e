"""``/openapi.json``: OpenAPI 3.1 of the router's face, with the schemas of the very structs that decode requests."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest
from kvmesh.protocol.openai.responses import ChatResponse, ChatStreamChunk, CompletionResponse
from kvmesh.protocol.openai.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from kvmesh.protocol.version import package_version
from kvmesh.router.explain import Explanation

__all__ = ["openapi_document"]

_SCHEMAS = "#/components/schemas/{name}"

_GENERATION_ERRORS = {
    "400": "The request can never succeed as it stands; `param` names the field.",
    "401": "Missing or unknown API key.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "Too many requests; see `Retry-After`.",
    "502": "A server broke off.",
    "503": "No server can take the request now; see `Retry-After`.",
    "504": "The request was not finished before its deadline.",
}


def openapi_document() -> dict[str, Any]:
    """The whole document, as plain data."""
    types = (
        ChatCompletionRequest,
        CompletionRequest,
        ChatResponse,
        ChatStreamChunk,
        CompletionResponse,
        TokenizeRequest,
        TokenizeResponse,
        DetokenizeRequest,
        DetokenizeResponse,
        ModelList,
        Explanation,
        ErrorResponse,
    )
    _, components = msgspec.json.schema_components(types, schema_hook=_schema_of, ref_template=_SCHEMAS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "KVMesh router",
            "version": package_version(),
            "description": "OpenAI's completions API over a mesh of context and generation servers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"apiKey": []}],
        "paths": _paths(),
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schema_of(type_: type) -> dict[str, Any]:
    """Schemas of what msgspec has none for: an ``object`` is any JSON value."""
    if type_ is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError(f"no JSON schema for {type_}")


def _paths() -> dict[str, Any]:
    return {
        "/v1/completions": _post(
            "createCompletion", "Complete prompts", "CompletionRequest", "CompletionResponse", "CompletionResponse"
        ),
        "/v1/chat/completions": _post(
            "createChatCompletion",
            "Answer a conversation",
            "ChatCompletionRequest",
            "ChatResponse",
            "ChatStreamChunk",
        ),
        "/v1/models": _get("listModels", "The served models", "ModelList"),
        "/tokenize": _post("tokenize", "Token ids of a text or conversation", "TokenizeRequest", "TokenizeResponse"),
        "/detokenize": _post("detokenize", "Text of token ids", "DetokenizeRequest", "DetokenizeResponse"),
        "/explain/{request_id}": _get(
            "explain",
            "Why a recent request went where it went",
            "Explanation",
            parameters=[
                {
                    "name": "request_id",
                    "in": "path",
                    "required": True,
                    "description": "`X-Request-Id`, or the `id` of the response.",
                    "schema": {"type": "string"},
                }
            ],
            errors={"404": "Not a recent request of this router."},
        ),
        "/health": _get("health", "200 when requests can be served, else 503", errors={"503": "Not ready."}),
        "/ready": _get("ready", "The same as /health", errors={"503": "Not ready."}),
        "/cluster_info": _get("clusterInfo", "Servers, their health and load"),
        "/perf_metrics": _get("perfMetrics", "Timings of finished requests, joined over both servers; drained"),
        "/version": _get("version", "Version of the router"),
        "/metrics": _text("metrics"),
        "/prometheus/metrics": _text("prometheusMetrics"),
        "/openapi.json": _get("openapi", "This document"),
    }


def _post(operation: str, summary: str, request: str, response: str, chunk: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(response)}}
    if chunk is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"Events whose data is a {chunk}; the last is [DONE]."}
        }
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
            "responses": {
                "200": {"description": "The answer.", "content": content},
                **_errors(_GENERATION_ERRORS if chunk is not None else {"400": _GENERATION_ERRORS["400"]}),
            },
        }
    }


def _get(
    operation: str,
    summary: str,
    schema: str | None = None,
    *,
    parameters: list[dict[str, Any]] | None = None,
    errors: dict[str, str] | None = None,
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation,
        "summary": summary,
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": _ref(schema) if schema else {}}},
            },
            **_errors(errors or {}),
        },
    }
    if parameters:
        described["parameters"] = parameters
    return {"get": described}


def _text(operation: str) -> dict[str, Any]:
    return {
        "get": {
            "operationId": operation,
            "summary": "Prometheus metrics",
            "responses": {
                "200": {
                    "description": "The exposition text.",
                    "content": {"text/plain": {"schema": {"type": "string"}}},
                }
            },
        }
    }


def _errors(statuses: dict[str, str]) -> dict[str, Any]:
    return {
        status: {"description": text, "content": {"application/json": {"schema": _ref("ErrorResponse")}}}
        for status, text in statuses.items()
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _SCHEMAS.format(name=name)}
