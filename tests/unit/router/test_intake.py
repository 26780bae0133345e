"""What the router takes in: conversations out of every form, and a 400 for whatever is of the wrong type."""

from __future__ import annotations

import json
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_bodies import request_bodies

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.fanout import fan_out, single_request
from kvmesh.protocol.openai.requests import ApiKind, decode_request
from kvmesh.router.dialects.kvmesh import KvMeshDialect
from kvmesh.router.explain import SequenceExplanation
from kvmesh.router.intake import conversation_of, max_tokens_of, take_in
from kvmesh.router.match import Matches
from kvmesh.router.tokenizing import Prompt, PromptTokenizer
from kvmesh.router.work import Work

MODEL = "m"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "q"}]}
DIALECT = KvMeshDialect()


class FakeTokenizer:
    """One id for each byte."""

    vocab_size = 256
    longest_token_chars = 1

    def encode_many(self, texts: list[str], *, add_special: bool = True) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return "".join(f"{m['role']}:{m['content']};" for m in messages)


def taken(**fields: Any) -> Any:
    return take_in("chat", json.dumps({**CHAT, **fields}).encode(), model=MODEL, vocab_size=256)


@pytest.mark.parametrize(
    ("fields", "named", "routed_by"),
    [
        ({}, None, None),
        ({"conversation_params": {"conversation_id": " a "}}, "a", "a"),
        ({"disaggregated_params": {"request_type": "context_and_generation", "conversation_id": "a"}}, "a", "a"),
        ({"disaggregated_params": {"conversation_id": "a"}}, "a", "a"),
        ({"conversation_params": {"conversation_id": " "}, "prompt_cache_key": "k"}, None, "k"),
        ({"conversation_params": {"conversation_id": "a"}, "prompt_cache_key": "k"}, "a", "a"),
    ],
)
def test_a_conversation_is_the_same_however_it_is_named(
    fields: dict[str, Any], named: str | None, routed_by: str | None
) -> None:
    """§1.3, §5.1; a cache key steers the router only: it says nothing about turns."""
    request = taken(**fields)
    found = request.conversation_params
    assert (None if found is None else found.conversation_id) == named
    assert conversation_of(request) == routed_by
    assert request.disaggregated_params is None


def test_only_the_first_choice_goes_on_with_the_conversation() -> None:
    request = taken(n=3, conversation_params={"conversation_id": "a"})
    singles = [
        single_request(request, spec, prompt_token_ids=[1], max_tokens=1, request_id="r") for spec in fan_out(request)
    ]
    assert [single.conversation_params is not None for single in singles] == [True, False, False]


async def serve(kind: ApiKind, raw: bytes) -> list[bytes]:
    """As the pipeline does up to what a server is sent; nothing for a client's error."""
    fake: Any = FakeTokenizer()
    try:
        request = take_in(kind, raw, model=MODEL, vocab_size=256)
        [spec, *_] = fan_out(request)
        prompt = (await PromptTokenizer(fake).prompts(request, max_seq_len=100))[spec.prompt_index]
        max_tokens = max_tokens_of(request, len(prompt.ids), 100)
    except ApiError as error:
        if error.status not in (400, 404):
            raise
        return []
    single = single_request(request, spec, prompt_token_ids=prompt.ids.tolist(), max_tokens=max_tokens, request_id="r")
    work = Work(
        kind=kind,
        request=single,
        sequence=spec,
        prompt=Prompt(prompt.ids, None),
        matches=Matches("off"),
        explanation=SequenceExplanation(index=0, prompt_tokens=len(prompt.ids), match_state="off"),
        conversation_id=conversation_of(request),
    )
    return [DIALECT.whole(work).body, DIALECT.prefill(work, 77).body]


@given(st.data(), st.sampled_from(["completions", "chat"]))
@settings(max_examples=500, deadline=None)
def test_wrong_types_are_a_400(data: st.DataObject, kind: ApiKind) -> None:
    raw = json.dumps(data.draw(request_bodies(kind, MODEL))).encode()
    for leg in anyio.run(serve, kind, raw):
        assert decode_request(kind, leg).model == MODEL


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_some_bodies_pass(kind: ApiKind) -> None:
    """The property above would hold for a router that refuses everything."""
    body = {"model": MODEL, "prompt": "abc"} if kind == "completions" else CHAT
    assert len(await serve(kind, json.dumps(body).encode())) == 2
