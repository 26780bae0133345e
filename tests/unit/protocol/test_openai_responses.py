"""Responses, log-probabilities, chunks and framing."""

from __future__ import annotations

import json

import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.responses import (
    chat_choice,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    encode,
    token_text,
    usage,
)
from kvmesh.protocol.openai.sse import DONE, ChunkEncoder, SseFramer, error_event, event_data
from kvmesh.protocol.sampling import TokenLogprob

PIECES = {1: b"Hel", 2: b"lo", 3: b"\xe2\x82", 4: "€".encode()}


def token_bytes(token_id: int) -> bytes:
    return PIECES[token_id]


def payload(event: bytes) -> dict[str, object]:
    assert event.endswith(b"\n\n")
    return json.loads(event_data(event))


def test_usage_totals() -> None:
    assert json.loads(encode(usage(5, 3, 4))) == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_choices_leave_out_what_was_not_asked_for() -> None:
    plain = json.loads(encode(completion_choice(0, "x", finish_reason="stop")))
    assert plain == {"index": 0, "text": "x", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    full = json.loads(encode(chat_choice(1, "x", finish_reason="length", token_ids=[1], prompt_token_ids=[2])))
    assert (full["token_ids"], full["prompt_token_ids"]) == ([1], [2])
    assert full["message"] == {"role": "assistant", "content": "x", "refusal": None}


def test_token_text_of_part_of_a_character() -> None:
    assert token_text(b"Hel") == "Hel"
    assert token_text(b"\xe2\x82") == r"bytes:\xe2\x82"


def test_completion_logprobs() -> None:
    entries = [TokenLogprob(1, -0.1, [(1, -0.1), (2, -3.0)]), TokenLogprob(2, -2.0, [(1, -0.5), (3, -1.0)])]
    found = completion_logprobs(entries, token_bytes, text_offsets=[4, 7], top=2)
    assert found.tokens == ["Hel", "lo"]
    assert found.text_offset == [4, 7]
    assert found.token_logprobs == [-0.1, -2.0]
    # the sampled token is always among them, so there can be one more than asked for
    assert found.top_logprobs == [{"Hel": -0.1, "lo": -3.0}, {"Hel": -0.5, r"bytes:\xe2\x82": -1.0, "lo": -2.0}]
    assert completion_logprobs(entries, token_bytes, text_offsets=[0, 3], top=0).top_logprobs is None


def test_chat_logprobs() -> None:
    found = chat_logprobs([TokenLogprob(3, -0.2, [(3, -0.2), (4, -2.0)])], token_bytes, top=1)
    [entry] = found.content
    assert (entry.token, entry.bytes, entry.logprob) == (r"bytes:\xe2\x82", [0xE2, 0x82], -0.2)
    assert [top.token for top in entry.top_logprobs] == [r"bytes:\xe2\x82"]


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_fast_chunks_equal_built_ones(kind: str, include_usage: bool) -> None:
    encoder = ChunkEncoder(kind, id="i\x00d", model='m"\x00', created=5, include_usage=include_usage, index=3)
    text = 'a "quoted"\n€ line \u0000'
    fast, built = payload(encoder.text(text)), payload(encoder.chunk(text, token_ids=[1]))
    built["choices"][0].pop("token_ids")  # type: ignore[index]
    assert fast == built
    assert ("usage" in fast) == include_usage
    choice = fast["choices"][0]  # type: ignore[index]
    assert choice["index"] == 3
    assert (choice["text"] if kind == "completions" else choice["delta"]["content"]) == text


def test_chat_stream_opens_with_the_role_and_ends_with_the_reason() -> None:
    encoder = ChunkEncoder("chat", id="i", model="m", created=5, include_usage=True)
    first = payload(encoder.first([7, 8]))["choices"][0]  # type: ignore[index]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert first["prompt_token_ids"] == [7, 8]
    last = payload(encoder.chunk("", finish_reason="stop", stop_reason="END"))["choices"][0]  # type: ignore[index]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", "END")
    counted = payload(encoder.usage(usage(1, 2)))
    assert counted["choices"] == []
    assert counted["usage"]["total_tokens"] == 3  # type: ignore[index]


def test_completion_stream_opens_only_with_something_to_say() -> None:
    encoder = ChunkEncoder("completions", id="i", model="m", created=5)
    assert encoder.first() == b""
    assert payload(encoder.first([1]))["choices"][0]["prompt_token_ids"] == [1]  # type: ignore[index]


def test_error_event() -> None:
    assert payload(error_event(ApiError(502, "gone", code="x")))["error"]["code"] == "x"  # type: ignore[index]


def test_framer_gives_complete_events_whatever_the_cuts() -> None:
    stream = b"data: a\n\ndata: b\n\n: comment\n\n" + DONE
    for size in range(1, len(stream) + 1):
        framer = SseFramer()
        out = [framer.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
        assert b"".join(out) == stream
        assert all(block.endswith(b"\n\n") for block in out if block)
        assert framer.pending == 0


def test_event_data() -> None:
    assert event_data(b"data: x\n\n") == b"x"
    assert event_data(b": keep-alive\n\n") == b""
    assert event_data(b"event: e\r\ndata:x\r\ndata: y\r\n\r\n") == b"x\ny"
