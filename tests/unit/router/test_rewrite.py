"""What the router changes in workers' answers, and that it changes nothing else."""

from __future__ import annotations

import json

import pytest

from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.openai.responses import encode, usage
from kvmesh.protocol.openai.sse import DONE, ChunkEncoder, event_data
from kvmesh.router.rewrite import as_events, rewrite_usage, rewrite_usage_events

TRUTH = CtxUsage(prompt_tokens=10, cached_tokens=9)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_t21_usage_chunk_gets_the_context_servers_numbers_and_no_other_byte_changes(kind: str) -> None:
    encoder = ChunkEncoder(kind, id="i", model="m", created=1, include_usage=True)
    before = (
        encoder.first([1])
        + encoder.text('tricky "usage":{ text \\"usage\\":{')
        + encoder.chunk("", finish_reason="stop")
    )
    out = rewrite_usage_events(before + encoder.usage(usage(200, 3, 128)) + DONE, TRUTH)
    assert out.startswith(before)
    assert out.endswith(DONE)
    chunk = json.loads(event_data(out.removeprefix(before).removesuffix(DONE)))
    assert chunk["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 9},
    }
    assert chunk["choices"] == []


def test_events_without_usage_are_the_same_object() -> None:
    events = ChunkEncoder("chat", id="i", model="m", created=1, include_usage=True).text("x") + DONE
    assert rewrite_usage_events(events, TRUTH) is events


def test_comments_and_strange_events_pass() -> None:
    strange = b': keep-alive\n\ndata: {"usage": {\n\ndata: ["usage", {"usage": {}}]\n\n'
    assert rewrite_usage_events(strange, TRUTH) == strange


def test_whole_answer_keeps_further_details() -> None:
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"audio_tokens": 1}}}
    rewrite_usage(body, TRUTH)
    assert body["usage"]["prompt_tokens_details"] == {"audio_tokens": 1, "cached_tokens": 9}
    assert body["usage"]["total_tokens"] == 12


def response(choice: dict[str, object], kind: str) -> dict[str, object]:
    name = "text_completion" if kind == "completions" else "chat.completion"
    return {
        "id": "i",
        "object": name,
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": json.loads(encode(usage(3, 1))),
    }


def test_whole_chat_answer_as_a_stream() -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "prompt_token_ids": [1],
        "token_ids": [2],
    }
    events = as_events("chat", response(choice, "chat"), include_usage=True)
    *chunks, done = events.split(b"\n\n")[:-1]
    assert done + b"\n\n" == DONE
    first, last, counted = [json.loads(event_data(chunk)) for chunk in chunks]
    assert {chunk["object"] for chunk in (first, last, counted)} == {"chat.completion.chunk"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["prompt_token_ids"] == [1]
    assert last["choices"][0]["delta"] == {"content": "Hi"}
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["token_ids"]) == ("length", [2])
    assert last["usage"] is None
    assert counted["usage"]["total_tokens"] == 4


def test_whole_completion_as_a_stream_without_usage() -> None:
    choice = {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}
    events = as_events("completions", response(choice, "completions"), include_usage=False)
    chunk, done = events.split(b"\n\n")[:-1]
    assert "usage" not in json.loads(event_data(chunk))
    assert json.loads(event_data(chunk))["choices"] == [choice]
    assert done + b"\n\n" == DONE
