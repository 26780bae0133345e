"""What a server's refusal means: for its breaker, for another try, and for the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio
import msgspec
import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.router.breaker import FAILURES_TO_OPEN
from kvmesh.router.cluster import Cluster
from kvmesh.router.dialects.base import Outgoing
from kvmesh.router.legs import LegFailure, Legs, failure_of
from kvmesh.router.loads import Loads


class Refusal:
    """The answer to every request, and the upstream that gives it."""

    retry_after_s = None

    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self._body = msgspec.json.encode(ApiError(status, "words", code=code).body())

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Refusal:
        return self

    async def read(self) -> bytes:
        return self._body

    async def next_chunk(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "code", "sick"),
    [(500, "model_error", False), (400, "sampling_failed", False), (500, "internal_error", True)],
)
def test_only_a_server_s_own_failures_open_its_breaker(
    cluster: Cluster, join: Callable[..., None], status: int, code: str, sick: bool
) -> None:
    join("one", "both")
    [server] = cluster.servers()
    legs = Legs(Refusal(status, code), Loads())

    async def fail() -> None:
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(LegFailure):
                await legs.whole(server, Outgoing("/v1/completions", b"{}"), {}, tokens=1)

    anyio.run(fail)
    assert server.breaker.closed is not sick


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(("status", "code"), [(500, "model_error"), (400, "sampling_failed")])
def test_a_request_s_own_failure_is_told_as_it_is_and_not_tried_elsewhere(status: int, code: str, second: bool) -> None:
    error = ApiError(status, "words", code=code)
    failure = failure_of("one", error, second=second)
    assert not failure.retryable
    assert failure.error is error
    assert failure.error.status == status


def test_what_another_server_may_do_better_is_tried_there() -> None:
    for status in (429, 500, 502, 503):
        assert failure_of("one", ApiError(status, "words", code="another"), second=False).retryable
    refused = failure_of("one", ApiError(400, "words", code="ticket_mismatch"), second=True)
    assert (refused.error.status, refused.retryable) == (502, True)
