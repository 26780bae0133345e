"""The official OpenAI client against the router, with fake workers over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT_TOKENS = len("<user>hello<assistant>")


async def test_chat(mesh: Callable[..., Any]) -> None:
    async with mesh() as m:
        answer = await m.openai.chat.completions.create(model="fake-model", messages=MESSAGES, max_tokens=4)
        assert answer.choices[0].message.content == "abcd"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == PROMPT_TOKENS
        assert answer.usage.completion_tokens == 4
        assert answer.usage.prompt_tokens_details.cached_tokens == 9, "the context server's truth"
        assert m["c"].legs == ["context_only"]
        assert m["g"].legs == ["generation_only"]
        assert m.idle()


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_stream_with_usage(mesh: Callable[..., Any], kind: str) -> None:
    async with mesh() as m:
        common = {"model": "fake-model", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
        if kind == "chat":
            stream = await m.openai.chat.completions.create(messages=MESSAGES, **common)
        else:
            stream = await m.openai.completions.create(prompt="hello", **common)
        chunks = [chunk async for chunk in stream]
        *body, counted = chunks
        if kind == "chat":
            assert body[0].choices[0].delta.role == "assistant"
            text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
        else:
            text = "".join(chunk.choices[0].text for chunk in body)
        assert text == "abcde"
        assert body[-1].choices[0].finish_reason == "length"
        assert counted.choices == []
        assert counted.usage.completion_tokens == 5
        assert counted.usage.prompt_tokens_details.cached_tokens == 9, "rewritten: the generation server says 128"
        assert all(chunk.usage is None for chunk in body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_one_token_never_touches_a_generation_server(mesh: Callable[..., Any], kind: str, stream: bool) -> None:
    async with mesh() as m:
        common: dict[str, Any] = {"model": "fake-model", "max_tokens": 1, "stream": stream}
        if stream:
            common["stream_options"] = {"include_usage": True}
        if kind == "chat":
            answer = await m.openai.chat.completions.create(messages=MESSAGES, **common)
        else:
            answer = await m.openai.completions.create(prompt="hello", **common)
        parts = [part async for part in answer] if stream else [answer]
        choices = [choice for part in parts for choice in part.choices]
        if kind == "completions":
            text = "".join(choice.text for choice in choices)
        elif stream:
            text = "".join(choice.delta.content or "" for choice in choices)
        else:
            text = choices[0].message.content
        assert text == "a"
        assert choices[-1].finish_reason == "length"
        assert parts[-1].usage.completion_tokens == 1
        assert m["g"].requests == []
        assert m["c"].aborts == [], "no pages wait for anyone"


async def test_stop_at_the_first_token(mesh: Callable[..., Any]) -> None:
    async with mesh() as m:
        m["c"].finish_context = "stop"
        answer = await m.openai.completions.create(model="fake-model", prompt="hello", max_tokens=5)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a", "stop")
        assert "disaggregated_params" not in answer.choices[0].model_extra
        assert m["g"].requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_of_batched_prompts(mesh: Callable[..., Any], stream: bool) -> None:
    async with mesh() as m:
        common: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await m.openai.completions.create(
            model="fake-model", prompt=["one", "three"], n=2, max_tokens=3, seed=5, stream=stream, **common
        )
        if stream:
            texts = dict.fromkeys(range(4), "")
            finished = set()
            ids = set()
            async for chunk in answer:
                ids.add(chunk.id)
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    if choice.finish_reason:
                        finished.add(choice.index)
                last = chunk
            assert len(ids) == 1
            assert finished == {0, 1, 2, 3}
            counted = last.usage
        else:
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            texts = {choice.index: choice.text for choice in answer.choices}
            counted = answer.usage
        assert texts == dict.fromkeys(range(4), "abc")
        assert counted.prompt_tokens == 3 + 5, "each prompt counts once"
        assert counted.completion_tokens == 12
        assert sorted(body["seed"] for body in m["g"].requests) == [5, 5, 6, 6]
        assert len({body["request_id"] for body in m["g"].requests}) == 4
        assert m.idle()


async def test_choices_of_one_prompt_wait_for_its_first_prefill(mesh: Callable[..., Any]) -> None:
    async with mesh({"c1": "context", "c2": "context", "g": "generation"}) as m:
        answer = await m.openai.chat.completions.create(model="fake-model", messages=MESSAGES, n=4, max_tokens=2)
        assert [choice.message.content for choice in answer.choices] == ["ab"] * 4
        counts = sorted(len(m[name].requests) for name in ("c1", "c2"))
        assert counts == [0, 4], "all where the prompt has just been computed"


async def test_token_ids_are_returned_on_request(mesh: Callable[..., Any]) -> None:
    async with mesh() as m:
        extra = {"return_token_ids": True}
        answer = await m.openai.completions.create(model="fake-model", prompt=[40, 41], max_tokens=2, extra_body=extra)
        [choice] = answer.choices
        assert choice.model_extra["prompt_token_ids"] == [40, 41]
        assert choice.model_extra["token_ids"] == [65, 66]
        plain = await m.openai.completions.create(model="fake-model", prompt=[40, 41], max_tokens=2)
        assert "token_ids" not in plain.choices[0].model_extra


async def test_models_and_unknown_model(mesh: Callable[..., Any]) -> None:
    async with mesh() as m:
        [model] = (await m.openai.models.list()).data
        assert (model.id, model.model_extra["max_model_len"]) == ("fake-model", 256)
        assert (await m.openai.models.retrieve("fake-model")).id == "fake-model"
        with pytest.raises(openai.NotFoundError) as caught:
            await m.openai.chat.completions.create(model="other", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await m.openai.models.retrieve("other")


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 1000}, "messages", "context_length_exceeded"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate", "unknown_parameter"),
        ({"extra_body": {"prompt_token_ids": [1]}}, "prompt_token_ids", "invalid_value"),
        (
            {"extra_body": {"disaggregated_params": {"request_type": "generation_only"}}},
            "disaggregated_params.request_type",
            "invalid_value",
        ),
        (
            {"extra_body": {"disaggregated_params": {"request_type": "context_and_generation", "ctx_request_id": 5}}},
            "disaggregated_params",
            "invalid_value",
        ),
    ],
)
async def test_bad_requests(mesh: Callable[..., Any], extra: dict[str, Any], param: str, code: str) -> None:
    async with mesh() as m:
        with pytest.raises(openai.BadRequestError) as caught:
            await m.openai.chat.completions.create(model="fake-model", messages=MESSAGES, **extra)
        assert (caught.value.param, caught.value.code) == (param, code)
        assert m["c"].requests == []


async def test_api_keys(mesh: Callable[..., Any]) -> None:
    async with mesh(api_keys=["secret"]) as m:
        await m.openai.completions.create(model="fake-model", prompt="x", max_tokens=1)
        with pytest.raises(openai.AuthenticationError):
            await m.openai.with_options(api_key="wrong").completions.create(model="fake-model", prompt="x")
        assert (await m.get("/health"))[0] == 200, "probes carry no key"
        assert [headers["Authorization"] for headers in m["c"].headers] == ["Bearer secret"], "servers share the keys"
