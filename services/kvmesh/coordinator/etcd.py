"""etcd through the JSON gateway of its v3 API: the few calls that a coordinator needs, each with a bounded time."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import anyio
import msgspec
from aiohttp import ClientError

from kvmesh.config.errors import ConfigError
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.private_files import warn_if_public
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.telemetry import get_logger

__all__ = ["EtcdClient", "EtcdError", "EtcdUser", "Guard", "KeyValue"]

T = TypeVar("T")

PAGE_KEYS = 1000
"""Keys read in one answer."""

_LEASE_NOT_FOUND = 404
_UNAUTHORIZED = 401

_WHO_IS_THIS = ("user name is empty", "invalid auth token", "revision of auth store is old")
"""What etcd says to a request without a token, or with one that it knows no more: it has been started again, roles
have changed, or nobody has asked for five minutes."""

_log = get_logger("coordinator.etcd")


class EtcdError(ConnectionError):
    """No endpoint answered in time, or etcd refused; the state that it holds is as it was, or as it was asked to be."""


class KeyValue(NamedTuple):
    """One key as etcd holds it."""

    value: bytes
    mod_revision: int
    """The revision of its last change; grows with every change of anything in the store."""
    read_revision: int
    """The revision of the store that it was read in."""


class Guard(NamedTuple):
    """What must hold for a change to be made: ``key`` was last changed in ``mod_revision`` (0: it does not exist)."""

    key: str
    mod_revision: int


_COMMON_NAME = "CommonName of client sending a request against gateway"
"""What etcd says, once authentication is on, of certificates that could be taken for a user's."""


class EtcdUser(NamedTuple):
    """Who asks, where etcd's authentication is on."""

    name: str
    password_file: Path

    def password(self) -> str:
        """As it is in the file now.

        Raises:
            ConfigError: the file cannot be read, or is empty.
        """
        try:
            found = self.password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"etcd_password_file {self.password_file} cannot be read: {reason}") from error
        if not found:
            raise ConfigError(f"etcd_password_file {self.password_file} is empty")
        return found


class _Header(msgspec.Struct):
    revision: int = 0
    cluster_id: int = 0


class _Pair(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0


class _Range(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    kvs: list[_Pair] = []
    more: bool = False


class _Committed(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    succeeded: bool = False


class _Lease(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    ID: int = 0
    TTL: int = 0


class _KeptAlive(msgspec.Struct):
    result: _Lease = msgspec.field(default_factory=_Lease)


class _Authenticated(msgspec.Struct):
    token: str = ""


class _Watched(msgspec.Struct):
    events: list[dict[str, Any]] = []
    canceled: bool = False
    compact_revision: int = 0


class _WatchLine(msgspec.Struct):
    result: _Watched = msgspec.field(default_factory=_Watched)


class EtcdClient:
    """A client of one etcd cluster; use as an async context manager.

    Every call asks the endpoint that answered last, then each of the others once. Endpoints that turn out to be of
    different clusters are an error: which of them answers would decide who leads.

    Args:
        endpoints: base URLs of the cluster's members.
        timeout_s: bound of one exchange with one endpoint.
        tls: whom to trust behind ``https://`` and what to present.
        user: whose token requests carry, once etcd has asked for one.
    """

    def __init__(
        self, endpoints: Sequence[str], *, timeout_s: float = 2.0, tls: Tls | None = None, user: EtcdUser | None = None
    ) -> None:
        if not endpoints:
            raise ValueError("at least one etcd endpoint is needed")
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._timeout_s = timeout_s
        self._http = HttpClient(timeout_s=timeout_s, tls=tls)
        self._user = user
        self._authorization: dict[str, str] = {}
        if user is not None:
            warn_if_public("etcd_password_file", user.password_file)
        self._current = 0
        self._cluster = 0
        """Id of the cluster, once it is known; of one endpoint alone it does not matter."""

    async def __aenter__(self) -> Self:
        """Open the pool of connections."""
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self._http.__aexit__(exc_type, exc, traceback)

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked first."""
        return self._endpoints[self._current]

    async def get(self, key: str) -> KeyValue | None:
        """One key, or None where there is none.

        Raises:
            EtcdError: no answer.
        """
        page = await self._call("/v3/kv/range", {"key": _coded(key)}, _Range)
        found = page.kvs[0] if page.kvs else None
        return KeyValue(found.value, found.mod_revision, page.header.revision) if found else None

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """All keys that begin with ``prefix``, without it, and their values.

        Raises:
            EtcdError: no answer.
        """
        found: dict[str, bytes] = {}
        start, end = prefix.encode(), _after(prefix.encode())
        while True:
            page = await self._call(
                "/v3/kv/range",
                {"key": _coded(start), "range_end": _coded(end), "limit": PAGE_KEYS},
                _Range,
            )
            for pair in page.kvs:
                found[pair.key.decode(errors="replace").removeprefix(prefix)] = pair.value
            if not page.more or not page.kvs:
                return found
            start = page.kvs[-1].key + b"\0"

    async def commit(
        self, guard: Guard, puts: Mapping[str, bytes], deletes: Iterable[str] = (), *, lease: int = 0
    ) -> int | None:
        """Make all changes at once if ``guard`` holds.

        Args:
            guard: what must hold.
            puts: keys to set.
            deletes: keys to remove; none of them is in ``puts``.
            lease: the lease that the set keys are bound to; 0 for none.

        Returns:
            The revision of the changes, or None when the guard did not hold and nothing was changed.

        Raises:
            EtcdError: no answer; the changes may or may not have been made.
        """
        changes: list[dict[str, Any]] = [
            {"request_put": {"key": _coded(key), "value": _coded(value), "lease": lease}} for key, value in puts.items()
        ]
        changes += [{"request_delete_range": {"key": _coded(key)}} for key in deletes]
        compare = {
            "key": _coded(guard.key),
            "target": "MOD",
            "mod_revision": guard.mod_revision,
            "result": "EQUAL",
        }
        done = await self._call("/v3/kv/txn", {"compare": [compare], "success": changes}, _Committed)
        return done.header.revision if done.succeeded else None

    async def grant(self, ttl_s: int) -> int:
        """A new lease, gone ``ttl_s`` seconds after it was last kept alive.

        Raises:
            EtcdError: no answer.
        """
        return (await self._call("/v3/lease/grant", {"TTL": ttl_s}, _Lease)).ID

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; whether there still is one.

        Raises:
            EtcdError: no answer.
        """
        return (await self._call("/v3/lease/keepalive", {"ID": lease}, _KeptAlive)).result.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it the keys bound to it.

        Raises:
            EtcdError: no answer.
        """
        await self._call("/v3/lease/revoke", {"ID": lease}, dict, accept=_LEASE_NOT_FOUND)

    async def wait_change(self, key: str, after_revision: int, timeout_s: float) -> bool:
        """Wait for a change of ``key`` after a revision, for at most ``timeout_s``; whether there may have been one.

        Give the revision of the store that the key was read in: that of the key's last change may have been compacted.

        Raises:
            EtcdError: no answer, or the watch was ended.
        """
        question = {"create_request": {"key": _coded(key), "start_revision": after_revision + 1}}
        url = f"{self.endpoint}/v3/watch"
        with anyio.move_on_after(timeout_s):
            try:
                headers, bound_s = self._authorization, timeout_s + 1.0
                async with self._http.open("POST", url, body=question, timeout_s=bound_s, headers=headers) as response:
                    async for line in response.content:
                        watched = msgspec.json.decode(line, type=_WatchLine, strict=False).result
                        if watched.events:
                            return True
                        if watched.compact_revision > after_revision:
                            return True  # what happened since is known no more
                        if watched.canceled:
                            raise EtcdError(f"{url} ended a watch")
            except (PeerUnreachableError, ApiError, msgspec.DecodeError, ClientError, OSError) as error:
                self._next()
                raise EtcdError(f"{url}: {error}") from error
            raise EtcdError(f"{url} ended a watch")
        return False

    async def _call(self, path: str, body: dict[str, Any], reply: type[T], *, accept: int | None = None) -> T:
        failure: Exception | None = None
        refusal: ApiError | None = None
        strangers: list[int] = []
        if not self._cluster and len(self._endpoints) > 1:
            self._cluster = await self._ask_cluster()
        for _ in self._endpoints:
            try:
                answer = await self._post(self.endpoint, path, body, reply)
                cluster = _cluster_of(answer)
                if not (self._cluster and cluster) or cluster == self._cluster:
                    return answer
                strangers.append(cluster)
                failure = EtcdError(f"{self.endpoint} is of another cluster ({cluster:x}) than before")
            except ApiError as error:
                if error.status == accept:
                    return reply()
                refusal = error
            except _FAILURES as error:
                failure = error
            self._next()
        if len(strangers) == len(self._endpoints) and len(set(strangers)) == 1:
            _log.warning("etcd is another cluster now", cluster=f"{strangers[0]:x}")
            self._cluster = strangers[0]
        if refusal is not None:
            remedy = "; present a certificate without a common name" if _COMMON_NAME in refusal.message else ""
            raise EtcdError(f"etcd refuses: {refusal}{remedy}") from refusal
        raise EtcdError(f"etcd_endpoints: {failure}") from failure

    async def _post(self, endpoint: str, path: str, body: dict[str, Any], reply: type[T]) -> T:
        """One exchange; a second one with a new token where etcd asks who this is.

        Raises:
            ApiError: etcd refuses.
            ConfigError: there is no password to be read.
        """
        try:
            return await self._exchange(endpoint, path, body, reply)
        except ApiError as error:
            if self._user is None or not _asks_who(error):
                raise
        question = {"name": self._user.name, "password": self._user.password()}
        self._authorization = {}
        token = (await self._exchange(endpoint, "/v3/auth/authenticate", question, _Authenticated)).token
        self._authorization = {"Authorization": token}
        return await self._exchange(endpoint, path, body, reply)

    async def _exchange(self, endpoint: str, path: str, body: dict[str, Any], reply: type[T]) -> T:
        async with self._http.open("POST", endpoint + path, body=body, headers=self._authorization) as response:
            return msgspec.json.decode(await response.read(), type=reply, strict=False)

    async def _ask_cluster(self) -> int:
        """The id of the cluster that all endpoints which answer are of; 0 where none does.

        Raises:
            EtcdError: they are of different clusters.
        """
        found: dict[str, int] = {}
        question = {"key": _coded("/kvmesh/"), "serializable": True, "count_only": True}

        async def ask(endpoint: str) -> None:
            try:
                answer = await self._post(endpoint, "/v3/kv/range", question, _Range)
            except (ApiError, *_FAILURES):
                return
            found[endpoint] = answer.header.cluster_id

        async with anyio.create_task_group() as tasks:
            for endpoint in self._endpoints:
                tasks.start_soon(ask, endpoint)
        clusters = set(found.values()) - {0}
        if len(clusters) > 1:
            told = ", ".join(f"{endpoint} of {cluster:x}" for endpoint, cluster in sorted(found.items()))
            raise EtcdError(f"the endpoints are of different clusters: {told}")
        return clusters.pop() if clusters else 0

    def _next(self) -> None:
        self._current = (self._current + 1) % len(self._endpoints)


_FAILURES = (PeerUnreachableError, msgspec.DecodeError, ClientError, TimeoutError, OSError, ConfigError)
"""Of one exchange, but for refusals; a password that cannot be read just now among them."""


def _asks_who(error: ApiError) -> bool:
    return error.status == _UNAUTHORIZED or any(text in error.message for text in _WHO_IS_THIS)


def _cluster_of(answer: object) -> int:
    header = getattr(getattr(answer, "result", answer), "header", None)
    return header.cluster_id if isinstance(header, _Header) else 0


def _coded(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _after(prefix: bytes) -> bytes:
    """The first key that does not begin with ``prefix``; etcd takes a zero byte for "no end"."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
