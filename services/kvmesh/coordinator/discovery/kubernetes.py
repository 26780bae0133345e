"""The source of the pods behind a Service: a list of its EndpointSlices, then a watch of what changes.

The API server is spoken to as any client in a pod does: its address and the ServiceAccount's token, authority and
namespace are where Kubernetes puts them. Needs ``get``, ``list`` and ``watch`` of ``endpointslices`` in the namespace.
"""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
import anyio
import msgspec

from kvmesh.config.discovery import EndpointSliceSource
from kvmesh.config.errors import ConfigError
from kvmesh.coordinator.discovery.slices import SliceStore, Status, decode_event, decode_list
from kvmesh.coordinator.discovery.source import Expected, Report
from kvmesh.net.clock import Clock
from kvmesh.net.discovery_link import Backoff
from kvmesh.net.tls import tls_problem
from kvmesh.telemetry import get_logger

__all__ = ["ApiServer", "KubernetesSource", "api_server"]

VERSIONS = ("v1", "v1beta1")
"""Of ``discovery.k8s.io``: the second is all that 1.17 to 1.20 have."""

PAGE = 500
"""Slices in one answer to a list."""

LIST_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0

WATCH_S = 60.0
"""Length of one watch, give or take a tenth, so that watchers of one cluster spread."""

SILENCE_S = 10.0
"""A watch that is over, and has not said so for this long, is on a dead connection."""

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 30.0

MAX_LINE_BYTES = 16 << 20
"""A slice has a thousand endpoints at most, some hundreds of bytes each."""

_GONE = 410

_log = get_logger("coordinator.discovery")


class ApiServer(NamedTuple):
    """Where the API server is, and how to show who asks."""

    url: str
    token_file: str
    ca_file: str
    namespace: str


class _GoneError(Exception):
    """The resource version is too old: list anew."""


class _ApiError(Exception):
    """The API server refuses; the argument says what and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def api_server(settings: EndpointSliceSource) -> ApiServer:
    """The API server of the cluster that this process is a pod of, unless the settings say otherwise.

    Raises:
        ConfigError: there is none.
    """
    url = settings.api_url
    if url is None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "discovery: an endpointslice source works in a pod of Kubernetes; elsewhere, state api_url, "
                "token_file, api_ca_file and namespace"
            )
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    namespace = settings.namespace
    if namespace is None:
        file = Path(settings.token_file).with_name("namespace")
        try:
            namespace = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"discovery: state the namespace of {settings.service}: {file} is not there") from error
    return ApiServer(url, settings.token_file, settings.api_ca_file, namespace)


class KubernetesSource:
    """The EndpointSlices of one Service.

    While the API server does not answer, what was found stays.

    Args:
        service: its name.
        server: the API server.
        port: name or number of the port.
        scheme: of the servers' URLs.
        expected: of the servers.
        clock: of waits between attempts.
    """

    def __init__(
        self, service: str, server: ApiServer, port: str, scheme: str, expected: Expected, *, clock: Clock
    ) -> None:
        self.name = f"endpointslice:{service}"
        self.expected = expected
        self._service = service
        self._server = server
        self._port = port
        self._clock = clock
        self._store = SliceStore(port, scheme)
        self._version = VERSIONS[0]
        self._errors = self._lists = self._watches = 0
        self._failing = False

    async def run(self, report: Report) -> None:
        """See :meth:`kvmesh.coordinator.discovery.source.Source.run`."""
        backoff = Backoff(first_s=FIRST_RETRY_S, most_s=MAX_RETRY_S)
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list(report)
                    backoff.reset()
                version = await self._watch(version, report)
                backoff.reset()
            except _GoneError:
                version = ""
                await self._clock.sleep(random.uniform(0.0, FIRST_RETRY_S))
            except (_ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.DecodeError) as error:
                self._failed(error)
                if isinstance(error, (_ApiError, ValueError, msgspec.DecodeError)):
                    version = ""  # what was missed cannot be known
                await self._clock.sleep(backoff.next_s())

    def statistics(self) -> dict[str, float]:
        """See :meth:`kvmesh.coordinator.discovery.source.Source.statistics`; lists and watches, too."""
        return {"errors_total": self._errors, "lists_total": self._lists, "watches_total": self._watches}

    async def _list(self, report: Report) -> str:
        """Read all slices; gives the resource version that they are of."""
        self._lists += 1
        slices, more = [], ""
        while True:
            query = {"limit": str(PAGE), **({"continue": more} if more else {})}
            async with self._get(query, LIST_TIMEOUT_S, LIST_TIMEOUT_S) as response:
                page = decode_list(await response.read())
            slices += page.items or []
            more = page.metadata.more
            if not more:
                break
        self._store.replace(slices)
        if slices and (ports := self._store.ports()) and not self._store.urls() and self._port not in ports:
            _log.warning("the service has no such port", service=self._service, port=self._port, has=sorted(ports))
        report(self._store.urls())
        return page.metadata.resource_version

    async def _watch(self, version: str, report: Report) -> str:
        """Follow the changes after a resource version; gives the last one seen when the watch has ended."""
        self._watches += 1
        length_s = round(WATCH_S * random.uniform(0.9, 1.1))
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(length_s),
        }
        async with self._get(query, length_s + SILENCE_S, length_s + SILENCE_S) as response:
            async for line in _lines(response):
                kind, changed = decode_event(line)
                if isinstance(changed, Status):
                    if changed.code == _GONE:
                        raise _GoneError
                    raise _ApiError(changed.code, changed.message)
                version = changed.metadata.resource_version or version
                if kind != "BOOKMARK":
                    self._store.apply(kind, changed)
                    report(self._store.urls())
        return version

    @asynccontextmanager
    async def _get(
        self, query: dict[str, str], total_s: float, silence_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; the token and the authority are read anew, since both are replaced now and then."""
        server = self._server
        selector = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        headers = {"Accept": "application/json"}
        if token := await anyio.to_thread.run_sync(_read_token, server.token_file):
            headers["Authorization"] = f"Bearer {token}"
        context = await anyio.to_thread.run_sync(_authority, server.ca_file) if _is_https(server.url) else True
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            for candidate in (self._version, *(other for other in VERSIONS if other != self._version)):
                path = f"/apis/discovery.k8s.io/{candidate}/namespaces/{quote(server.namespace)}/endpointslices"
                async with session.get(f"{server.url}{path}?{urlencode({**selector, **query})}") as response:
                    if response.status == 404:
                        continue  # the API server does not have this version
                    if response.status == _GONE:
                        raise _GoneError
                    if response.status != 200:
                        raise _ApiError(response.status, await _refusal(response))
                    self._version = candidate
                    self._well()
                    yield response
                    return
        raise _ApiError(404, "the API server has no EndpointSlices (discovery.k8s.io/v1 or v1beta1)")

    def _well(self) -> None:
        if self._failing:
            _log.info("the API server answers again", service=self._service)
        self._failing = False

    def _failed(self, error: Exception) -> None:
        self._errors += 1
        if self._failing:
            return
        self._failing = True
        reason = tls_problem(error) or str(error) or type(error).__name__
        if isinstance(error, _ApiError) and error.status in (401, 403):
            reason += f"; the ServiceAccount needs get, list and watch of endpointslices in {self._server.namespace}"
        _log.warning(
            "EndpointSlices cannot be read; what was found stays",
            service=self._service,
            url=self._server.url,
            error=reason,
        )


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a body as they come; the library's own have a length that a large slice exceeds."""
    rest = b""
    while data := await response.content.readany():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of a watch is over {MAX_LINE_BYTES} bytes")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    data = await response.content.read(65_536)
    try:
        said = msgspec.json.decode(data, type=Status).message
    except msgspec.DecodeError:
        said = data[:200].decode(errors="replace")
    return f"{response.status}: {said}"


def _read_token(path: str) -> str:
    """The token; empty where there is no such file, as outside a cluster."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _authority(path: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=path if Path(path).exists() else None)


def _is_https(url: str) -> bool:
    return url.startswith("https:")
