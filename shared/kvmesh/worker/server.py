"""The HTTP face of a worker's engines: OpenAI completions and chat, whole or as a leg, and what operators ask."""

from __future__ import annotations

import socket
import time
import uuid

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web
from anyio.abc import TaskGroup, TaskStatus
from opentelemetry.trace import SpanKind

from kvmesh.config import WorkerSettings
from kvmesh.models.store import resolve_model
from kvmesh.models.tokenizer import Tokenizer
from kvmesh.net.auth import ApiKeys, KeyMetrics
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import (
    OPEN_PATHS,
    REQUEST_ID,
    ROUTER_HEADER,
    api_key_middleware,
    json_response,
    read_json,
    receiving,
)
from kvmesh.net.private_files import warn_if_public
from kvmesh.net.service import Health, Service
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError, unavailable
from kvmesh.protocol.members import Load
from kvmesh.protocol.openai.requests import ApiKind, decode_request
from kvmesh.protocol.openai.service import ModelCard, ModelList
from kvmesh.protocol.version import package_version
from kvmesh.telemetry import get_logger
from kvmesh.telemetry.tracing import Tracing
from kvmesh.worker.answers import Answerer
from kvmesh.worker.context_legs import ContextLegs
from kvmesh.worker.conversations import ActiveConversations
from kvmesh.worker.delivery import deliver_stream, deliver_whole
from kvmesh.worker.engine_metrics import collect_engines, expose_world_size
from kvmesh.worker.facts import load_of, member_of, server_info, stats_body
from kvmesh.worker.kv_events import KvEventsRoute
from kvmesh.worker.liveness import HEALTH_TIMEOUT_S, Liveness
from kvmesh.worker.membership import join_mesh
from kvmesh.worker.observations import Observations
from kvmesh.worker.plans import ModelFacts, Planner
from kvmesh.worker.preflight import check_model
from kvmesh.worker.probes import generate_probe
from kvmesh.worker.ranks import EngineGroup

__all__ = ["WorkerFailedError", "WorkerService"]

FAILURE_GRACE_S = 1.0
"""Between a failure and the end of the process: time for the failed requests' answers to leave."""

_OPEN_PATHS = OPEN_PATHS | {"/stats"}
"""Its figures are those of ``/metrics``."""

DRAIN_LOG_S = 2.0
"""Pause between two log lines that say for whom a draining server waits."""

_log = get_logger("worker")


class WorkerFailedError(RuntimeError):
    """This worker cannot go on; its process ends and is to be started anew."""


class _AbortRequest(msgspec.Struct, kw_only=True):
    """``POST /abort``: a context leg whose pages nobody will fetch."""

    disagg_request_id: int


class WorkerService(Service):
    """A context server, a generation server, or both in one (``settings.role``)."""

    open_while_draining = frozenset({"/abort", "/kv_cache_events"})
    """What is given up need not be waited for."""

    def __init__(self, settings: WorkerSettings) -> None:
        name = "worker" if settings.role == "both" else settings.role
        keys = self._api_keys = ApiKeys(settings.api_keys_file)
        tls = Tls(settings.tls)
        if settings.cluster_secret_file is not None:
            warn_if_public("cluster_secret_file", settings.cluster_secret_file)
        super().__init__(name, middleware=[api_key_middleware(keys, _OPEN_PATHS)], drain_s=settings.drain_s, tls=tls)
        instance_id = settings.instance_id or f"{name}-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.settings = settings.model_copy(update={"instance_id": instance_id})
        self.instance_id = instance_id
        self._tracing = Tracing.configure(name, instance_id=instance_id, otlp_endpoint=settings.otlp_endpoint)
        self._observations = Observations(self.metrics, self._tracing)
        self._coordinator: CoordinatorClient | None = None
        self._engine: EngineGroup | None = None
        self._planner: Planner | None = None
        self._answerer: Answerer | None = None
        self._facts = ModelFacts("", 0, 0)
        self._created = int(time.time())
        self._context_legs = ContextLegs()
        self._conversations = ActiveConversations()
        self._kv_events = KvEventsRoute()
        self._liveness = Liveness(self._tell_now)
        self._failure: str | None = None
        self._failed = anyio.Event()
        self._leave = anyio.Event()
        self._engine_gone: anyio.Event | None = None
        expose_world_size(self.metrics, self.settings.world_size)
        collect_engines(
            self.metrics,
            self.settings.dp_size,
            lambda rank: None if self._engine is None else self._engine.engines[rank].stats,
        )
        self.metrics.collect(KeyMetrics(keys))
        self.metrics.collect_statistics("kvmesh_worker_legs", self._context_legs.statistics)
        routes = self.app.router
        routes.add_post("/v1/completions", self._completions)
        routes.add_post("/v1/chat/completions", self._chat)
        routes.add_get("/v1/models", self._models)
        routes.add_get("/health_generate", self._health_generate)
        routes.add_get("/server_info", self._server_info)
        routes.add_get("/version", self._version)
        routes.add_get("/stats", self._stats)
        routes.add_get("/iteration_stats", self._iteration_stats)
        routes.add_get("/perf_metrics", self._perf_metrics)
        routes.add_post("/kv_cache_events", self._kv_cache_events)
        routes.add_post("/abort", self._abort)

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Check the settings against the model, launch the engine, and register at the coordinator if there is one."""
        settings = self.settings
        source = await anyio.to_thread.run_sync(resolve_model, settings.model)
        await anyio.to_thread.run_sync(check_model, settings, source)
        tokenizer = await anyio.to_thread.run_sync(Tokenizer.from_source, source)
        engine: EngineGroup = await tasks.start(self._host_engine)
        ranks = engine.ranks
        max_seq_len = min(rank.max_seq_len for rank in ranks)
        self._facts = ModelFacts(settings.served_model_name or source.name, max_seq_len, tokenizer.vocab_size)
        self._planner = Planner(engine, tokenizer, self._facts, settings.role, settings.request_timeout_s)
        endpoints = [rank.ctx_info_endpoint for rank in ranks]
        self._answerer = Answerer(tokenizer, endpoints, self._observations.delta)
        if settings.coordinator_url is not None:
            member = member_of(settings, self._facts.name, ranks, epoch=engine.epoch, url=url)
            self._coordinator = await join_mesh(
                tasks,
                CoordinatorClient(settings.coordinator_url, tls=self.tls, keys=self._api_keys),
                member,
                engine,
                self._context_legs,
                load=self.load,
                fail=self._fail,
            )
            self.metrics.collect_statistics("kvmesh_worker", self._coordinator.statistics)
        engine.on_ledger(self._context_legs.note)
        self._engine = engine
        tasks.start_soon(self._watch_engine, engine)
        tasks.start_soon(self._end_when_failed)
        tasks.start_soon(self._liveness.watch, engine.ping)
        pages = sum(rank.num_pages for rank in ranks)
        _log.info("ready", model=self._facts.name, pages=pages, transfer=ranks[0].transfer_backend, dp_size=engine.size)

    async def drain(self) -> None:
        """Tell the others first, then let what runs end and finished prompts be read, in ``drain_s`` altogether."""
        if self._coordinator is not None:
            self._coordinator.set_draining()
        until_s = anyio.current_time() + self.drain_s
        await super().drain()
        await self._await_readers(until_s)

    async def _await_readers(self, until_s: float) -> None:
        """Stay until the pages of every finished prompt are read, at most until ``until_s`` (the loop's time)."""
        transfers = self._context_legs.transfers
        if not len(transfers) or not self._engine_is_alive:
            return
        while len(transfers) and self._engine_is_alive and anyio.current_time() < until_s:
            _log.info("draining: prompts are still to be read", transfers=len(transfers), waits_for=self._waits_for())
            with anyio.move_on_after(min(DRAIN_LOG_S, until_s - anyio.current_time())):
                await transfers.finished()
        if len(transfers):
            _log.warning("leaving with prompts unread", transfers=len(transfers), waits_for=self._waits_for())
        else:
            _log.info("drained: every prompt was read")

    def _waits_for(self) -> list[dict[str, object]]:
        return self._context_legs.transfers.list(time.time_ns() // 1_000_000)

    @property
    def _engine_is_alive(self) -> bool:
        return self._engine is not None and self._failure is None

    def drain_detail(self) -> str:
        """See :meth:`Service.drain_detail`."""
        waits = self._context_legs.transfers.describe(time.time_ns() // 1_000_000)
        return f"draining; {waits}" if waits else "draining"

    async def stop(self) -> None:
        """Leave the membership, end the engine and send the last spans."""
        if self._coordinator is not None:
            await self._coordinator.stop()
        self._leave.set()
        if self._engine_gone is not None:
            await self._engine_gone.wait()
        await anyio.to_thread.run_sync(self._tracing.close)

    async def probe(self) -> Health:
        """Alive means that the executor loop itself answered just now."""
        if self._failure is not None:
            return Health(False, self._failure)
        if self._engine is None:
            return Health(False, "the engine is loading")
        try:
            await self._engine.ping(HEALTH_TIMEOUT_S)
        except ApiError as error:
            return Health(False, error.message)
        return Health(True)

    def load(self) -> Load:
        """What this worker tells the others with each heartbeat."""
        return Load() if self._engine is None else load_of(self._engine.stats, healthy=self._liveness.healthy)

    async def _host_engine(self, *, task_status: TaskStatus[EngineGroup]) -> None:
        """Own the engines from launch to end, in one task as their task group demands."""
        self._engine_gone = gone = anyio.Event()
        try:
            async with EngineGroup.launch(self.settings) as engine:
                task_status.started(engine)
                await self._leave.wait()
        finally:
            gone.set()

    async def _watch_engine(self, engine: EngineGroup) -> None:
        self._fail(f"the engine is dead: {await engine.wait_dead()}")

    def _tell_now(self) -> None:
        if self._coordinator is not None:
            self._coordinator.tell_now()

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            _log.error("this worker cannot go on", reason=reason)
            self._failed.set()

    async def _end_when_failed(self) -> None:
        """End this process when it cannot go on: whoever supervises it starts front and engine anew."""
        await self._failed.wait()
        await anyio.sleep(FAILURE_GRACE_S)
        raise WorkerFailedError(self._failure)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completions")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def _generate(self, request: web.Request, kind: ApiKind) -> web.StreamResponse:
        if self._planner is None or self._answerer is None:
            raise unavailable("The engine is still loading; try again in a moment.", code="loading", retry_after_s=2)
        with receiving(request):
            data = await request.read()
        body = decode_request(kind, data)
        parent = self._tracing.extract(request.headers)
        request_id = body.request_id or request[REQUEST_ID]
        with self._tracing.span(self.name, parent, kind=SpanKind.SERVER, request_id=request_id) as (span, context):
            plan = await self._planner.plan(body, request_id)
            if span.is_recording():
                plan.note_details()
            if plan.leg.kind == "context":
                engine_id = plan.sequences[0].run.request.request_id
                self._context_legs.remember(plan.leg.transfer_id, engine_id, request.headers.get(ROUTER_HEADER))
            self._observations.began(plan)
            try:
                with self._conversations.turn(plan):
                    if body.stream:
                        return await deliver_stream(request, plan, self._answerer, self.settings.request_timeout_s)
                    return await deliver_whole(plan, self._answerer, self.settings.request_timeout_s)
            finally:
                self._observations.ended(plan, context)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await read_json(request, _AbortRequest)
        engine = self._running_engine()
        request_id = self._context_legs.take(body.disagg_request_id)
        if request_id is not None:
            engine.abort(request_id)
        return json_response({"aborted": request_id is not None})

    async def _models(self, _request: web.Request) -> web.Response:
        card = ModelCard(
            id=self._facts.name, created=self._created, root=self.settings.model, max_model_len=self._facts.max_seq_len
        )
        return json_response(ModelList(data=[card] if self._facts.name else []))

    async def _health_generate(self, _request: web.Request) -> web.Response:
        """Really generate one token, on every rank."""
        engine = self._running_engine()
        started_s = time.perf_counter()
        tokens = sum(await engine.of_all(generate_probe))
        return json_response({"status": "ok", "tokens": tokens, "seconds": time.perf_counter() - started_s})

    async def _server_info(self, _request: web.Request) -> web.Response:
        engine = self._running_engine()
        return json_response(server_info(self.settings, self._facts.name, engine.ranks, epoch=engine.epoch))

    async def _version(self, _request: web.Request) -> web.Response:
        return json_response({"version": package_version()})

    async def _stats(self, _request: web.Request) -> web.Response:
        engine = self._running_engine()
        return json_response(stats_body([rank.stats for rank in engine.engines], engine.stats))

    async def _iteration_stats(self, _request: web.Request) -> web.Response:
        return json_response(self._running_engine().drain_iterations())

    async def _perf_metrics(self, _request: web.Request) -> web.Response:
        return json_response(self._observations.drain_records())

    async def _kv_cache_events(self, request: web.Request) -> web.StreamResponse:
        return await self._kv_events.answer(request, self._running_engine())

    def _running_engine(self) -> EngineGroup:
        if self._engine is None:
            raise unavailable("The engine is still loading; try again in a moment.", code="loading", retry_after_s=2)
        return self._engine
