"""The router as a service: its routes, what runs beside them, and how it starts and stops."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid

import anyio
from aiohttp import web
from anyio.abc import TaskGroup

from kvmesh.config import RouterSettings
from kvmesh.models.store import resolve_model
from kvmesh.models.tokenizer import Tokenizer
from kvmesh.net.auth import ApiKeys, KeyMetrics
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.discovery import CoordinatorClient, StaticMembership
from kvmesh.net.http import BODY_TIMEOUT_S, REQUEST_ID, api_key_middleware, json_response
from kvmesh.net.service import Health, Service
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import unavailable
from kvmesh.protocol.members import Load, Member
from kvmesh.protocol.openai.requests import ApiKind
from kvmesh.router.build import build_parts, custom_tokenizer
from kvmesh.router.cluster import Server
from kvmesh.router.dialects.base import Outgoing
from kvmesh.router.endpoints import Endpoints
from kvmesh.router.http import HttpReply, HttpUpstream, read_body
from kvmesh.router.metric_texts import TEXTS
from kvmesh.router.metrics import RouterMetrics
from kvmesh.router.pipeline import Pipeline, RequestHead
from kvmesh.router.tokenizing import PromptTokenizer, TextTokenizer
from kvmesh.router.upstream import UpstreamBrokenError, UpstreamUnreachableError
from kvmesh.telemetry import get_logger
from kvmesh.telemetry.tracing import Tracing

__all__ = ["RouterService"]

PROBE_PERIOD_S = 0.25
"""How often breakers are looked at; their own times decide who is probed."""
PROBE_TIMEOUT_S = 1.0
ABORT_TIMEOUT_S = 2.0

_log = get_logger("router")


class RouterService(Service):
    """The OpenAI face of the mesh.

    Args:
        settings: of the router.
        tokenizer: to use instead of that of ``settings.model``.
        clock: of deadlines and breakers.
    """

    for_web_pages = True

    def __init__(
        self, settings: RouterSettings, *, tokenizer: TextTokenizer | None = None, clock: Clock | None = None
    ) -> None:
        keys = self._api_keys = ApiKeys(settings.api_keys_file, settings.api_keys)
        tls = Tls(settings.tls)
        super().__init__("router", middleware=[api_key_middleware(keys)], drain_s=settings.drain_s, tls=tls)
        self.settings = settings
        self.instance_id = f"router-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._clock = clock or SystemClock()
        self._tracing = Tracing.configure("router", instance_id=self.instance_id, otlp_endpoint=settings.otlp_endpoint)
        self._given_tokenizer = tokenizer
        self._tokenizer: PromptTokenizer | None = None
        self._pipeline: Pipeline | None = None
        self._model = settings.served_model_name or settings.model
        self._upstream = HttpUpstream(keys, router=self.instance_id if settings.coordinator_url else None, tls=tls)
        self._tasks: TaskGroup | None = None
        self._coordinator: CoordinatorClient | None = None
        self._static: StaticMembership | None = None
        self._exit = contextlib.AsyncExitStack()
        self._router_metrics = RouterMetrics(self.metrics)
        self.parts = build_parts(settings, self._upstream, self._abort, self._clock)
        self.metrics.collect_statistics("kvmesh_router", self.statistics, TEXTS)
        self.metrics.collect(KeyMetrics(keys))
        routes = self.app.router
        routes.add_post("/v1/completions", self._completions)
        routes.add_post("/v1/chat/completions", self._chat)
        routes.add_get("/ready", self._ready)
        Endpoints(self.parts, self._upstream, settings, self._tokens).add_to(routes)

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Open the connections, find the servers, load the tokenizer.

        Raises:
            ModelError: the model's tokenizer cannot be had.
        """
        settings = self.settings
        self._tasks = tasks
        await self._exit.enter_async_context(self._upstream)
        await tasks.start(self.parts.matcher.run)
        tasks.start_soon(self._probe_breakers)
        self._tokenizer = await self._load_tokenizer()
        await self._find_servers(tasks, url)
        self._pipeline = Pipeline(
            model=self._model,
            tokenizer=self._tokenizer,
            cluster=self.parts.cluster,
            matcher=self.parts.matcher,
            dispatcher=self.parts.dispatcher,
            admission=self.parts.admission,
            explainer=self.parts.explainer,
            perf=self.parts.perf,
            metrics=self._router_metrics,
            tracing=self._tracing,
            clock=self._clock,
            timeout_s=settings.request_timeout_s,
            needs_matches=self.parts.planner.needs_matches,
        )

    async def drain(self) -> None:
        """Tell the others first, then let what runs end."""
        if self._coordinator is not None:
            self._coordinator.set_draining()
        await super().drain()

    def cut_short(self) -> bool:
        """See :meth:`Service.cut_short`."""
        if self._pipeline is not None:
            self._pipeline.cut_short()
        return self._pipeline is not None

    async def stop(self) -> None:
        """Leave the membership, close the connections and send the last spans."""
        if self._coordinator is not None:
            await self._coordinator.stop()
        if self._static is not None:
            await self._static.stop()
        await self._exit.aclose()
        await anyio.to_thread.run_sync(self._tracing.close)

    def health(self) -> Health:
        """Healthy means that a request could be served now."""
        if self._pipeline is None:
            return Health(False, "the router is starting")
        if self.parts.cluster.ready(self._model):
            return Health(True)
        return Health(False, "no pair of a context and a generation server, nor a server of both roles, is usable")

    def statistics(self) -> dict[str, float]:
        """Everything that the parts count."""
        numbers = {**super().statistics(), **self.parts.statistics()}
        if self._tokenizer is not None:
            numbers |= self._tokenizer.statistics()
        if self._coordinator is not None:
            numbers |= self._coordinator.statistics()
        return numbers

    async def _load_tokenizer(self) -> PromptTokenizer:
        settings = self.settings
        tokenizer = self._given_tokenizer
        if tokenizer is None:
            source = await anyio.to_thread.run_sync(resolve_model, settings.model)
            self._model = settings.served_model_name or source.name
            custom = custom_tokenizer(settings)
            if custom is not None:
                source = await anyio.to_thread.run_sync(resolve_model, custom)
            tokenizer = await anyio.to_thread.run_sync(Tokenizer.from_source, source)
        return PromptTokenizer(tokenizer, threads=settings.tokenizer_threads)

    async def _find_servers(self, tasks: TaskGroup, url: str) -> None:
        settings = self.settings
        if settings.context_servers or settings.generation_servers:
            self._static = StaticMembership(
                settings.context_servers,
                settings.generation_servers,
                clock=self._clock,
                tls=self.tls,
                keys=self._api_keys,
            )
            self._static.subscribe(self.parts.cluster.apply)
            await self._static.start(tasks)
        if settings.coordinator_url is not None:
            self._coordinator = CoordinatorClient(
                settings.coordinator_url, clock=self._clock, tls=self.tls, keys=self._api_keys
            )
            self._coordinator.subscribe(self.parts.cluster.apply)
            self._coordinator.subscribe(self.parts.matcher.hear)
            await self._coordinator.start(tasks)
            member = Member(
                instance_id=self.instance_id,
                role="router",
                url=url,
                model=self._model,
                started_unix_ms=time.time_ns() // 1_000_000,
                pid=os.getpid(),
            )
            self._coordinator.announce(member, self._load)

    def _load(self) -> Load:
        numbers = self.parts.admission.statistics()
        return Load(running=int(numbers["inflight_requests"]), waiting=int(numbers["queued_requests"]))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "completions")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "chat")

    async def _serve(self, request: web.Request, kind: ApiKind) -> web.StreamResponse:
        if self._pipeline is None:
            raise _starting()
        request_id = request[REQUEST_ID]
        reply = HttpReply(request, request_id)
        timeout_s = min(BODY_TIMEOUT_S, self.settings.request_timeout_s)
        body = await read_body(request, self.settings.max_body_bytes, timeout_s=timeout_s)
        await self._pipeline.serve(kind, body, RequestHead(request_id, request.headers), reply)
        assert reply.response is not None, "the pipeline answered or raised"
        return reply.response

    async def _ready(self, _request: web.Request) -> web.Response:
        health = Health(False, "draining") if self.draining else self.health()
        return json_response({"ready": health.ok, "detail": health.detail}, 200 if health.ok else 503)

    def _tokens(self) -> tuple[PromptTokenizer, str, str]:
        if self._tokenizer is None:
            raise _starting()
        return self._tokenizer, self._model, self.settings.model

    def _abort(self, server: Server, outgoing: Outgoing) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._send_abort, server, outgoing)

    async def _send_abort(self, server: Server, outgoing: Outgoing) -> None:
        with anyio.move_on_after(ABORT_TIMEOUT_S):
            try:
                headers = {"Content-Type": "application/json"}
                response = await self._upstream.post(f"{server.member.url}{outgoing.path}", outgoing.body, headers)
                try:
                    await response.read()
                finally:
                    response.close()
            except (UpstreamUnreachableError, UpstreamBrokenError):
                return  # a dead server holds nothing, and one that lives drops the pages at the transfer's deadline

    async def _probe_breakers(self) -> None:
        """Ask servers that failed whether they are well again, each when its breaker says so."""
        while True:
            due = self.parts.cluster.due_probes()
            if due:
                async with anyio.create_task_group() as probes:
                    for server in due:
                        probes.start_soon(self._probe_server, server)
            await self._clock.sleep(PROBE_PERIOD_S)

    async def _probe_server(self, server: Server) -> None:
        well = False
        with anyio.move_on_after(PROBE_TIMEOUT_S):
            try:
                response = await self._upstream.get(f"{server.member.url}/health")
                try:
                    await response.read()
                    well = response.status == 200
                finally:
                    response.close()
            except (UpstreamUnreachableError, UpstreamBrokenError):
                well = False
        if well:
            _log.info("server is well again", server=server.member.instance_id)
            server.breaker.succeeded()
        else:
            server.breaker.probe_failed()


def _starting() -> Exception:
    return unavailable("The router is still loading the tokenizer; try again in a moment.", code="loading")
