"""Admission: each thing a client can get wrong has its own sentence, status and field."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvmesh.engine.intake import Intake, IntakeLimits
from kvmesh.engine.sampler import Sampler
from kvmesh.hashing import salt_id
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.engine import Generate
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.retention import RetentionConfig
from kvmesh.protocol.sampling import SamplingParams

LIMITS = IntakeLimits(
    vocab_size=100,
    max_seq_len=64,
    max_cached_tokens=48,
    max_num_tokens=32,
    chunked_prefill=True,
    max_queue=4,
    transfers=True,
)
HANDOFF = HandOff(ticket=b"t", control_endpoint="tcp://h:1", instance_id="c", epoch=1, layout_digest="d", seed=9)


def intake(**changes: object) -> Intake:
    return Intake(LIMITS._replace(**changes), Sampler(frozenset({2})), ManualClock(100.0))  # type: ignore[arg-type]


def request(
    prompt: list[int] | bytes = b"", *, sampling: dict[str, object] | None = None, **fields: object
) -> Generate:
    tokens = prompt if prompt and isinstance(prompt, bytes) else np.array(prompt or [1, 2, 3], dtype="<i4").tobytes()
    params = SamplingParams(**{"max_tokens": 8, **(sampling or {})})  # type: ignore[arg-type]
    return Generate(**{"request_id": "r", "prompt_token_ids": tokens, "sampling": params, **fields})  # type: ignore[arg-type]


def generation(**fields: object) -> Generate:
    defaults = {
        "kind": "generation",
        "transfer_id": 7,
        "first_tokens": [5],
        "handoff": msgspec.msgpack.encode(HANDOFF),
    }
    return request(**{**defaults, **fields})  # type: ignore[arg-type]


def test_what_a_request_says_about_its_blocks_reaches_the_sequence() -> None:
    retention = RetentionConfig(decode_retention_priority=80)
    sent = msgspec.msgpack.encode(request(retention=retention, conversation_id="c"))
    seq = intake().admit(msgspec.msgpack.decode(sent, type=Generate), 0)
    assert (seq.retention, seq.conversation_id) == (retention, "c")
    plain = intake().admit(request(), 0)
    assert (plain.retention, plain.conversation_id) == (None, None)


def test_a_plain_request() -> None:
    seq = intake().admit(request(deadline_s=5.0, cache_salt="tenant-a", priority=3), 0)
    assert seq.history.all().tolist() == [1, 2, 3]
    assert seq.deadline_s == 105.0
    assert seq.scope.salt == salt_id("tenant-a")
    assert seq.rank == (-3, 1)
    assert not seq.awaits_transfer


def test_a_generation_request_starts_with_the_first_tokens() -> None:
    seq = intake().admit(generation(), 0)
    assert seq.handoff == HANDOFF
    assert seq.history.prompt_length == 3
    assert seq.history.output().tolist() == [5]


@pytest.mark.parametrize(
    ("message", "status", "code", "words"),
    [
        (request(b"abc"), 400, "invalid_value", "prompt is empty"),
        (request([1, 100]), 400, "invalid_value", "Token id 100"),
        (request([-1]), 400, "invalid_value", "Token id -1"),
        (request(sampling={"logit_bias": {2**40: 1.0}}), 400, "invalid_value", "vocabulary of 100"),
        (request(sampling={"stop_token_ids": [100]}), 400, "invalid_value", "Token id 100"),
        (request(sampling={"max_tokens": 0}), 400, "invalid_value", "Max_tokens"),
        (request(sampling={"temperature": -0.1}), 400, "invalid_value", "Temperature"),
        (request(sampling={"temperature": float("nan")}), 400, "invalid_value", "Temperature"),
        (request(sampling={"top_p": 0.0}), 400, "invalid_value", "Top_p"),
        (request(sampling={"min_tokens": 9}), 400, "invalid_value", "Min_tokens"),
        (request(sampling={"temperature": 101.0}), 400, "invalid_value", "Temperature"),
        (request(sampling={"temperature": float("inf")}), 400, "invalid_value", "Temperature"),
        (request(sampling={"repetition_penalty": 0.0}), 400, "invalid_value", "Repetition_penalty"),
        (request(sampling={"repetition_penalty": 1e-40}), 400, "invalid_value", "0.01 to 100"),
        (request(sampling={"repetition_penalty": 101.0}), 400, "invalid_value", "0.01 to 100"),
        (
            request(sampling={"min_tokens": 1, "stop_token_ids": [*range(2), *range(3, 100)]}),
            400,
            "invalid_value",
            "Every token",
        ),
        (request([1] * 60), 400, "context_length_exceeded", "68 together"),
        (request([1] * 45), 400, "context_length_exceeded", "52 tokens (45 of them the prompt)"),
        (request(lora_id=1), 400, "invalid_value", "not supported yet"),
        (request(kind="context"), 400, "invalid_value", "id is missing"),
        (generation(first_tokens=[]), 400, "invalid_value", "first_gen_tokens"),
        (generation(first_tokens=[500]), 400, "invalid_value", "Token id 500"),
        (generation(first_tokens=[5] * 9), 400, "invalid_value", "more first tokens"),
        (generation(handoff=b"\xc1rubbish"), 400, "invalid_handoff", "not what a context server gave out"),
        (
            generation(handoff=msgspec.msgpack.encode(msgspec.structs.replace(HANDOFF, protocol=99))),
            400,
            "protocol_mismatch",
            "protocol 99",
        ),
    ],
)
def test_refusals(message: Generate, status: int, code: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        intake().admit(message, 0)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert words in caught.value.message


def test_a_context_request_needs_the_prompt_s_pages_only() -> None:
    assert intake().admit(request([1] * 48, kind="context", transfer_id=1), 0).history.length == 48
    with pytest.raises(ApiError, match="cache holds 48"):
        intake().admit(request([1] * 49, kind="context", transfer_id=1), 0)


def test_a_full_queue_is_a_reason_to_come_back() -> None:
    with pytest.raises(ApiError) as caught:
        intake().admit(request(), 4)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 1


def test_without_chunked_prefill_the_prompt_must_fit_a_step() -> None:
    with pytest.raises(ApiError, match="at most 32 at once"):
        intake(chunked_prefill=False).admit(request([1] * 33), 0)


def test_without_a_transceiver_there_are_no_legs() -> None:
    with pytest.raises(ApiError) as caught:
        intake(transfers=False).admit(request(kind="context", transfer_id=1), 0)
    assert caught.value.code == "transfer_disabled"
