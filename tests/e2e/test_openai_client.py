"""The official OpenAI client against a whole mesh."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from meshes.by_hand import Mesh
from meshes.process import request
from observability_files import metric_names, panel_queries, rule_queries
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

MODEL = DEFAULT_MODEL
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The three primary colours are"
Client = openai.AsyncOpenAI


async def test_models(client: Client) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_chat(client: Client) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    [choice] = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_stream_is_the_whole_answer(client: Client) -> None:
    common: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**common)
    stream = await client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    *chunks, counted = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert counted.choices == []
    assert counted.usage is not None
    assert whole.usage is not None
    assert counted.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in [*chunks, counted]}) == 1


async def test_text_that_takes_several_tokens_a_character(client: Client) -> None:
    prompt = "Repeat after me: \N{GRINNING FACE}\N{GRINNING FACE}\N{GRINNING FACE}\N{GRINNING FACE}"
    common: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24}
    whole = await client.completions.create(**common)
    stream = await client.completions.create(**common, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_of_both_legs(client: Client, stream: bool) -> None:
    """The first token is the context server's, the others are the generation server's; all have their logprobs."""
    common: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 5}
    common |= {"logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**common, stream=True)]
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        [choice] = (await client.chat.completions.create(**common)).choices
        assert choice.logprobs is not None
        entries, text = choice.logprobs.content or [], choice.message.content or ""
    assert len(entries) == 5
    assert "".join(entry.token for entry in entries) == text
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0, "greedy takes the most likely token"
        assert entry.token == entry.top_logprobs[0].token
        assert bytes(entry.bytes or []).decode() == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


async def test_logprobs_of_completions(client: Client) -> None:
    answer = await client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 4
    for value, top in zip(logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
        assert value is not None
        assert value == max(top.values())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_two_choices_of_one_prompt(client: Client, stream: bool) -> None:
    common: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 1.0, "seed": 5, "max_tokens": 12, "n": 2}
    answer = await client.completions.create(**common)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] != texts[1], "each choice has a seed of its own"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24
    if stream:
        streamed = ["", ""]
        finish = set()
        async for chunk in await client.completions.create(**common, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
                if choice.finish_reason:
                    finish.add(choice.index)
        assert streamed == texts
        assert finish == {0, 1}


async def test_batch_of_prompts(client: Client) -> None:
    prompts = ["One, two,", "Monday, Tuesday,"]
    together = await client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=6)
    alone = [await client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=6) for p in prompts]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_stop_string(client: Client, stream: bool) -> None:
    common: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 40}
    unstopped = (await client.completions.create(**common)).choices[0].text
    stop = unstopped[9:12]
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(**common, stop=[stop], stream=True)]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        [choice] = (await client.completions.create(**common, stop=[stop])).choices
        text, finish = choice.text, choice.finish_reason
    assert text == unstopped[: unstopped.index(stop)]
    assert finish == "stop"


async def test_stop_string_in_the_first_token(client: Client, mesh: Mesh) -> None:
    """The context server itself ends the answer; its pages are not kept for anybody."""
    common: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 8}
    first = (await client.completions.create(**{**common, "max_tokens": 1})).choices[0].text
    calls = generation_calls(mesh)
    [choice] = (await client.completions.create(**common, stop=[first])).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    assert generation_calls(mesh) == calls
    mesh.wait_idle()


async def test_seed_reproduces(client: Client) -> None:
    common: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1.2, "top_p": 0.95, "max_tokens": 16}

    async def ask(seed: int | None) -> str:
        return (await client.chat.completions.create(**common, seed=seed)).choices[0].message.content or ""

    assert await ask(7) == await ask(7)
    assert len({await ask(seed) for seed in (1, 2, 3)}) > 1
    assert len({await ask(None) for _ in range(3)}) > 1


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_exact_counts(client: Client, mesh: Mesh, count: int, stream: bool) -> None:
    calls = generation_calls(mesh)
    common: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": count}
    common["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    if stream:
        options = {"include_usage": True}
        raw = await client.completions.create(**common, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in raw]
        tokens = [token for chunk in chunks for token in (chunk.choices[0].model_extra or {}).get("token_ids") or []]
        usage, finish = last.usage, chunks[-1].choices[0].finish_reason
    else:
        answer = await client.completions.create(**common)
        tokens = (answer.choices[0].model_extra or {})["token_ids"]
        usage, finish = answer.usage, answer.choices[0].finish_reason
    assert len(tokens) == count
    assert usage is not None
    assert usage.completion_tokens == count
    assert finish == "length"
    assert generation_calls(mesh) - calls == (0 if count == 1 else 1), "one token is the context server's alone"


BAD: dict[str, tuple[str, dict[str, Any], type[openai.APIStatusError]]] = {
    "unknown model": ("chat", {"model": "no-such-model"}, openai.NotFoundError),
    "context too long": ("completions", {"prompt": [5] * 9000}, openai.BadRequestError),
    "asks for too many tokens": ("completions", {"max_tokens": 100_000}, openai.BadRequestError),
    "wrong type": ("chat", {"temperature": "hot"}, openai.BadRequestError),
    "out of range": ("chat", {"temperature": -1}, openai.BadRequestError),
    "empty prompt": ("completions", {"prompt": []}, openai.BadRequestError),
    "token out of range": ("completions", {"prompt": [1, 10**7]}, openai.BadRequestError),
    "tools": ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
    "response_format": ("chat", {"response_format": {"type": "json_object"}}, openai.BadRequestError),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors(client: Client, name: str, stream: bool) -> None:
    kind, bad, error = BAD[name]
    asked: Any = {"model": MODEL, "stream": stream, "messages": QUESTION, **bad}
    create: Any = client.chat.completions.create
    if kind == "completions":
        asked = {"model": MODEL, "stream": stream, "prompt": PROMPT, **bad}
        create = client.completions.create
    with pytest.raises(error) as caught:
        await create(**asked)
    body = caught.value.body
    assert isinstance(body, dict), "the client found OpenAI's error object"
    assert isinstance(body["message"], str)
    assert body["message"]
    assert body["type"]
    assert {"code", "param"} <= set(body)


def test_bad_json(mesh: Mesh) -> None:
    for text in (b"{", b"[]", b"\xff\xfe", b""):
        status, body = request(f"{mesh['router'].url}/v1/chat/completions", text)
        assert status == 400
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}


def test_metrics_of_dashboards_and_alerts_exist(mesh: Mesh) -> None:
    """Every page is strict OpenMetrics, and together they have what panels and rules ask for."""
    exposed: set[str] = set()
    for process in mesh.processes.values():
        page = request(f"{process.url}/metrics", headers={"Accept": "application/openmetrics-text"})[1].decode()
        for family in text_string_to_metric_families(page):  # type: ignore[no-untyped-call]
            # With those of a histogram that has not been observed, or a label that has not come up, yet.
            exposed |= (
                {f"{family.name}_{end}" for end in ("bucket", "count", "sum")} if family.type == "histogram" else set()
            )
            exposed |= {f"{family.name}_total"} if family.type == "counter" else {family.name}
    queries = [query for _, query in panel_queries()] + rule_queries()
    missing = set().union(*map(metric_names, queries)) - exposed
    # Of coordinators with etcd, of TLS, and of an indexer that writes snapshots.
    assert missing <= {
        "kvmesh_coordinator_leading",
        "kvmesh_coordinator_etcd_connected",
        "kvmesh_indexer_snapshot_failures_total",
        "kvmesh_tls_certificate_not_after_seconds",
        "kvmesh_tls_reload_failures_total",
    }


async def test_mesh_is_left_whole(client: Client, mesh: Mesh) -> None:
    """After all of the above nothing is lent out."""
    await client.completions.create(model=MODEL, prompt="Done", max_tokens=1)
    mesh.wait_idle()


def generation_calls(mesh: Mesh) -> float:
    """Completion requests that the generation server has answered."""
    return sum(
        value
        for name, value in mesh["generation"].metrics().items()
        if name.startswith("kvmesh_http_requests_total") and "completions" in name
    )
