"""Plans become answers: text, usage, choices, chunks and legs, from a fake engine's tokens."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from fake_tokenizer import EOS, FakeTokenizer

from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.engine import Generate, TokenOutput
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.requests import decode_request
from kvmesh.protocol.sampling import TokenLogprob
from kvmesh.worker.answers import Answerer
from kvmesh.worker.plans import ModelFacts, Planner

HANDOFF = msgspec.msgpack.encode(
    HandOff(ticket=b"t", control_endpoint="tcp://127.0.0.1:1", instance_id="c", epoch=1, layout_digest="d", seed=77)
)


class FakeEngine:
    """Answers each sequence with the given tokens, one a step."""

    def __init__(self, *outputs: TokenOutput | ApiError) -> None:
        self.outputs = outputs
        self.requests: list[Generate] = []
        self.aborted: list[str] = []
        self.closed: list[str] = []

    async def generate(self, request: Generate) -> AsyncIterator[TokenOutput]:
        self.requests.append(request)
        try:
            for output in self.outputs:
                if isinstance(output, ApiError):
                    raise output
                yield msgspec.structs.replace(output, request_id=request.request_id)
        finally:
            self.closed.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def spelled(text: str, finish: str = "length", **last: Any) -> list[TokenOutput]:
    outputs = [TokenOutput(request_id="", token_ids=[byte]) for byte in text.encode()]
    outputs[-1] = msgspec.structs.replace(outputs[-1], finish_reason=finish, **last)
    return outputs


async def answer(engine: FakeEngine, body: dict[str, Any], role: str = "both") -> Any:
    kind = "chat" if "messages" in body else "completions"
    request = decode_request(kind, msgspec.json.encode({"model": "m", **body}))
    tokenizer: Any = FakeTokenizer()
    planner = Planner(engine, tokenizer, ModelFacts("m", 100, 257), role, 5.0)
    plan = await planner.plan(request, "r")
    answerer = Answerer(tokenizer, ["tcp://ctx"], lambda _sequence, _delta: None)
    if request.stream:
        return [event async for event in answerer.events(plan)]
    return msgspec.json.decode(msgspec.json.encode(await answerer.whole(plan)))


async def test_whole_completion_with_usage() -> None:
    reply = await answer(FakeEngine(*spelled("h\u00e9!", cached_tokens=2)), {"prompt": "abc", "max_tokens": 4})
    assert reply["choices"][0]["text"] == "h\u00e9!"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_the_stop_token_is_counted_but_not_shown() -> None:
    engine = FakeEngine(
        TokenOutput(request_id="", token_ids=[104, 105]),
        TokenOutput(request_id="", token_ids=[EOS], stop_token_id=EOS, finish_reason="stop"),
    )
    reply = await answer(engine, {"prompt": "abc", "return_token_ids": True})
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hi", "stop", None)
    assert choice["token_ids"] == [104, 105, EOS]
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert reply["usage"]["completion_tokens"] == 3


async def test_a_stop_string_ends_the_sequence_at_once() -> None:
    engine = FakeEngine(*spelled("one two three"))
    reply = await answer(engine, {"prompt": "abc", "stop": [" two"]})
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", " two")
    assert reply["usage"]["completion_tokens"] == len("one two")
    assert engine.closed == [engine.requests[0].request_id]


async def test_stop_strings_wait_for_min_tokens() -> None:
    engine = FakeEngine(*spelled("aXbXc"))
    reply = await answer(engine, {"prompt": "abc", "stop": "X", "min_tokens": 3})
    assert reply["choices"][0]["text"] == "aXb"


async def test_choices_of_several_prompts_are_in_order() -> None:
    engine = FakeEngine(*spelled("ok"))
    reply = await answer(engine, {"prompt": ["a", "bc"], "n": 2, "seed": 5})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 5, 6]
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 8


async def test_one_failed_sequence_fails_the_request_and_stops_the_others() -> None:
    engine = FakeEngine(ApiError(503, "no pages", code="busy"))
    with pytest.raises(ApiError, match="no pages"):
        await answer(engine, {"prompt": ["a", "b"]})
    assert sorted(engine.closed) == sorted(request.request_id for request in engine.requests)
    assert len(engine.closed) == 2


async def test_stream_of_chat_with_usage_and_logprobs() -> None:
    entry = TokenLogprob(104, -0.5, [(104, -0.5), (105, -1.0)])
    engine = FakeEngine(
        TokenOutput(request_id="", token_ids=[104], logprobs=[entry], finish_reason="length", prompt_tokens=3)
    )
    body = {
        "messages": [{"role": "user", "content": "q"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
    }
    events = await answer(engine, body)
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [msgspec.json.decode(event[6:]) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    content = chunks[1]["choices"][0]["logprobs"]["content"][0]
    assert (content["token"], content["logprob"]) == ("h", -0.5)
    assert [top["token"] for top in content["top_logprobs"]] == ["h", "i"]
    assert chunks[1]["choices"][0]["finish_reason"] == "length"
    assert chunks[2]["usage"]["completion_tokens"] == 1


async def test_streamed_text_offsets_go_on() -> None:
    outputs = [
        TokenOutput(request_id="", token_ids=[byte], logprobs=[TokenLogprob(byte, -1.0)], finish_reason=finish)
        for byte, finish in ((97, None), (98, "length"))
    ]
    events = await answer(FakeEngine(*outputs), {"prompt": "q", "stream": True, "logprobs": 0})
    chunks = [msgspec.json.decode(event[6:]) for event in events[:-1]]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_count_characters_however_they_are_cut(stream: bool) -> None:
    text = "a\U0001f600b"
    outputs = [
        msgspec.structs.replace(output, logprobs=[TokenLogprob(output.token_ids[0], -1.0)]) for output in spelled(text)
    ]
    reply = await answer(FakeEngine(*outputs), {"prompt": "q", "logprobs": 0, "stream": stream})
    if stream:
        choices = [msgspec.json.decode(event[6:])["choices"][0] for event in reply[:-1]]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    else:
        offsets = reply["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 1, 2]


async def test_a_leg_that_fails_in_the_front_gives_its_pages_back() -> None:
    engine = FakeEngine(TokenOutput(request_id="", token_ids=[10**6], finish_reason="not_finished", handoff=HANDOFF))
    params = {"request_type": "context_only", "disagg_request_id": 9}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await answer(engine, {"prompt": "abc", "disaggregated_params": params}, "context")
    assert engine.aborted == [engine.requests[0].request_id]


async def test_context_leg_hands_on_everything_the_second_leg_needs() -> None:
    engine = FakeEngine(
        TokenOutput(
            request_id="",
            token_ids=[104],
            finish_reason="not_finished",
            handoff=HANDOFF,
            logprobs=[TokenLogprob(104, -0.5, [(1, -2.0)])],
        )
    )
    params = {"request_type": "CONTEXT_ONLY", "disagg_request_id": 9}
    reply = await answer(engine, {"prompt": "abc", "logprobs": 1, "disaggregated_params": params}, "context")
    choice = reply["choices"][0]
    given = choice["disaggregated_params"]
    assert choice["finish_reason"] == "not_finished"
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert given["first_gen_tokens"] == [104]
    assert given["ctx_request_id"] == given["disagg_request_id"] == 9
    assert base64.b64decode(given["encoded_opaque_state"]) == HANDOFF
    assert engine.requests[0].kind == "context"

    second = FakeEngine(
        TokenOutput(request_id="", token_ids=[104]),
        TokenOutput(request_id="", token_ids=[105], logprobs=[TokenLogprob(105, -0.1)], finish_reason="length"),
    )
    given = {**given, "request_type": "generation_only", "ctx_usage": {"prompt_tokens": 3, "cached_tokens": 1}}
    reply = await answer(second, {"prompt": [97, 98, 99], "logprobs": 1, "disaggregated_params": given}, "generation")
    request = second.requests[0]
    assert (request.kind, request.transfer_id, request.first_tokens) == ("generation", 9, [104])
    assert request.sampling.seed == 77
    assert reply["choices"][0]["text"] == "hi"
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.1]
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_stop_string_in_the_first_token_ends_both_legs() -> None:
    engine = FakeEngine(TokenOutput(request_id="", token_ids=[104], finish_reason="not_finished", handoff=HANDOFF))
    params = {"request_type": "context_only", "disagg_request_id": 9}
    reply = await answer(engine, {"prompt": "abc", "stop": "h", "disaggregated_params": params}, "context")
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted == [engine.requests[0].request_id]


@pytest.mark.parametrize(
    ("role", "params", "says"),
    [
        ("context", None, "serves request_type 'context_only'"),
        ("context", {"request_type": "generation_only"}, "does not serve"),
        ("generation", {"request_type": "context_only"}, "does not serve"),
        ("both", {"request_type": "context_only"}, "'disagg_request_id' is missing"),
        ("both", {"request_type": "context_only", "disagg_request_id": -4}, "positive 63-bit"),
        (
            "both",
            {"request_type": "context_only", "disagg_request_id": 1, "schedule_style": 2},
            "'schedule_style' is 2",
        ),
        (
            "both",
            {"request_type": "generation_only", "disagg_request_id": 1, "schedule_style": 1, "first_gen_tokens": [1]},
            "has no 'first_gen_tokens'",
        ),
        (
            "both",
            {"request_type": "generation_only", "disagg_request_id": 1, "schedule_style": 1},
            "'encoded_opaque_state' is missing; generation first",
        ),
        (
            "both",
            {
                "request_type": "generation_only",
                "disagg_request_id": 1,
                "schedule_style": 1,
                "encoded_opaque_state": "no base64",
            },
            "is no address of a context server",
        ),
        ("both", {"request_type": "nonsense"}, "Unknown request_type"),
        ("both", {"request_type": "generation_only", "disagg_request_id": 1}, "'first_gen_tokens' is missing"),
        (
            "both",
            {"request_type": "generation_only", "disagg_request_id": 1, "first_gen_tokens": []},
            "'first_gen_tokens' is missing",
        ),
        (
            "both",
            {
                "request_type": "generation_only",
                "disagg_request_id": 1,
                "first_gen_tokens": [1],
                "encoded_opaque_state": "AAAA",
            },
            "not what a context server gave out",
        ),
        (
            "both",
            {
                "request_type": "generation_only",
                "disagg_request_id": 1,
                "first_gen_tokens": [1],
                "encoded_opaque_state": "\u00e9",
            },
            "not what a context server gave out",
        ),
        (
            "both",
            {"request_type": "generation_only", "disagg_request_id": 1, "first_gen_tokens": [2**70]},
            "must be token ids",
        ),
    ],
)
async def test_malformed_legs_are_refused(role: str, params: dict[str, Any] | None, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        await answer(FakeEngine(), {"prompt": "abc", "disaggregated_params": params}, role)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "other", "prompt": "x"}, 404, "not served here"),
        ({"prompt": "x" * 200}, 400, "send a shorter prompt"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": [999]}, 400, "Token id 999"),
        ({"prompt": ["a", "b"], "prompt_token_ids": [1]}, 400, "is one prompt and 'prompt' has 2"),
    ],
)
async def test_bad_requests_say_what_to_do(body: dict[str, Any], status: int, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        await answer(FakeEngine(), body)
    assert caught.value.status == status
