"""Whatever a body holds, a worker answers 400 or can send what it made of it to its engine: never 500."""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
from fake_tokenizer import FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from request_bodies import request_bodies

from kvmesh.protocol.engine import Generate
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.requests import ApiKind, decode_request
from kvmesh.worker.plans import ModelFacts, Planner

MODEL = "m"


class FakeEngine:
    """Is never asked."""

    def abort(self, request_id: str) -> None:
        raise AssertionError(request_id)


tokenizer: Any = FakeTokenizer()


def serve(kind: ApiKind, body: dict[str, Any]) -> str:
    engine: Any = FakeEngine()
    try:
        request = decode_request(kind, json.dumps(body).encode())
        plan = anyio.run(Planner(engine, tokenizer, ModelFacts(MODEL, 100, 257), "both", 5.0).plan, request, "r")
    except ApiError as error:
        msgspec.json.encode(error.body())  # it can be told, too
        if error.status not in (400, 404):
            raise
        return "refused"
    for sequence in plan.sequences:
        sent = msgspec.msgpack.encode(sequence.run.request)
        assert msgspec.msgpack.decode(sent, type=Generate) == sequence.run.request
    return "planned"


@given(st.data(), st.sampled_from(["completions", "chat"]))
@settings(max_examples=1000, deadline=None)
def test_wrong_types_are_a_400(data: st.DataObject, kind: ApiKind) -> None:
    serve(kind, data.draw(request_bodies(kind, MODEL)))


def test_some_bodies_are_planned() -> None:
    """The property above would hold for a worker that refuses everything."""
    assert serve("completions", {"model": MODEL, "prompt": "abc"}) == "planned"
    assert serve("chat", {"model": MODEL, "messages": [{"role": "user", "content": "q"}]}) == "planned"
    assert serve("chat", {"model": MODEL, "messages": []}) == "refused"
