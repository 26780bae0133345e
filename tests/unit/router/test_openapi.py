"""The OpenAPI document is valid and covers the real routes."""

from __future__ import annotations

from openapi_spec_validator import validate

from kvmesh.config import RouterSettings
from kvmesh.router.app import RouterService
from kvmesh.router.openapi import openapi_document


def test_valid() -> None:
    validate(openapi_document())


def test_requests_have_their_real_fields() -> None:
    schemas = openapi_document()["components"]["schemas"]
    assert {"messages", "max_completion_tokens", "top_k", "return_token_ids"} <= schemas["ChatCompletionRequest"][
        "properties"
    ].keys()
    assert schemas["CompletionRequest"]["required"] == ["model", "prompt"]


def test_every_route_is_described() -> None:
    service = RouterService(RouterSettings())
    routes = {route.resource.canonical for route in service.app.router.routes() if route.resource is not None}
    described = set(openapi_document()["paths"])
    assert routes - described == {"/v1/models/{model}"}
    assert described <= routes
