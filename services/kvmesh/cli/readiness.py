"""When is a mesh up: every worker is a member, and the router can serve. Then it answers its first question."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from kvmesh.cli.errors import UserError
from kvmesh.cli.openai_stream import StreamTimes, stream
from kvmesh.cli.plan import MeshPlan
from kvmesh.cli.rundir import FirstAnswer
from kvmesh.cli.served import served_model
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import MemberList

__all__ = ["Waiting", "ask_first_question", "wait_until_ready", "why_not_ready"]

POLL_S = 0.1
FIRST_QUESTION = "What is the capital of France?"
FIRST_ANSWER_TOKENS = 32
WARM_UP = "Hello!"
WARM_UP_TOKENS = 2
FIRST_ANSWER_TIMEOUT_S = 60.0


class Waiting:
    """What a mesh still waits for.

    Attributes:
        plan: of the mesh.
        headers: such as an API key.
        tls: whom to trust behind ``https://``.
        missing: what has not come up yet, by name; the router comes last.
    """

    def __init__(self, plan: MeshPlan, headers: dict[str, str] | None = None, tls: Tls | None = None) -> None:
        self.plan = plan
        self.headers = headers
        self.tls = tls
        self.missing = {"coordinator", "indexer", *plan.worker_names, "router"}


async def wait_until_ready(waiting: Waiting, on_up: Callable[[str], None]) -> None:
    """Return when all services answer and every worker has registered; the caller bounds the wait.

    Args:
        waiting: for what; kept up to date.
        on_up: told each name as it comes up.
    """
    plan, missing = waiting.plan, waiting.missing
    async with HttpClient(timeout_s=2.0, headers=waiting.headers, tls=waiting.tls) as http:
        while missing - {"router"}:
            found = await _registered(http, plan.coordinator_url)
            if "indexer" in missing and await _answers(http, f"{plan.indexer_url}/health"):
                found.append("indexer")
            for name in found:
                if name in missing:
                    missing.discard(name)
                    on_up(name)
            await anyio.sleep(POLL_S)
        # Another process has no event to wait for.
        while not await _answers(http, f"{plan.url}/ready"):  # noqa: ASYNC110
            await anyio.sleep(POLL_S)
        missing.discard("router")
        on_up("router")


async def why_not_ready(waiting: Waiting) -> str:
    """After the wait: what is missing, or the router's own reason; empty when nothing is."""
    if others := sorted(waiting.missing - {"router"}):
        return f"{', '.join(others)} did not come up"
    if not waiting.missing:
        return ""
    async with HttpClient(timeout_s=2.0, headers=waiting.headers, tls=waiting.tls) as http:
        try:
            async with http.open("GET", f"{waiting.plan.url}/ready"):
                return ""  # it has come up just now
        except ApiError as error:
            return f"all have come up, but {error.message}"
        except PeerUnreachableError:
            return "the router did not come up"


async def _registered(http: HttpClient, coordinator_url: str) -> list[str]:
    """The coordinator and its members, if it answers."""
    try:
        members = await http.call("GET", f"{coordinator_url}/members", MemberList)
    except (PeerUnreachableError, ApiError):
        return []
    return ["coordinator", *(member.instance_id for member in members.members)]


async def ask_first_question(
    url: str, headers: dict[str, str] | None = None, tls: Tls | None = None
) -> tuple[str, FirstAnswer]:
    """Have the whole path answer once.

    Returns:
        The name under which the model is served, and the answer.

    Raises:
        PeerUnreachableError: the router broke off.
        ApiError: it refused, or the answer was cut off.
        UserError: no model is served, or the servers have no room for the question.
    """
    model = await served_model(url, headers, tls=tls)
    try:
        return await _first_answer(url, model, headers, tls)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        raise UserError(
            f"the first question does not fit into the servers: {error.message} Raise what limits them: "
            "kv_cache_config.max_tokens, kv_cache_config.max_gpu_total_bytes, device_memory_bytes or max_seq_len"
        ) from error


async def _first_answer(
    url: str, model: str, headers: dict[str, str] | None, tls: Tls | None
) -> tuple[str, FirstAnswer]:
    async with HttpClient(timeout_s=10.0, headers=headers, tls=tls) as http:
        # What each process loads at its first request is not what people wait for later. Another text: the cache must
        # not flatter the figures.
        await _ask(http, url, model, WARM_UP, WARM_UP_TOKENS, StreamTimes())
        times = StreamTimes()
        text = await _ask(http, url, model, FIRST_QUESTION, FIRST_ANSWER_TOKENS, times)
    if not times.complete:
        raise ApiError(502, times.error or "the answer was cut off", type="server_error")
    return model, FirstAnswer(
        question=FIRST_QUESTION,
        answer=text.strip(),
        ttft_ms=round(times.ttft_s * 1e3, 1),
        tpot_ms=round(times.tpot_s * 1e3, 1),
        tokens=times.completion_tokens,
    )


async def _ask(http: HttpClient, url: str, model: str, question: str, max_tokens: int, times: StreamTimes) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    pieces = stream(http, f"{url}/v1/chat/completions", body, times, timeout_s=FIRST_ANSWER_TIMEOUT_S)
    return "".join([piece async for piece in pieces])


async def _answers(http: HttpClient, url: str) -> bool:
    try:
        async with http.open("GET", url):
            return True
    except (PeerUnreachableError, ApiError):
        return False
