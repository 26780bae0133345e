from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anyio
import numpy as np
import openai
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export import SpanExporter

from kvmesh.config import RouterSettings
from kvmesh.net.service import serving
from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest, decode_request
from kvmesh.protocol.openai.responses import (
    ChatResponse,
    CompletionResponse,
    chat_choice,
    completion_choice,
    encode,
    response_id,
    usage,
)
from kvmesh.protocol.openai.sse import DONE, SSE_HEADERS, ChunkEncoder, error_event
from kvmesh.router.app import RouterService
from kvmesh.telemetry.tracing import Tracing

MODEL = "fake-model"
VOCABULARY = [chr(32 + index) for index in range(95)]


class FakeTokenizer:
    """One id per printable ASCII character."""

    vocab_size = len(VOCABULARY)
    longest_token_chars = 1

    def encode_many(self, texts: Sequence[str], *, add_special: bool = True) -> list[np.ndarray]:
        return [np.array([ord(char) - 32 for char in text], dtype=np.int32) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(VOCABULARY[token] for token in ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return turns + "<assistant>" * add_generation_prompt


Handler = Callable[["FakeWorker", web.Request, Any], Awaitable[web.StreamResponse]]


class FakeWorker:
    """A worker over a real socket that answers with the letters of :attr:`answer`, one token each.

    Behaviour is changed by setting :attr:`before` (run when a request has been read; may raise, wait or kill) and
    :attr:`after` (run after each streamed token with its number).
    """

    max_seq_len = 256

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.url = ""
        self.answer = "abcdefgh"
        self.cached_tokens = 9
        self.own_cached_tokens = 128
        """What a generation server counts itself, which is not the truth."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.disconnects = 0
        self.aborts: list[int] = []
        self.healthy = True
        self.left = anyio.Event()
        self.before: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        self.after: Callable[[int], Awaitable[None]] | None = None
        self.finish_context: str | None = None
        self.runner: web.AppRunner | None = None

    def member(self, **fields: Any) -> Member:
        return Member(
            instance_id=self.name,
            role=self.role,
            url=self.url,
            **{"model": MODEL, "max_seq_len": self.max_seq_len, "tokens_per_block": 32, **fields},
        )

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**25)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/abort", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/perf_metrics", self._perf_metrics)
        listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.SockSite(self.runner, listener).start()

    async def kill(self) -> None:
        """Like SIGKILL: the listener and every connection are gone at once."""
        runner, self.runner = self.runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def legs(self) -> list[str]:
        """The kinds of requests served, in order."""
        return [body.get("disaggregated_params", {}).get("request_type", "whole") for body in self.requests]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "completions")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "chat")

    async def _serve(self, request: web.Request, kind: str) -> web.StreamResponse:
        raw = await request.read()
        self.requests.append(json.loads(raw))
        self.headers.append(request.headers)
        try:
            body = decode_request(kind, raw)
            if self.before is not None:
                await self.before(self.requests[-1])
            params = body.disaggregated_params
            if params is not None and params.request_type == "context_only":
                return self._prefilled(kind, body, params)
            return await self._generated(kind, body, params, request)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status)
        except (ConnectionResetError, anyio.get_cancelled_exc_class()):
            self.disconnects += 1
            self.left.set()
            raise

    def _prompt(self, body: CompletionRequest | ChatCompletionRequest) -> list[int]:
        if isinstance(body, ChatCompletionRequest):
            assert body.prompt_token_ids is not None, "the router has tokenised"
            return body.prompt_token_ids
        assert isinstance(body.prompt, list)
        assert all(isinstance(token, int) for token in body.prompt)
        return body.prompt  # type: ignore[return-value]

    def _prefilled(
        self, kind: str, body: CompletionRequest | ChatCompletionRequest, params: DisaggregatedParams
    ) -> web.Response:
        assert not body.stream
        prompt = self._prompt(body)
        last = self.finish_context or ("length" if body.max_tokens == 1 else "not_finished")
        handed = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[ord(self.answer[0]) - 32],
            ctx_request_id=params.disagg_request_id,
            disagg_request_id=params.disagg_request_id,
            encoded_opaque_state="c3RhdGU=",
        )
        return self._whole(kind, body, self.answer[0], last, len(prompt), 1, self.cached_tokens, handed)

    async def _generated(
        self,
        kind: str,
        body: CompletionRequest | ChatCompletionRequest,
        params: DisaggregatedParams | None,
        request: web.Request,
    ) -> web.StreamResponse:
        prompt = self._prompt(body)
        text = self.answer[: body.max_tokens]
        cached = self.cached_tokens if params is None else self.own_cached_tokens
        if not body.stream:
            if self.after is not None:
                await self.after(0)
            return self._whole(kind, body, text, "length", len(prompt), len(text), cached, None)
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        encoder = ChunkEncoder(
            kind,
            id=response_id(kind, body.request_id or "none"),
            model=body.model,
            created=1,
            include_usage=body.include_usage,
        )
        if first := encoder.first(prompt if body.return_token_ids else None):
            await response.write(first)
        try:
            for number, char in enumerate(text):
                ids = [ord(char) - 32] if body.return_token_ids else None
                finish = "length" if number + 1 == len(text) else None
                await response.write(encoder.chunk(char, token_ids=ids, finish_reason=finish))
                if self.after is not None:
                    await self.after(number)
        except ApiError as error:
            await response.write(error_event(error))
        else:
            if body.include_usage:
                await response.write(encoder.usage(usage(len(prompt), len(text), cached)))
            await response.write(DONE)
        await response.write_eof()
        return response

    def _whole(
        self,
        kind: str,
        body: CompletionRequest | ChatCompletionRequest,
        text: str,
        finish: str,
        prompt_tokens: int,
        completion_tokens: int,
        cached: int,
        handed: DisaggregatedParams | None,
    ) -> web.Response:
        build, response = (
            (completion_choice, CompletionResponse) if kind == "completions" else (chat_choice, ChatResponse)
        )
        choice = build(
            0,
            text,
            finish_reason=finish,
            token_ids=[ord(char) - 32 for char in text] if body.return_token_ids else None,
            prompt_token_ids=self._prompt(body) if body.return_token_ids else None,
            disaggregated_params=handed,
        )
        whole = response(
            id=response_id(kind, body.request_id or "none"),
            created=1,
            model=body.model,
            choices=[choice],
            usage=usage(prompt_tokens, completion_tokens, cached),
        )
        return web.Response(body=encode(whole), content_type="application/json")

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts.append((await request.json())["disagg_request_id"])
        return web.json_response({"aborted": True})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if self.healthy else 503)

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"instance_id": self.name, "model": MODEL, "max_seq_len": self.max_seq_len, "tokens_per_block": 32}
        )

    async def _perf_metrics(self, _request: web.Request) -> web.Response:
        kinds = {"context_only": "context", "generation_only": "generation"}
        return web.json_response(
            [
                {"request_id": body["request_id"], "kind": kinds.get(leg, "aggregated")}
                for body, leg in zip(self.requests, self.legs, strict=True)
            ]
        )


class Mesh:
    """A router in front of fake workers, and clients of it."""

    def __init__(self, stack: AsyncExitStack, exporter: SpanExporter | None = None) -> None:
        self._stack = stack
        self.exporter = exporter
        self.workers: dict[str, FakeWorker] = {}
        self.router: RouterService
        self.url = ""
        self.openai: openai.AsyncOpenAI
        self.http: aiohttp.ClientSession

    async def start(self, roles: Mapping[str, str], **settings: Any) -> None:
        keys = settings.get("api_keys", [])
        router = RouterSettings(port=0, served_model_name=MODEL, **{"request_timeout_s": 20.0, **settings})
        self.router = RouterService(router, tokenizer=FakeTokenizer())
        if self.exporter is not None:
            self.router._tracing = Tracing("router", exporter=self.exporter)
        self.url = await self._stack.enter_async_context(serving(self.router))
        for name, role in roles.items():
            await self.join(FakeWorker(name, role))
        self.openai = await self._stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key=keys[0] if keys else "none", max_retries=0, timeout=20
            )
        )
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(self.url))

    async def join(self, worker: FakeWorker, **fields: Any) -> FakeWorker:
        await worker.start()
        self._stack.push_async_callback(worker.kill)
        self.workers[worker.name] = worker
        self.tell("joined", worker, **fields)
        return worker

    def tell(self, kind: str, worker: FakeWorker, **fields: Any) -> None:
        """What a membership would say."""
        self.router.parts.cluster.apply(MemberEvent(revision=1, kind=kind, member=worker.member(**fields)))

    def __getitem__(self, name: str) -> FakeWorker:
        return self.workers[name]

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    def idle(self) -> bool:
        """Whether nothing is counted as under way any more."""
        numbers = self.router.statistics()
        servers = self.router.parts.cluster.info()["servers"]
        return numbers["inflight_requests"] == 0 and all(
            (server["active_requests"], server["active_tokens"]) == (0, 0) for server in servers
        )


@pytest.fixture
def mesh() -> Callable[..., Any]:
    """``async with mesh({"c": "context", "g": "generation"}, **settings) as mesh``."""

    @asynccontextmanager
    async def start(
        roles: Mapping[str, str] | None = None, exporter: SpanExporter | None = None, **settings: Any
    ) -> AsyncIterator[Mesh]:
        async with AsyncExitStack() as stack:
            found = Mesh(stack, exporter)
            await found.start({"c": "context", "g": "generation"} if roles is None else roles, **settings)
            yield found

    return start
