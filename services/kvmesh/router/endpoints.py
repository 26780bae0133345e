"""The router's endpoints beside generation: models, tokens, the cluster, explanations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
from aiohttp import web

from kvmesh.config import RouterSettings
from kvmesh.net.http import json_response, read_json
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.openai.requests import ChatCompletionRequest
from kvmesh.protocol.openai.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from kvmesh.protocol.openai.validate import validate_chat
from kvmesh.protocol.version import package_version
from kvmesh.router.build import Parts
from kvmesh.router.http import HttpUpstream
from kvmesh.router.openapi import openapi_document
from kvmesh.router.tokenizing import Prompt, PromptTokenizer
from kvmesh.router.upstream import UpstreamBrokenError, UpstreamUnreachableError

__all__ = ["Endpoints"]

PERF_TIMEOUT_S = 2.0
"""How long ``/perf_metrics`` waits for a worker's records; they come with the next call then."""


class Endpoints:
    """Adds its routes to an application.

    Args:
        parts: of the router.
        upstream: for the workers' records.
        settings: where the indexer is.
        tokens: the tokenizer and the model's name; raises a 503 while it is loading.
    """

    def __init__(
        self,
        parts: Parts,
        upstream: HttpUpstream,
        settings: RouterSettings,
        tokens: Callable[[], tuple[PromptTokenizer, str, str]],
    ) -> None:
        self._parts = parts
        self._indexer = {"url": settings.indexer_url, "match_endpoint": settings.indexer_match_endpoint}
        self._upstream = upstream
        self._tokens = tokens
        self._created = int(time.time())
        self._openapi = msgspec.json.encode(openapi_document())

    def add_to(self, routes: web.UrlDispatcher) -> None:
        """Register all routes."""
        routes.add_get("/v1/models", self._models)
        routes.add_get("/v1/models/{model:.+}", self._model)
        routes.add_post("/tokenize", self._tokenize)
        routes.add_post("/detokenize", self._detokenize)
        routes.add_get("/cluster_info", self._cluster_info)
        routes.add_get("/perf_metrics", self._perf_metrics)
        routes.add_get("/explain/{request_id:.+}", self._explain)
        routes.add_get("/version", self._version)
        routes.add_get("/openapi.json", self._openapi_json)

    async def _models(self, _request: web.Request) -> web.Response:
        return json_response(ModelList(data=[self._card()]))

    async def _model(self, request: web.Request) -> web.Response:
        card = self._card()
        if request.match_info["model"] != card.id:
            raise _unknown_model(request.match_info["model"], card.id)
        return json_response(card)

    def _card(self) -> ModelCard:
        _, name, root = self._tokens()
        return ModelCard(id=name, created=self._created, root=root, max_model_len=self._max_model_len(name))

    def _max_model_len(self, name: str) -> int:
        return self._parts.cluster.models().get(name, 0)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request, TokenizeRequest)
        tokenizer, name, _ = self._tokens()
        if body.model is not None and body.model != name:
            raise _unknown_model(body.model, name)
        prompt = await self._prompt(tokenizer, body, name)
        ids = prompt.ids.tolist()
        strings = await tokenizer.token_texts(ids) if body.return_token_strs else None
        return json_response(
            TokenizeResponse(count=len(ids), max_model_len=self._max_model_len(name), tokens=ids, token_strs=strings)
        )

    async def _prompt(self, tokenizer: PromptTokenizer, body: TokenizeRequest, name: str) -> Prompt:
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Send either 'prompt' or 'messages'.", param="prompt")
        if body.messages is not None:
            chat = ChatCompletionRequest(
                model=name,
                messages=body.messages,
                add_generation_prompt=body.add_generation_prompt,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            validate_chat(chat)
            return await tokenizer.chat(chat)
        assert body.prompt is not None
        return await tokenizer.text(body.prompt, add_special=body.add_special_tokens is not False, param="prompt")

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request, DetokenizeRequest)
        tokenizer, name, _ = self._tokens()
        if body.model is not None and body.model != name:
            raise _unknown_model(body.model, name)
        return json_response(DetokenizeResponse(prompt=await tokenizer.decode(body.tokens)))

    async def _cluster_info(self, _request: web.Request) -> web.Response:
        return json_response({**self._parts.cluster.info(), "indexer": self._indexer})

    async def _explain(self, request: web.Request) -> web.Response:
        wanted = request.match_info["request_id"]
        found = self._parts.explainer.find(wanted)
        if found is None:
            raise ApiError(
                404,
                f"Nothing is known of a request '{wanted}'; this router remembers its latest requests only.",
                code="request_not_found",
            )
        return json_response(found)

    async def _perf_metrics(self, _request: web.Request) -> web.Response:
        async with anyio.create_task_group() as tasks:
            for server in self._parts.cluster.servers():
                tasks.start_soon(self._collect, server.member.url)
        return json_response(self._parts.perf.drain())

    async def _collect(self, url: str) -> None:
        with anyio.move_on_after(PERF_TIMEOUT_S):
            try:
                response = await self._upstream.get(f"{url}/perf_metrics")
                try:
                    records: Any = msgspec.json.decode(await response.read()) if response.status == 200 else []
                finally:
                    response.close()
            except (UpstreamUnreachableError, UpstreamBrokenError, msgspec.DecodeError):
                return
            if isinstance(records, list):
                self._parts.perf.heard([record for record in records if isinstance(record, dict)])

    async def _version(self, _request: web.Request) -> web.Response:
        return json_response({"version": package_version()})

    async def _openapi_json(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")


def _unknown_model(asked: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model '{asked}' does not exist here; this mesh serves '{served}'.",
        code="model_not_found",
        param="model",
    )
