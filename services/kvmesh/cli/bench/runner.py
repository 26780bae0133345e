"""Sends the requests of a workload and measures each: open loop (a rate) or closed loop (a concurrency)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import anyio
import msgspec

from kvmesh.cli.bench.summary import RequestRecord
from kvmesh.cli.bench.workload import SAMPLE_TEXT, RequestSpec
from kvmesh.cli.errors import UserError
from kvmesh.cli.openai_stream import StreamTimes, stream
from kvmesh.cli.reach import explained
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError

__all__ = ["Load", "Runner", "read_vocabulary"]

PAUSE_AFTER_FAILURE_S = 0.5
"""A client of the closed loop that was refused does not spend the whole run on being refused again."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Load(NamedTuple):
    """What is sent.

    ``arrivals_s`` given: each request starts at its time, whatever became of those before. None: ``concurrency``
    clients each send the next one when theirs is answered.
    """

    requests: Iterable[RequestSpec]
    arrivals_s: Iterable[float] | None
    concurrency: int
    steady: tuple[Iterator[RequestSpec], ...] = ()
    """Clients beside the load that send one request after another until the load is over."""


class Runner:
    """One run.

    Args:
        url: base URL of an OpenAI-compatible server.
        model: its name for the model.
        headers: such as an API key.
        request_timeout_s: bound of one request.
        on_progress: told the number of ended requests.
    """

    def __init__(
        self,
        url: str,
        model: str,
        headers: dict[str, str],
        request_timeout_s: float,
        on_progress: Callable[[int], None] = lambda _: None,
        tls: Tls | None = None,
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._headers = headers
        self._timeout_s = request_timeout_s
        self._on_progress = on_progress
        self._tls = tls
        self._records: list[RequestRecord] = []
        self._begin_s = 0.0

    async def run(self, load: Load, limit_s: float) -> tuple[list[RequestRecord], float]:
        """Send everything, for at most ``limit_s``.

        Returns:
            The records, and how long it took in seconds.
        """
        self._begin_s = time.perf_counter()
        async with HttpClient(headers=self._headers, tls=self._tls) as http:
            with anyio.move_on_after(limit_s):
                async with anyio.create_task_group() as steady:
                    for specs in load.steady:
                        steady.start_soon(self._one_after_another, http, specs)
                    if load.arrivals_s is None:
                        await self._closed_loop(http, iter(load.requests), load.concurrency)
                    else:
                        await self._open_loop(http, zip(load.arrivals_s, load.requests, strict=False))
                    steady.cancel_scope.cancel()
        return self._records, time.perf_counter() - self._begin_s

    async def _open_loop(self, http: HttpClient, timed: Iterable[tuple[float, RequestSpec]]) -> None:
        async with anyio.create_task_group() as tasks:
            for at_s, spec in timed:
                await anyio.sleep(max(0.0, self._begin_s + at_s - time.perf_counter()))
                tasks.start_soon(self._send, http, spec)

    async def _closed_loop(self, http: HttpClient, specs: Iterator[RequestSpec], concurrency: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(self._one_after_another, http, specs)

    async def _one_after_another(self, http: HttpClient, specs: Iterator[RequestSpec]) -> None:
        for spec in specs:
            if not await self._send(http, spec):
                await anyio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _send(self, http: HttpClient, spec: RequestSpec) -> bool:
        """Send one request and record it; whether it went well."""
        body = {
            "model": self._model,
            "prompt": spec.prompt_token_ids,
            "max_tokens": spec.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        times = StreamTimes()
        outcome = "unfinished"
        try:
            async for _ in stream(http, self._url, body, times, timeout_s=self._timeout_s):
                pass
            outcome = "ok" if times.complete else times.error or "cut off"
        except ApiError as error:
            outcome = f"{error.status} {error.code or error.type}"
        except PeerUnreachableError as error:
            outcome = "unreachable" if not times.arrivals_s else f"broke off: {error}"
        finally:
            self._records.append(_record(spec, times, outcome, self._begin_s))
            self._on_progress(len(self._records))
        return outcome == "ok"


def _record(spec: RequestSpec, times: StreamTimes, outcome: str, begin_s: float) -> RequestRecord:
    pieces = len(times.arrivals_s)
    return RequestRecord(
        group=spec.group,
        started_s=times.started_s - begin_s,
        duration_s=time.perf_counter() - times.started_s,
        ttft_s=times.ttft_s if pieces else None,
        tpot_s=times.tpot_s if pieces > 1 else None,
        gaps_s=times.gaps_s,
        prompt_tokens=times.prompt_tokens,
        cached_tokens=times.cached_tokens,
        completion_tokens=times.completion_tokens or pieces,
        outcome=outcome,
    )


async def read_vocabulary(
    url: str, model: str, headers: dict[str, str], given: bool = False, tls: Tls | None = None
) -> list[int]:
    """Token ids of ordinary words, asked of the server's ``/tokenize``.

    Raises:
        UserError: it has none.
    """
    async with HttpClient(timeout_s=10.0, headers=headers, tls=tls) as http:
        try:
            reply = await http.call("POST", f"{url}/tokenize", _Tokens, body={"model": model, "prompt": SAMPLE_TEXT})
        except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
            reason = await explained(http, error, url, wanted="router", given=given)
            raise UserError(f"cannot make prompts: {reason}") from error
    return list(itertools.chain(dict.fromkeys(reply.tokens)))
