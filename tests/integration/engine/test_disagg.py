"""Two engines in one process: prefill here, pages there, decode on; and what goes wrong on the way."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.models.checkpoint import fingerprint
from kvmesh.net import faults
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.engine import Generate, LedgerUpdate

BLOCK = 4
EOS = 2
PATIENCE_S = 20.0
Make = Callable[..., Any]

BUILTIN = {"backend": "DEFAULT"}


class Pair:
    """A context and a generation engine, stepped in turn."""

    def __init__(self, make_engine: Make, request_of: Make, **settings: Any) -> None:
        context = {**settings, **settings.pop("context", {})}
        generation = {**settings, **settings.pop("generation", {})}
        for extra in ("context", "generation"):
            context.pop(extra, None)
            generation.pop(extra, None)
        transfers = {"transfers": {**BUILTIN, **settings.pop("transfers", {})}}
        self.context = make_engine(name="context", **{**context, **transfers})
        self.generation = make_engine(name="generation", **{**generation, **transfers})
        self._request_of = request_of
        self._next_id = 1

    def prefill(self, tokens: bytes, **fields: Any) -> Any:
        """Run the context leg; returns its answer and what the generation leg needs."""
        transfer_id, self._next_id = self._next_id, self._next_id + 1
        request = self._request_of(f"c{transfer_id}", tokens, kind="context", transfer_id=transfer_id, **fields)
        return transfer_id, self.context.run(request)[0]

    def decode_request(self, transfer_id: int, tokens: bytes, answer: Any, **fields: Any) -> Generate:
        legs = {"kind": "generation", "first_tokens": answer.tokens, "handoff": answer.last.handoff, **fields}
        return self._request_of(f"g{transfer_id}", tokens, transfer_id=transfer_id, **legs)

    def step(self) -> None:
        self.context.step()
        self.generation.step()

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "waited too long"
            self.step()

    def decode(self, transfer_id: int, tokens: bytes, answer: Any, **fields: Any) -> Any:
        request = self.decode_request(transfer_id, tokens, answer, **fields)
        self.generation.submit(request)
        decoded = self.generation.answers[request.request_id]
        self.until(lambda: decoded.over)
        return decoded

    def check_idle(self) -> None:
        self.until(lambda: self.context.cache.open_leases == self.generation.cache.open_leases == 0)
        self.context.check_idle()
        self.generation.check_idle()


@pytest.fixture
def pair(make_engine: Make, request_of: Make) -> Pair:
    return Pair(make_engine, request_of)


SAMPLING = [
    {"max_tokens": 12},
    {"max_tokens": 12, "temperature": 0.9, "seed": 5, "top_p": 0.9},
    {"max_tokens": 12, "temperature": 0.7, "seed": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"max_tokens": 12, "presence_penalty": 1.5},
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("length", [1, 4, 21, 32])
def test_two_legs_equal_one_whole_request(
    pair: Pair, make_engine: Make, prompt: Make, request_of: Make, length: int, sampling: dict[str, Any]
) -> None:
    tokens = prompt(length)
    whole = make_engine().run(request_of("whole", tokens, **sampling))[0].tokens
    transfer_id, first = pair.prefill(tokens, **sampling)
    assert (first.reason, first.tokens) == ("not_finished", whole[:1])
    decoded = pair.decode(transfer_id, tokens, first, **sampling)
    assert (decoded.reason, decoded.tokens) == ("length", whole)
    assert decoded.last.timings.transfer_end_ns >= decoded.last.timings.transfer_start_ns > 0
    pair.check_idle()


def test_only_missing_blocks_are_asked_for(pair: Pair, prompt: Make) -> None:
    tokens = prompt(30)
    first_id, first = pair.prefill(tokens)
    once = pair.decode(first_id, tokens, first)
    moved = pair.generation.engine.reporter._statistics(pair.generation.cache).transfer_pages_total
    assert moved == 8
    page_bytes = pair.generation.engine.ready.page_bytes
    assert (once.last.timings.transfer_pages, once.last.timings.transfer_bytes) == (8, 8 * page_bytes)
    # The same prompt again: everything is here, and nothing is moved.
    again_id, again = pair.prefill(tokens)
    held = pair.decode(again_id, tokens, again)
    assert held.last.cached_tokens == 30
    assert (held.last.timings.transfer_pages, held.last.timings.transfer_bytes) == (0, 0)
    # Another ending: three of its eight blocks differ, and the one that begins alike is asked for whole.
    other = tokens[: 4 * 22] + prompt(8, seed=9)
    other_id, other_first = pair.prefill(other)
    decoded = pair.decode(other_id, other, other_first)
    assert decoded.last.cached_tokens == 20
    assert decoded.last.timings.transfer_pages == 3
    stats = pair.generation.engine.reporter._statistics(pair.generation.cache)
    assert stats.transfer_pages_total == moved + 3
    assert stats.transfer_pages_reused_total == 8 + 5
    assert once.tokens != decoded.tokens
    pair.check_idle()


def test_an_owner_that_has_not_looked_holds_nothing_up(pair: Pair, prompt: Make) -> None:
    """A prompt was read on loan: its reader goes on, and may end, without a word of the owner."""
    first_id, first = pair.prefill(prompt(9, seed=9))
    pair.decode(first_id, prompt(9, seed=9), first)  # They know each other now.
    pair.check_idle()
    transfer_id, second = pair.prefill(prompt(10, seed=10))
    leg = pair.decode_request(transfer_id, prompt(10, seed=10), second)
    generation = pair.generation.engine
    pair.context.bell.silence()
    pair.generation.run(leg)  # Only this side steps.
    assert generation.reporter._statistics(pair.generation.cache).transfers_borrowed_total == 1
    assert pair.generation.cache.open_leases == 0
    assert not generation.executor.has_unfinished_business, "a drain ends here"
    assert generation.executor.transfer_wait_s() is None
    assert pair.context.bell.wait(0), "an owner that waits is woken"
    assert pair.context.cache.open_leases == 1
    pair.context.step()
    assert pair.context.cache.open_leases == 0
    pair.check_idle()


def test_received_pages_are_reusable(pair: Pair, prompt: Make, request_of: Make) -> None:
    tokens = prompt(33)
    transfer_id, first = pair.prefill(tokens)
    whole = pair.decode(transfer_id, tokens, first)
    local = pair.generation.run(request_of("local", tokens))[0]
    assert local.last.cached_tokens == 32
    assert local.tokens == whole.tokens


def test_nothing_is_handed_over_when_the_first_token_is_the_last(pair: Pair, prompt: Make) -> None:
    _, answer = pair.prefill(prompt(9), max_tokens=1)
    assert (answer.reason, answer.last.handoff) == ("length", b"")
    _, answer = pair.prefill(prompt(9), logit_bias={EOS: 100.0}, ignore_eos=False)
    assert (answer.reason, answer.last.handoff, answer.last.stop_token_id) == ("stop", b"", EOS)
    pair.check_idle()


def test_a_received_sequence_survives_preemption(make_engine: Make, prompt: Make, request_of: Make) -> None:
    pair = Pair(make_engine, request_of, generation={"tokens": 90})
    prompts = [prompt(17 + i, i) for i in range(5)]
    legs = [pair.prefill(tokens, max_tokens=40) for tokens in prompts]
    requests = [
        pair.decode_request(transfer_id, tokens, first, max_tokens=40)
        for (transfer_id, first), tokens in zip(legs, prompts, strict=True)
    ]
    for request in requests:
        pair.generation.submit(request)
    pair.until(lambda: all(answer.over for answer in pair.generation.answers.values()))
    alone = make_engine()
    for request, tokens in zip(requests, prompts, strict=True):
        expected = alone.run(request_of(request.request_id, tokens, max_tokens=40))[0].tokens
        assert pair.generation.answers[request.request_id].tokens == expected
    assert pair.generation.executor.counters.preemptions > 0
    pair.check_idle()


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"handoff": b"\x00"}, 400, "invalid_handoff"),
        ({"first_tokens": []}, 400, "invalid_value"),
        ({"prompt": 8}, 400, "ticket_mismatch"),
        ({"other_prompt": True}, 400, "ticket_mismatch"),
        ({"cache_salt": "x"}, 400, "ticket_mismatch"),
        ({"forge": True}, 403, "ticket_forged"),
        ({"transfer_id": 999}, 403, "ticket_mismatch"),
    ],
)
def test_a_bad_hand_off_fails_only_its_request(
    pair: Pair, prompt: Make, request_of: Make, change: dict[str, Any], status: int, code: str
) -> None:
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    pair.generation.submit(request_of("bystander", prompt(12, 4)))
    request = pair.decode_request(transfer_id, tokens, first)
    if change.pop("forge", False):
        handoff = msgspec.msgpack.decode(request.handoff, type=HandOff)
        ticket = handoff.ticket[:-1] + bytes([handoff.ticket[-1] ^ 1])
        change["handoff"] = msgspec.msgpack.encode(msgspec.structs.replace(handoff, ticket=ticket))
    if length := change.pop("prompt", 0):
        change["prompt_token_ids"] = prompt(length)
    if change.pop("other_prompt", False):
        change["prompt_token_ids"] = prompt(9, 1)
    request = msgspec.structs.replace(request, **change)
    pair.generation.submit(request)
    pair.until(lambda: all(answer.over for answer in pair.generation.answers.values()))
    failure = pair.generation.answers[request.request_id].failure
    assert (failure.status, failure.code) == (status, code)
    assert pair.generation.answers["bystander"].reason == "length"
    refused = pair.generation.engine.reporter._statistics(pair.generation.cache).transfers_refused_total
    assert (refused > 0) is ((code or "").startswith("ticket_")), "forged and misused tickets are counted"
    pair.generation.check_idle()


def test_pages_of_one_prompt_do_not_become_another_s(
    pair: Pair, make_engine: Make, prompt: Make, request_of: Make
) -> None:
    """A hand-off in a request with another prompt of the same length leaves nothing to reuse in the cache."""
    expected = make_engine().run(request_of("whole", prompt(21, 1)))[0].tokens
    transfer_id, first = pair.prefill(prompt(21))
    failure = pair.decode(transfer_id, prompt(21, 1), first).failure
    assert (failure.status, failure.error_type, failure.code) == (400, "invalid_request_error", "ticket_mismatch")
    assert "another prompt" in failure.message
    [answer] = pair.generation.run(request_of("victim", prompt(21, 1)))
    assert (answer.last.cached_tokens, answer.tokens) == (0, expected)
    pair.context.executor.abort(f"c{transfer_id}")
    pair.check_idle()


def test_declined_pages_go_back_at_once(pair: Pair, prompt: Make) -> None:
    """A generation request that is refused or leaves while it waits gives the context server its pages back."""
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    pair.generation.submit(pair.decode_request(transfer_id, tokens, first, max_tokens=5000))
    assert pair.generation.answers[f"g{transfer_id}"].failure.status == 400
    pair.check_idle()
    transfer_id, first = pair.prefill(tokens)
    pair.generation.submit(pair.decode_request(transfer_id, tokens, first))
    pair.generation.executor.abort(f"g{transfer_id}")
    pair.check_idle()


def test_other_weights_under_the_same_name_do_not_pair(
    make_engine: Make, prompt: Make, request_of: Make, retrained_model: Path, tiny_model: Path
) -> None:
    pair = Pair(make_engine, request_of, context={"model": str(retrained_model)})
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    failure = pair.decode(transfer_id, tokens, first).failure
    assert (failure.status, failure.code) == (503, "pairing_refused")
    contents = [fingerprint(path)[:12] for path in (tiny_model, retrained_model)]
    assert contents[0] != contents[1]
    for content in contents:
        assert f"model {tiny_model.name} with content {content}" in failure.message
    pair.context.executor.abort(f"c{transfer_id}")
    pair.check_idle()


def test_a_copy_under_another_name_pairs(
    make_engine: Make, prompt: Make, request_of: Make, tiny_model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "another-name")
    pair = Pair(make_engine, request_of, context={"model": str(copy)})
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    assert pair.decode(transfer_id, tokens, first).reason == "length"


def test_a_replayed_ticket_is_counted(pair: Pair, prompt: Make, request_of: Make) -> None:
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    assert pair.decode(transfer_id, tokens, first).reason == "length"
    pair.check_idle()
    replay = msgspec.structs.replace(pair.decode_request(transfer_id, tokens, first), request_id="replay")
    pair.generation.submit(replay)
    pair.until(lambda: pair.generation.answers["replay"].over)
    assert pair.generation.answers["replay"].failure.code == "ticket_replayed"
    owner = pair.context.engine.reporter._statistics(pair.context.cache)
    receiver = pair.generation.engine.reporter._statistics(pair.generation.cache)
    assert (owner.transfers_refused_total, receiver.transfers_refused_total) == (1, 0)
    assert (owner.transfer_links, receiver.transfer_links) == (1, 1)
    pair.check_idle()
    transfer_id, _ = pair.prefill(tokens)
    pair.context.executor.abort(f"c{transfer_id}")
    pair.check_idle()
    assert pair.context.engine.reporter._statistics(pair.context.cache).transfers_cancelled_total == 1


def test_a_fault_before_the_hand_off_is_its_request_s_alone(pair: Pair, prompt: Make, request_of: Make) -> None:
    def broken() -> None:
        raise faults.FaultInjectedError("injected fault")

    bystander = request_of("bystander", prompt(12, 4))
    with faults.injected("engine.before_handoff", broken):
        victim = request_of("c99", prompt(9), kind="context", transfer_id=99)
        answers = pair.context.run(victim, bystander)
    assert (answers[0].failure.status, answers[0].failure.code) == (500, "model_error")
    assert answers[1].reason == "length"
    pair.check_idle()
    transfer_id, first = pair.prefill(prompt(9))
    assert pair.decode(transfer_id, prompt(9), first).reason == "length"


def test_abort_after_the_hand_off_frees_the_context_s_pages(pair: Pair, prompt: Make) -> None:
    transfer_id, _ = pair.prefill(prompt(9))
    assert pair.context.cache.open_leases == 1
    pair.context.executor.abort(f"c{transfer_id}")
    pair.check_idle()


def test_aborts_in_every_phase_lose_no_page(make_engine: Make, prompt: Make, request_of: Make) -> None:
    pair = Pair(make_engine, request_of, tokens=400, max_num_tokens=16)
    rng = random.Random(7)
    open_ids: list[str] = []
    legs: list[tuple[int, bytes, Any]] = []
    for index in range(1, 80):
        tokens = prompt(1 + rng.randrange(40), rng.randrange(5))
        pair.context.submit(request_of(f"c{index}", tokens, kind="context", transfer_id=index))
        for _ in range(rng.randrange(4)):
            pair.step()
        if rng.random() < 0.3:
            pair.context.executor.abort(f"c{index}")
        legs.append((index, tokens, pair.context.answers[f"c{index}"]))
        for leg in list(legs):
            transfer_id, prompt_tokens, answer = leg
            if not answer.over:
                continue
            legs.remove(leg)
            if answer.reason == "not_finished" and rng.random() < 0.8:
                pair.generation.submit(pair.decode_request(transfer_id, prompt_tokens, answer))
                open_ids.append(f"g{transfer_id}")
            else:
                pair.context.executor.abort(f"c{transfer_id}")
        for name in list(open_ids):
            if rng.random() < 0.2:
                pair.generation.executor.abort(name)
                open_ids.remove(name)
        pair.step()
    for transfer_id, _, _ in legs:
        pair.context.executor.abort(f"c{transfer_id}")
    pair.until(lambda: pair.generation.executor.num_live == pair.context.executor.num_live == 0)
    pair.check_idle()
    pair._next_id = 1000
    transfer_id, first = pair.prefill(prompt(20, 99))
    assert pair.decode(transfer_id, prompt(20, 99), first).reason == "length"


def test_a_dead_sender_is_an_error_and_no_page_is_lost(make_engine: Make, prompt: Make, request_of: Make) -> None:
    pair = Pair(make_engine, request_of)
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    pair.context.engine.close()
    pair.generation.submit(pair.decode_request(transfer_id, tokens, first, deadline_s=PATIENCE_S))
    for _ in range(3):
        pair.generation.step()
    pair.generation.executor.peer_dead("context", 1)
    answer = pair.generation.answers[f"g{transfer_id}"]
    end_s = time.monotonic() + PATIENCE_S
    while not (answer.over and pair.generation.cache.open_leases == 0):
        assert time.monotonic() < end_s
        pair.generation.step()
    assert answer.failure.status in (502, 503)
    pair.generation.check_idle()


def test_the_ledger_tells_both_sides(pair: Pair, prompt: Make) -> None:
    tokens = prompt(9)
    transfer_id, first = pair.prefill(tokens)
    pair.decode(transfer_id, tokens, first)
    pair.check_idle()
    pair.step()
    for bench, side in ((pair.context, "context"), (pair.generation, "generation")):
        entries = [entry for message in bench.messages if isinstance(message, LedgerUpdate) for entry in message.events]
        assert {(entry.transfer_id, entry.side) for entry in entries} == {(transfer_id, side)}
        assert entries[-1].state == "completed"
