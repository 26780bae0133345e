"""§1.3: one active request per conversation id; what runs beside it is served without a conversation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import structlog
from fake_tokenizer import FakeTokenizer

from kvmesh.protocol.openai.requests import decode_request
from kvmesh.worker.conversations import ActiveConversations
from kvmesh.worker.plans import ModelFacts, Plan, Planner


async def plan(conversation_id: str | None, request_id: str = "r", **fields: Any) -> Plan:
    body = {"model": "m", "prompt": [1, 2, 3], "conversation_params": {"conversation_id": conversation_id}, **fields}
    unused: Any = None
    tokenizer: Any = FakeTokenizer()
    planner = Planner(unused, tokenizer, ModelFacts("m", 100, 257), "both", 5.0)
    return await planner.plan(decode_request("completions", msgspec.json.encode(body)), request_id)


def ids(planned: Plan) -> list[str | None]:
    """What the engine will be told, by sequence."""
    return [sequence.run.request.conversation_id for sequence in planned.sequences]


async def test_the_second_of_two_turns_at_a_time_has_no_conversation() -> None:
    active = ActiveConversations()
    first, second, other = await plan(" chat "), await plan("chat", "later"), await plan("other")
    with structlog.testing.capture_logs() as logs, active.turn(first), active.turn(second), active.turn(other):
        assert (ids(first), ids(second), ids(other)) == (["chat"], [None], ["other"])
    assert ["request under way" in entry["event"] for entry in logs] == [True]
    third = await plan("chat")
    with active.turn(third):
        assert ids(third) == ["chat"], "the first one is over"
    assert not len(active)


async def test_the_one_that_was_ignored_does_not_end_the_other_s_turn() -> None:
    active = ActiveConversations()
    with active.turn(await plan("chat")):
        with active.turn(await plan("chat")):
            pass
        late = await plan("chat")
        with active.turn(late):
            assert ids(late) == [None]


async def test_one_id_under_two_salts_is_two_conversations() -> None:
    """One tenant's turn is not in the way of another's."""
    active = ActiveConversations()
    mine, theirs, again = await plan("chat", cache_salt="m"), await plan("chat", cache_salt="t"), await plan("chat")
    with active.turn(mine), active.turn(theirs), active.turn(again):
        assert ids(mine) == ids(theirs) == ids(again) == ["chat"]
        late = await plan("chat", cache_salt="m")
        with active.turn(late):
            assert ids(late) == [None]
    assert not len(active)


async def test_a_turn_that_fails_is_over() -> None:
    active = ActiveConversations()
    with pytest.raises(ConnectionResetError), active.turn(await plan("chat")):
        raise ConnectionResetError
    assert not len(active)


async def test_only_the_first_choice_goes_on_with_the_conversation() -> None:
    assert ids(await plan("chat", n=3)) == ["chat", None, None]
    assert ids(await plan("  ")) == ids(await plan(None)) == [None]


async def test_retention_reaches_every_choice() -> None:
    config = {"token_range_retention_configs": [{"token_start": 1, "priority": 7}], "decode_duration_ms": 9}
    planned = await plan(None, n=2, kv_cache_retention_config=config, cache_salt="s")
    for sequence in planned.sequences:
        request = sequence.run.request
        assert request.retention is not None
        assert request.retention.token_range_retention_configs[0].priority == 7
        assert request.retention.decode_duration_ms == 9
        assert request.cache_salt == "s"
