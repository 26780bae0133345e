"""A request from its bytes to the end of its answer: parse, admit, tokenize, match, dispatch, relay.

Knows no HTTP library: bytes and a few header values come in, a :class:`~kvmesh.router.upstream.Reply` goes out.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import anyio
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from kvmesh.net.clock import Clock
from kvmesh.protocol.errors import ApiError, unavailable
from kvmesh.protocol.openai.fanout import SequenceSpec, fan_out, single_request
from kvmesh.protocol.openai.requests import ApiKind, ChatCompletionRequest, CompletionRequest
from kvmesh.protocol.openai.responses import response_id
from kvmesh.protocol.openai.sse import error_event
from kvmesh.router.admission import Admission
from kvmesh.router.cluster import Cluster
from kvmesh.router.deadline import Deadline
from kvmesh.router.dispatch import Dispatcher
from kvmesh.router.explain import Explainer, Explanation, SequenceExplanation
from kvmesh.router.intake import conversation_of, max_tokens_of, passed_on, take_in
from kvmesh.router.match import Matcher, Matches, NoMatcher
from kvmesh.router.metrics import RouterMetrics
from kvmesh.router.perf import PerfRecords
from kvmesh.router.relay import relay
from kvmesh.router.tokenizing import Prompt, PromptTokenizer
from kvmesh.router.upstream import Reply
from kvmesh.router.work import Work
from kvmesh.telemetry import exemplars
from kvmesh.telemetry.tracing import Tracing

__all__ = ["Pipeline", "RequestHead"]

FAREWELL_S = 1.0
"""How long a client whose request failed in mid-stream is given to take the error event."""

Request = CompletionRequest | ChatCompletionRequest


class RequestHead(NamedTuple):
    """What the pipeline needs of a request's head."""

    request_id: str
    """The client's ``X-Request-Id``, or one that was made for it."""
    headers: Mapping[str, str]
    """For the trace context."""


class Pipeline:
    """Serves requests. Everything it uses is given to it; it owns only the set of ids in use.

    Args:
        model: the name that clients use.
        tokenizer: of that model.
        cluster: for the context length.
        matcher: for prefix matches.
        dispatcher: for answers.
        admission: for places.
        explainer: remembers decisions.
        perf: remembers times.
        metrics: counts.
        tracing: spans.
        clock: times stages.
        timeout_s: deadline of a request, waiting included.
        needs_matches: whether any policy looks at matches.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: PromptTokenizer,
        cluster: Cluster,
        matcher: Matcher,
        dispatcher: Dispatcher,
        admission: Admission,
        explainer: Explainer,
        perf: PerfRecords,
        metrics: RouterMetrics,
        tracing: Tracing,
        clock: Clock,
        timeout_s: float,
        needs_matches: bool = True,
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._cluster = cluster
        self._matcher = matcher if needs_matches else NoMatcher()
        self._dispatcher = dispatcher
        self._admission = admission
        self._explainer = explainer
        self._perf = perf
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._timeout_s = timeout_s
        self._ids_in_use: set[str] = set()
        self._running: set[anyio.CancelScope] = set()

    def cut_short(self) -> None:
        """End what runs with an error: this router leaves."""
        for scope in self._running:
            scope.cancel()

    async def serve(self, kind: ApiKind, body: bytes, head: RequestHead, reply: Reply) -> None:
        """Answer one request.

        Raises:
            ApiError: it failed before anything was sent. Later failures are told by an event of the stream.
            ConnectionResetError: the client left.
        """
        outcome, running = "cancelled", anyio.CancelScope()
        try:
            request = take_in(kind, body, model=self.model, vocab_size=self._tokenizer.vocab_size)
            with running:
                self._running.add(running)
                with anyio.fail_after(self._timeout_s):
                    await self._serve(kind, request, head, reply)
                outcome = "ok"
            if running.cancelled_caught:
                raise unavailable("This router is shutting down; send the request again.", code="draining")
        except TimeoutError:
            outcome = "timeout"
            await self._tell(reply, self._too_late())
        except ApiError as error:
            outcome = "client_error" if error.status < 500 else "server_error"
            await self._tell(reply, error)
        finally:
            self._running.discard(running)
            self._metrics.ended(kind, outcome)

    async def _serve(self, kind: ApiKind, request: Request, head: RequestHead, reply: Reply) -> None:
        request_id = self._claim(request.request_id or head.request_id)
        explanation = Explanation(
            request_id=request_id,
            response_id=response_id(kind, request_id),
            client_request_id=head.request_id,
            api=kind,
            model=request.model,
            received_unix_ms=self._clock.unix_ns() // 1_000_000,
        )
        self._explainer.add(explanation)
        try:
            if not self._tracing.enabled:
                await self._staged(kind, request, explanation, passed_on(head.headers), None, reply)
            else:
                parent = self._tracing.extract(head.headers)
                with self._tracing.span("router", parent, kind=SpanKind.SERVER, request_id=request_id) as (_, context):
                    headers = self._tracing.headers(context)
                    await self._staged(kind, request, explanation, headers, context, reply)
            explanation.outcome = "done"
        except ApiError as error:
            explanation.outcome = error.code or "error"
            raise
        except BaseException:
            explanation.outcome = "cancelled"
            raise
        finally:
            self._ids_in_use.discard(request_id)
            explanation.total_ms = self._clock.unix_ns() / 1e6 - explanation.received_unix_ms
            self._perf.ended(explanation)

    async def _staged(
        self,
        kind: ApiKind,
        request: Request,
        explanation: Explanation,
        headers: dict[str, str],
        context: Context | None,
        reply: Reply,
    ) -> None:
        """The stages in order, each timed for metrics, explanation and trace."""
        started_ns = self._clock.unix_ns()
        async with self._admission.place():
            admitted_ns = self._clock.unix_ns()
            specs = fan_out(request)
            context_len = self._cluster.models().get(request.model, 0)
            prompts = await self._tokenizer.prompts(request, max_seq_len=context_len)
            max_tokens = [max_tokens_of(request, len(prompt.ids), context_len) for prompt in prompts]
            tokenized_ns = self._clock.unix_ns()
            matches = [await self._match(request, prompt) for prompt in prompts]
            matched_ns = self._clock.unix_ns()
            self._observe(explanation, context, (started_ns, admitted_ns, tokenized_ns, matched_ns))
            works = [
                self._work(kind, request, spec, prompts, matches, max_tokens, explanation, headers, len(specs))
                for spec in specs
            ]

            def on_first() -> None:
                first_s = (self._clock.unix_ns() - started_ns) / 1e9
                explanation.first_byte_ms = first_s * 1e3
                self._metrics.first_byte_s.observe(first_s, exemplars.current())

            await relay(works, self._dispatcher, reply, response_id=explanation.response_id, on_first=on_first)

    async def _match(self, request: Request, prompt: Prompt) -> Matches:
        matches = await self._matcher.match(request.model, prompt.ids, cache_salt=request.cache_salt)
        if matches.state == "answered":
            best = max((match.device_tokens for match in matches.by_server.values()), default=0)
            self._metrics.matched_share.observe(best / len(prompt.ids))
        return matches

    def _work(
        self,
        kind: ApiKind,
        request: Request,
        spec: SequenceSpec,
        prompts: list[Prompt],
        matches: list[Matches],
        max_tokens: list[int | None],
        explanation: Explanation,
        headers: dict[str, str],
        num_sequences: int,
    ) -> Work:
        prompt, match = prompts[spec.prompt_index], matches[spec.prompt_index]
        request_id = explanation.request_id if num_sequences == 1 else f"{explanation.request_id}-{spec.index}"
        record = SequenceExplanation(
            index=spec.index,
            prompt_tokens=len(prompt.ids),
            match_state=match.state,
            matched_tokens={name: found.device_tokens for name, found in match.by_server.items()},
        )
        explanation.sequences.append(record)
        return Work(
            kind=kind,
            request=single_request(
                request,
                spec,
                prompt_token_ids=prompt.ids.tolist(),
                max_tokens=max_tokens[spec.prompt_index],
                request_id=request_id,
            ),
            sequence=spec,
            prompt=prompt,
            matches=match,
            explanation=record,
            headers={"Content-Type": "application/json", "X-Request-Id": request_id, **headers},
            deadline=Deadline.current(self._timeout_s),
            conversation_id=conversation_of(request),
        )

    def _observe(self, explanation: Explanation, context: Context | None, times_ns: tuple[int, int, int, int]) -> None:
        started, admitted, tokenized, matched = times_ns
        explanation.queue_ms = (admitted - started) / 1e6
        explanation.tokenize_ms = (tokenized - admitted) / 1e6
        explanation.match_ms = (matched - tokenized) / 1e6
        self._metrics.queue_s.observe((admitted - started) / 1e9)
        self._metrics.tokenize_s.observe((tokenized - admitted) / 1e9)
        self._metrics.match_s.observe((matched - tokenized) / 1e9)
        if context is not None:
            self._tracing.record("queue", context, started, admitted)
            self._tracing.record("tokenize", context, admitted, tokenized)
            self._tracing.record("match", context, tokenized, matched)

    def _claim(self, wanted: str) -> str:
        """An id that no other request of this router has now: the wanted one where it is free and well-formed."""
        free = wanted and len(wanted) <= 128 and wanted.isascii() and wanted.isprintable() and " " not in wanted
        request_id = wanted if free else uuid.uuid4().hex
        if request_id in self._ids_in_use:
            request_id = f"{request_id[:100]}-{secrets.token_hex(4)}"
        self._ids_in_use.add(request_id)
        return request_id

    async def _tell(self, reply: Reply, error: ApiError) -> None:
        if not reply.started:
            raise error from None
        with anyio.move_on_after(FAREWELL_S):
            await reply.write(error_event(error))
            await reply.finish()

    def _too_late(self) -> ApiError:
        return ApiError(
            504,
            f"The request was not finished within {self._timeout_s:g} s; ask for fewer tokens or try again later.",
            type="timeout_error",
            code="request_timeout",
        )
