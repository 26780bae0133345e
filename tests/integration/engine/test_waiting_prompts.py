"""A prompt that waits to be fetched makes way for others, and is read from the host tier when its receiver comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
TOKENS = 64
"""Of the context server's device: two prompts do not fit."""


@pytest.mark.parametrize("plane", ["memfd", "tcp", "nixl"])
@pytest.mark.parametrize("num_waiting", [1, 3])
def test_prompts_that_wait_go_to_the_host_tier_and_arrive(
    make_engine: Make, prompt: Make, request_of: Make, plane: str, num_waiting: int
) -> None:
    way = {"transfers": {"backend": "NIXL"}} if plane == "nixl" else {"transfer_plane": plane}
    transfers = {"transfers": {"backend": "DEFAULT"}, **way}
    context = make_engine(
        name="context", tokens=TOKENS, cache={"host_cache_size": 1 << 20, "use_kv_cache_manager_v2": True}, **transfers
    )
    generation = make_engine(name="generation", **transfers)
    whole = make_engine(name="whole")
    length = TOKENS * 5 // 8

    handed: list[tuple[int, bytes, Any]] = []
    for number in range(num_waiting + 1):
        tokens = prompt(length, number)
        request = request_of(f"c{number}", tokens, kind="context", transfer_id=number + 1, max_tokens=8)
        handed.append((number + 1, tokens, context.run(request)[0]))
        assert handed[-1][2].reason == "not_finished"
    offloaded = context.cache.counters.offloaded_pages
    assert offloaded >= 3 * num_waiting, "there was no room for all of them on the device"

    for transfer_id, tokens, first in handed:
        expected = whole.run(request_of(f"w{transfer_id}", tokens, max_tokens=8))[0].tokens
        request = request_of(
            f"g{transfer_id}",
            tokens,
            kind="generation",
            transfer_id=transfer_id,
            first_tokens=first.tokens,
            handoff=first.last.handoff,
            max_tokens=8,
        )
        generation.submit(request)
        decoded = generation.answers[request.request_id]
        while not decoded.over:
            context.step()
            generation.step()
        assert decoded.tokens == expected
    while context.cache.open_leases:
        context.step()
    context.check_idle()
    generation.check_idle()


def test_without_a_host_tier_the_next_prompt_waits(make_engine: Make, prompt: Make, request_of: Make) -> None:
    context = make_engine(name="context", tokens=TOKENS, cache={"host_cache_size": 0}, transfers={"backend": "DEFAULT"})
    for number in range(2):
        context.submit(
            request_of(f"c{number}", prompt(40, number), kind="context", transfer_id=number + 1, max_tokens=8)
        )
    for _ in range(20):
        context.step()
    assert context.answers["c0"].over
    assert not context.answers["c1"].over
    context.executor.abort("c0")
    while not context.answers["c1"].over:
        context.step()
    assert context.answers["c1"].reason == "not_finished"
    context.executor.abort("c1")
    while context.cache.open_leases:
        context.step()
    context.check_idle()
