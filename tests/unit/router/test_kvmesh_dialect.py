"""The wire between the router and its own workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member
from kvmesh.protocol.openai.cache import ConversationParams, KvCacheRetention, TokenRange
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.dialects.kvmesh import KvMeshDialect
from kvmesh.router.work import Work

MakeWork = Callable[..., Work]
DIALECT = KvMeshDialect()
CONVERSATION = ConversationParams(conversation_id="c")


def prefill_answer(**choice: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-r",
        "choices": [
            {
                "index": 0,
                "text": "a",
                "finish_reason": "not_finished",
                "prompt_token_ids": [1],
                "token_ids": [5],
                "disaggregated_params": {
                    "request_type": "context_only",
                    "first_gen_tokens": [5],
                    "ctx_request_id": 77,
                    "disagg_request_id": 77,
                    "encoded_opaque_state": "c3RhdGU=",
                },
                **choice,
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}},
    }


def read(work: Work, answer: dict[str, Any]) -> Any:
    return DIALECT.read_prefill(work, json.dumps(answer).encode())


def test_prefill_request(make_work: MakeWork) -> None:
    work = make_work(stream=True, temperature=0.5, conversation_params=CONVERSATION)
    path, body = DIALECT.prefill(work, 77)
    sent = json.loads(body)
    assert path == "/v1/completions"
    assert sent["prompt"] == list(range(100))
    assert sent["disaggregated_params"] == {
        "request_type": "context_only",
        "disagg_request_id": 77,
        "conversation_id": "c",
    }
    assert "stream" not in sent
    assert (sent["temperature"], sent["seed"], sent["max_tokens"], sent["request_id"]) == (0.5, 7, 8, "r")


def test_chat_sends_ids_and_only_the_last_message(make_work: MakeWork) -> None:
    path, body = DIALECT.whole(make_work("chat", 3, stream=True))
    sent = json.loads(body)
    assert path == "/v1/chat/completions"
    assert sent["prompt_token_ids"] == [0, 1, 2]
    assert sent["messages"] == [{"role": "user", "content": "u"}]
    assert sent["stream"] is True
    assert "disaggregated_params" not in sent


def test_hand_off(make_work: MakeWork) -> None:
    work = make_work(stream=True)
    prefilled = read(work, prefill_answer())
    assert not prefilled.finished
    sent = json.loads(DIALECT.decode(work, prefilled, 77).body)
    assert sent["stream"] is True
    assert sent["disaggregated_params"] == {
        "request_type": "generation_only",
        "first_gen_tokens": [5],
        "ctx_request_id": 77,
        "disagg_request_id": 77,
        "encoded_opaque_state": "c3RhdGU=",
        "ctx_usage": {"prompt_tokens": 100, "cached_tokens": 64},
    }


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_what_a_request_says_about_the_cache_goes_with_every_leg(make_work: MakeWork, kind: str) -> None:
    """§3.1, §5.1: retention and salt unchanged, the conversation in the legs' parameters."""
    retention = KvCacheRetention(
        token_range_retention_configs=[TokenRange(token_start=0, token_end=64, priority=90, duration_ms=5)],
        decode_retention_priority=10,
    )
    work = make_work(kind, cache_salt="tenant", kv_cache_retention_config=retention, conversation_params=CONVERSATION)
    legs = [DIALECT.whole(work), DIALECT.prefill(work, 77), DIALECT.decode(work, read(work, prefill_answer()), 77)]
    for leg, request_type in zip(legs, ("context_and_generation", "context_only", "generation_only"), strict=True):
        sent = json.loads(leg.body)
        assert sent["kv_cache_retention_config"] == {
            "token_range_retention_configs": [{"token_start": 0, "token_end": 64, "priority": 90, "duration_ms": 5}],
            "decode_retention_priority": 10,
        }
        assert sent["cache_salt"] == "tenant"
        assert sent["disaggregated_params"]["conversation_id"] == "c"
        assert sent["disaggregated_params"]["request_type"] == request_type
        assert "conversation_params" not in sent


@pytest.mark.parametrize(
    ("reason", "max_tokens", "finished", "told"),
    [
        ("not_finished", 8, False, "not_finished"),
        ("length", 8, False, "length"),
        ("length", 1, True, "length"),
        ("not_finished", 1, True, "length"),
        ("stop", 8, True, "stop"),
    ],
)
def test_when_the_first_token_is_the_last(
    make_work: MakeWork, reason: str, max_tokens: int, finished: bool, told: str
) -> None:
    prefilled = read(make_work(max_tokens=max_tokens), prefill_answer(finish_reason=reason))
    assert prefilled.finished is finished
    [choice] = prefilled.response["choices"]
    assert choice["finish_reason"] == told
    assert not {"disaggregated_params", "prompt_token_ids", "token_ids"} & choice.keys()


def test_token_ids_stay_for_who_asked_for_them(make_work: MakeWork) -> None:
    [choice] = read(make_work(max_tokens=1, return_token_ids=True), prefill_answer()).response["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5], [1])
    assert "disaggregated_params" not in choice


@pytest.mark.parametrize("missing", ["ctx_request_id", "disagg_request_id"])
def test_missing_ids_are_named(make_work: MakeWork, missing: str) -> None:
    answer = prefill_answer()
    del answer["choices"][0]["disaggregated_params"][missing]
    with pytest.raises(ApiError, match=f"disaggregated_params.{missing}") as caught:
        read(make_work(), answer)
    assert caught.value.status == 502


def test_missing_parameters_are_named(make_work: MakeWork) -> None:
    with pytest.raises(ApiError, match="lacks disaggregated_params;"):
        read(make_work(), prefill_answer(disaggregated_params=None))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{},{}]}', b'{"choices":[{}]}'])
def test_nonsense_is_a_bad_gateway(make_work: MakeWork, body: bytes) -> None:
    with pytest.raises(ApiError, match="exactly one choice") as caught:
        DIALECT.read_prefill(make_work(), body)
    assert caught.value.status == 502


def test_abort() -> None:
    path, body = DIALECT.abort(77)
    assert (path, json.loads(body)) == ("/abort", {"disagg_request_id": 77})


@pytest.mark.parametrize("leg", ["whole", "prefill", "decode"])
def test_the_rank_that_holds_the_prefix_is_named(make_work: MakeWork, leg: str) -> None:
    work, wish = make_work(), RankWish(1, 64)
    prefilled = read(work, prefill_answer())
    _, body = {
        "whole": lambda: DIALECT.whole(work, wish),
        "prefill": lambda: DIALECT.prefill(work, 77, wish),
        "decode": lambda: DIALECT.decode(work, prefilled, 77, wish),
    }[leg]()
    params = json.loads(body)["disaggregated_params"]
    assert (params["dp_rank"], params["dp_matched_tokens"]) == (1, 64)


def test_generation_first_a_conversation_stays_on_its_context_rank(make_work: MakeWork) -> None:
    """§5.3: the generation server must be told one rank of the context server, which then has to take the leg."""
    context = Member(
        instance_id="c",
        role="context",
        url="http://c",
        dp_size=2,
        ctx_addresses=["YQ==", "Yg=="],
        ctx_info_endpoint="e",
    )

    def ordered(work: Work, transfer_id: int, wish: RankWish) -> int:
        legs = DIALECT.both(work, context, transfer_id, wish)
        assert legs is not None
        early, late = (json.loads(leg.body)["disaggregated_params"] for leg in (legs.context, legs.generation))
        rank = early["ctx_dp_rank"]
        assert (late["ctx_dp_rank"], late["encoded_opaque_state"]) == (rank, context.ctx_addresses[rank])
        return rank

    nobody = make_work()
    assert [ordered(nobody, number, RankWish()) for number in (4, 5, 6)] == [0, 1, 0]
    assert {ordered(nobody, number, RankWish(1, 64)) for number in (4, 5)} == {1}
    turn = make_work(conversation_params=CONVERSATION)
    assert len({ordered(turn, number, RankWish(rank, 64)) for number in (4, 5) for rank in (0, 1)}) == 1
