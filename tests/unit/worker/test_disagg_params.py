"""Which transfer, and which leg of it, ``disaggregated_params`` mean (semantics §5.1)."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from kvmesh.protocol.disagg import DisaggregatedParams, HandOff
from kvmesh.protocol.errors import ApiError
from kvmesh.worker.disagg import leg_of

HANDOFF = base64.b64encode(
    msgspec.msgpack.encode(
        HandOff(ticket=b"t", control_endpoint="tcp://127.0.0.1:1", instance_id="c", epoch=1, layout_digest="d", seed=7)
    )
).decode()


def params(**fields: Any) -> DisaggregatedParams:
    return DisaggregatedParams(request_type="context_only", **fields)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"ctx_request_id": 5, "disagg_request_id": 6}, 5),
        ({"disagg_request_id": 6}, 6),
        ({"ctx_request_id": 5}, 5),
        ({"disagg_request_id": 2**63 - 1}, 2**63 - 1),
    ],
)
def test_the_context_servers_id_is_the_transfers_key_and_else_the_meshs(fields: dict[str, int], key: int) -> None:
    """§5.1: a retry makes a new mesh-wide id for the generation leg only, so the context server's id comes first."""
    assert leg_of(params(**fields), "context").transfer_id == key
    generation = DisaggregatedParams(
        request_type="generation_only", encoded_opaque_state=HANDOFF, first_gen_tokens=[1], **fields
    )
    assert leg_of(generation, "generation").transfer_id == key


@pytest.mark.parametrize("wrong", [0, -1, 2**63])
def test_ids_are_positive_63_bit_integers(wrong: int) -> None:
    with pytest.raises(ApiError, match="63-bit") as caught:
        leg_of(params(disagg_request_id=wrong), "context")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"request_type": "context_only"}, "choose a positive 63-bit integer"),
        ({"request_type": "context_only", "schedule_style": 1}, "choose a positive 63-bit integer"),
        (
            {"request_type": "generation_only", "schedule_style": 1, "encoded_opaque_state": HANDOFF},
            "choose a positive 63-bit integer",
        ),
        (
            {"request_type": "generation_only", "first_gen_tokens": [1], "encoded_opaque_state": HANDOFF},
            "it comes from the context server's answer",
        ),
    ],
)
def test_a_leg_without_any_id_is_told_where_it_comes_from(fields: dict[str, Any], source: str) -> None:
    """Only a generation leg that follows its context leg has an answer to take it from."""
    with pytest.raises(ApiError, match=f"'disagg_request_id' is missing; {source}") as caught:
        leg_of(DisaggregatedParams(**fields), "both")
    assert (caught.value.status, caught.value.param) == (400, "disaggregated_params.disagg_request_id")


@pytest.mark.parametrize(("style", "generation_first"), [(None, False), (0, False), (1, True)])
def test_the_schedule_style_says_who_comes_first(style: int | None, generation_first: bool) -> None:
    """§5.1: 0 is context first, 1 is generation first."""
    fields = {} if style is None else {"schedule_style": style}
    assert leg_of(params(disagg_request_id=6, **fields), "context").generation_first is generation_first


def test_another_schedule_style_is_refused() -> None:
    with pytest.raises(ApiError, match="'schedule_style' is 2"):
        leg_of(params(disagg_request_id=6, schedule_style=2), "context")


@pytest.mark.parametrize("role", ["context", "both"])
def test_whole_requests_have_no_transfer(role: Any) -> None:
    if role == "context":
        with pytest.raises(ApiError, match="context server"):
            leg_of(None, role)
    else:
        assert leg_of(None, role).kind == "aggregated"
        assert leg_of(None, role).transfer_id == 0
