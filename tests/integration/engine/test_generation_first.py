"""Generation first between two engines in one process: both legs at once, and what goes wrong on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build

from kvmesh.config.transfer_backend import installed_backends
from kvmesh.engine.sequence import Phase
from kvmesh.net import faults
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.engine import Generate

BLOCK = 4
EOS = 2
PATIENCE_S = 30.0
Make = Callable[..., Any]


class EarlyPair:
    """A context and a generation engine, stepped in turn, which run both legs of a request at once."""

    def __init__(self, make_engine: Make, request_of: Make, **settings: Any) -> None:
        context = settings.pop("context", {})
        generation = settings.pop("generation", {})
        transfers = {"transfers": {"backend": "DEFAULT", **settings.pop("transfers", {})}}
        self.context = make_engine(name="context", **{**settings, **transfers, **context})
        self.generation = make_engine(name="generation", **{**settings, **transfers, **generation})
        self._request_of = request_of
        self._next_id = 1

    @property
    def sides(self) -> tuple[tuple[Any, str], tuple[Any, str]]:
        """Both engines, and how their requests' ids begin."""
        return (self.context, "c"), (self.generation, "g")

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def context_leg(self, transfer_id: int, tokens: bytes, **fields: Any) -> Generate:
        legs = {"kind": "context", "generation_first": True, **fields}
        return self._request_of(f"c{transfer_id}", tokens, transfer_id=transfer_id, **legs)

    def generation_leg(self, transfer_id: int, tokens: bytes, **fields: Any) -> Generate:
        legs = {
            "kind": "generation",
            "generation_first": True,
            "ctx_address": self.context.engine.ready.ctx_address,
            **fields,
        }
        return self._request_of(f"g{transfer_id}", tokens, transfer_id=transfer_id, **legs)

    def start(self, tokens: bytes, **fields: Any) -> tuple[Any, Any]:
        """Submit both legs; their answers to be."""
        transfer_id = self.next_id()
        self.generation.submit(self.generation_leg(transfer_id, tokens, **fields))
        self.context.submit(self.context_leg(transfer_id, tokens, **fields))
        return self.context.answers[f"c{transfer_id}"], self.generation.answers[f"g{transfer_id}"]

    def run(self, tokens: bytes, **fields: Any) -> tuple[Any, Any]:
        """Both answers."""
        answers = self.start(tokens, **fields)
        self.until(lambda: all(answer.over for answer in answers))
        return answers

    def step(self) -> None:
        self.context.step()
        self.generation.step()

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "waited too long"
            self.step()

    def check_idle(self) -> None:
        self.until(lambda: self.context.cache.open_leases == self.generation.cache.open_leases == 0)
        self.context.check_idle()
        self.generation.check_idle()


NIXL = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
PIPELINED = {**NIXL, "enable_pipelined_transfer": True}


@pytest.fixture
def pair(make_engine: Make, request_of: Make) -> EarlyPair:
    return EarlyPair(make_engine, request_of)


@pytest.fixture
def pipelined(make_engine: Make, request_of: Make) -> EarlyPair:
    """A context engine that computes 8 tokens at a time and sends while it does."""
    if "NIXL" not in installed_backends():
        pytest.skip("needs kvmesh[engine] (NIXL)")
    return EarlyPair(make_engine, request_of, transfers=NIXL, context={"max_num_tokens": 8, "transfers": PIPELINED})


SAMPLING = [
    {"max_tokens": 12},
    {"max_tokens": 12, "temperature": 0.9, "seed": 5, "top_p": 0.9},
    {"max_tokens": 12, "temperature": 0.7, "seed": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("length", [1, 4, 21, 32])
def test_both_legs_at_once_equal_one_whole_request(
    pair: EarlyPair, make_engine: Make, prompt: Make, request_of: Make, length: int, sampling: dict[str, Any]
) -> None:
    tokens = prompt(length)
    whole = make_engine().run(request_of("whole", tokens, **sampling))[0].tokens
    first, decoded = pair.run(tokens, **sampling)
    assert (first.reason, first.tokens, first.last.handoff) == ("not_finished", whole[:1], b"")
    assert (decoded.reason, decoded.tokens) == ("length", whole)
    assert decoded.last.timings.transfer_end_ns >= decoded.last.timings.transfer_start_ns > 0
    pair.check_idle()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("length", [1, 7, 8, 21, 67])
def test_a_pipelined_transfer_gives_what_one_whole_request_gives(
    pipelined: EarlyPair, make_engine: Make, prompt: Make, request_of: Make, length: int, sampling: dict[str, Any]
) -> None:
    """§6.5."""
    tokens = prompt(length)
    whole = make_engine().run(request_of("whole", tokens, **sampling))[0].tokens
    first, decoded = pipelined.run(tokens, **sampling)
    assert (first.reason, first.tokens) == ("not_finished", whole[:1])
    assert (decoded.reason, decoded.tokens) == ("length", whole)
    pipelined.check_idle()


@pytest.mark.parametrize(
    ("transfers", "settings"),
    [
        ({}, {"transfer_plane": "tcp"}),
        ({"transceiver_runtime": "CPP", "max_tokens_in_buffer": 16}, {}),
        ({"transceiver_runtime": "CPP", "kv_transfer_timeout_ms": None}, {}),
        (NIXL, {}),
    ],
    ids=["tcp", "staged in pieces", "staged without a deadline", "NIXL in one piece"],
)
def test_any_plane_will_do(
    transfers: dict[str, Any], settings: dict[str, Any], make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """§5.3: without pipelining the prompt is offered at its end, as ever."""
    if transfers is NIXL and "NIXL" not in installed_backends():
        pytest.skip("needs kvmesh[engine] (NIXL)")
    pair = EarlyPair(make_engine, request_of, transfers=transfers, max_num_tokens=16, **settings)
    whole = make_engine().run(request_of("whole", prompt(67)))[0].tokens
    assert pair.run(prompt(67))[1].tokens == whole
    pair.check_idle()


def test_a_context_request_waits_for_its_receiver_without_pages(pair: EarlyPair, prompt: Make) -> None:
    """§5.3: WAIT_SCHEDULER."""
    tokens = prompt(21)
    pair.context.submit(pair.context_leg(5, tokens))
    for _ in range(20):
        pair.step()
    executor = pair.context.executor
    assert (executor.num_waiting, executor.num_live) == (1, 1)
    assert pair.context.cache.locked == pair.context.cache.held == 0
    pair.generation.submit(pair.generation_leg(5, tokens))
    pair.until(lambda: pair.generation.answers["g5"].over)
    assert pair.generation.answers["g5"].reason == "length"
    pair.check_idle()


def test_a_context_request_whose_receiver_never_comes_fails_in_time(
    make_engine: Make, request_of: Make, prompt: Make
) -> None:
    clock = ManualClock()
    pair = EarlyPair(make_engine, request_of, transfers={"kv_transfer_timeout_ms": 5000}, clock=clock)
    pair.context.submit(pair.context_leg(5, prompt(21)))
    pair.step()
    clock.advance(4.9)
    pair.step()
    answer = pair.context.answers["c5"]
    assert not answer.over
    clock.advance(0.2)
    pair.step()
    assert (answer.failure.status, answer.failure.code) == (503, "kv_receiver_timeout")
    # Its receiver, when it comes, does not wait.
    pair.generation.submit(pair.generation_leg(5, prompt(21)))
    pair.until(lambda: pair.generation.answers["g5"].over)
    assert pair.generation.answers["g5"].failure.code == "kv_transfer_cancelled"
    pair.check_idle()


def test_only_missing_blocks_move(pair: EarlyPair, prompt: Make) -> None:
    tokens = prompt(30)
    _, once = pair.run(tokens)
    assert once.last.timings.transfer_pages == 8
    # All of its blocks but the last are here, and the last one's tokens are computed again there.
    _, again = pair.run(tokens)
    assert again.tokens == once.tokens
    assert again.last.timings.transfer_pages == 1
    other = tokens[: 4 * 22] + prompt(8, seed=9)
    _, third = pair.run(other)
    assert third.last.timings.transfer_pages == 3
    pair.check_idle()


def test_usage_is_that_of_the_context_server(pair: EarlyPair, prompt: Make) -> None:
    tokens = prompt(30)
    pair.context.run(pair._request_of("warm", tokens))
    _, decoded = pair.run(tokens)
    assert (decoded.last.ctx_usage.prompt_tokens, decoded.last.ctx_usage.cached_tokens) == (30, 29)
    assert decoded.last.cached_tokens == 0


def test_logprobs_of_the_first_token_come_along(pair: EarlyPair, make_engine: Make, prompt: Make) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "max_tokens": 5}
    whole = make_engine().run(pair._request_of("whole", prompt(21), **fields))[0]
    _, decoded = pair.run(prompt(21), **fields)
    assert [entry.token_id for entry in decoded.logprobs] == whole.tokens
    assert decoded.logprobs[0].logprob == pytest.approx(whole.logprobs[0].logprob, abs=1e-4)
    assert len(decoded.logprobs[0].top) == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 1}, "length"), ({"stop_first": True, "max_tokens": 9}, "stop")],
    ids=["max_tokens", "stop"],
)
def test_an_answer_of_one_token_needs_no_pages(
    pair: EarlyPair, prompt: Make, fields: dict[str, Any], reason: str
) -> None:
    """Both legs say the same, and nothing moves."""
    tokens = prompt(21)
    if fields.pop("stop_first", False):
        [probe] = pair.context.run(pair._request_of("probe", tokens))
        fields["stop_token_ids"] = probe.tokens[:1]
    first, decoded = pair.run(tokens, **fields)
    assert (first.reason, decoded.reason) == (reason, reason)
    assert first.tokens == decoded.tokens
    assert len(decoded.tokens) == 1
    assert decoded.last.timings.transfer_bytes == 0
    pair.check_idle()


def test_legs_that_differ_fail_the_request(pair: EarlyPair, prompt: Make) -> None:
    tokens = prompt(21)
    pair.generation.submit(pair.generation_leg(5, tokens, max_tokens=9))
    pair.context.submit(pair.context_leg(5, tokens, max_tokens=1))
    answer = pair.generation.answers["g5"]
    pair.until(lambda: answer.over)
    assert (answer.failure.status, answer.failure.code) == (502, "legs_differ")
    pair.check_idle()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"ctx_address": b""}, (400, "invalid_value")),
        ({"first_tokens": [4]}, (400, "invalid_value")),
        ({"ctx_address": b"forged"}, (403, "address_forged")),
    ],
    ids=str,
)
def test_bad_legs_fail_alone(pair: EarlyPair, prompt: Make, fields: dict[str, Any], code: tuple[int, str]) -> None:
    [answer] = pair.generation.run(pair.generation_leg(5, prompt(21), **fields))
    assert (answer.failure.status, answer.failure.code) == code
    pair.check_idle()


def test_another_prompt_gets_nothing(pair: EarlyPair, prompt: Make) -> None:
    pair.context.submit(pair.context_leg(5, prompt(21)))
    pair.generation.submit(pair.generation_leg(5, prompt(21, seed=9)))
    answer = pair.generation.answers["g5"]
    pair.until(lambda: answer.over)
    assert (answer.failure.status, answer.failure.code) == (400, "claim_mismatch")
    pair.context.executor.abort("c5")
    pair.check_idle()


def test_a_refused_generation_leg_ends_the_context_leg(pair: EarlyPair, prompt: Make) -> None:
    """It tells the context engine by itself that nobody will come."""
    pair.context.submit(pair.context_leg(5, prompt(21)))
    pair.generation.submit(pair.generation_leg(5, prompt(21), max_tokens=10_000))
    assert pair.generation.answers["g5"].failure.code == "context_length_exceeded"
    answer = pair.context.answers["c5"]
    pair.until(lambda: answer.over)
    assert answer.failure.code == "kv_transfer_cancelled"
    pair.check_idle()


@pytest.mark.parametrize("steps", range(0, 14, 2))
@pytest.mark.parametrize("side", ["context", "generation", "both"])
def test_a_request_may_be_aborted_at_any_time(pipelined: EarlyPair, prompt: Make, steps: int, side: str) -> None:
    """The other leg does not wait, and every page comes back."""
    legs = pipelined.start(prompt(67))
    for _ in range(steps):
        pipelined.step()
    if side != "generation":
        pipelined.context.executor.abort("c2")
    if side != "context":
        pipelined.generation.executor.abort("g2")
    pipelined.until(lambda: all(leg.over for leg in legs))
    pipelined.check_idle()
    first, decoded = pipelined.run(prompt(40, seed=5))
    assert (first.reason, decoded.reason) == ("not_finished", "length"), "the next request is served"
    pipelined.check_idle()


@pytest.mark.parametrize("point", ["transceiver.before_send", "transceiver.after_write", "engine.before_handoff"])
def test_a_fault_while_slices_go_out_fails_both_legs(pipelined: EarlyPair, prompt: Make, point: str) -> None:
    hits = iter(range(100))

    def fail() -> None:
        if next(hits) >= (1 if point.startswith("transceiver") else 0):
            raise faults.FaultInjectedError("injected")

    legs = pipelined.start(prompt(67))
    with faults.injected(point, fail):
        pipelined.until(lambda: all(leg.over for leg in legs))
    assert legs[1].failure.code in ("transfer_failed", "kv_transfer_cancelled")
    pipelined.check_idle()
    assert pipelined.run(prompt(40, seed=5))[1].reason == "length"


def test_each_slice_goes_out_while_the_next_chunk_is_computed(pipelined: EarlyPair, prompt: Make) -> None:
    """Most of the pages are there before the last chunk is computed."""
    legs = pipelined.start(prompt(67))
    context = pipelined.context.engine
    moved_at: dict[int, int] = {}

    def look() -> bool:
        open_sessions = list(context.executor._desk.transceiver._sender.table.open.values())
        for seq in context.executor._live.values():
            moved_at[seq.num_computed] = sum(session.num_pages for session in open_sessions)
        return all(leg.over for leg in legs)

    pipelined.until(look)
    assert [moved_at.get(computed) for computed in (8, 16, 64)] == [2, 4, 16]
    assert legs[1].last.timings.transfer_pages == 17


def test_a_pipelined_server_refuses_context_first(pipelined: EarlyPair, prompt: Make) -> None:
    """T18: but an answer of one token, a whole request, and the generation side."""
    context = pipelined.context
    [answer] = context.run(pipelined.context_leg(5, prompt(21), generation_first=False))
    assert (answer.failure.status, answer.failure.code) == (400, "not_pipelined")
    assert "schedule_style generation_first" in answer.failure.message
    [one] = context.run(pipelined.context_leg(6, prompt(21), generation_first=False, max_tokens=1))
    assert one.reason == "length"
    [whole] = context.run(pipelined._request_of("whole", prompt(21)))
    assert whole.reason == "length"
    pipelined.check_idle()


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("transfers", ["whole", "pipelined"])
def test_models_with_windows(
    family: str, v2: bool, transfers: str, make_engine: Make, request_of: Make, prompt: Make, tmp_path: Path
) -> None:
    """§6.5: windowed groups are sent whole at the end."""
    if transfers == "pipelined" and "NIXL" not in installed_backends():
        pytest.skip("needs kvmesh[engine] (NIXL)")
    reference = build(family)
    reference.save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "max_num_tokens": 16, "cache": {"use_kv_cache_manager_v2": v2}}
    sides = {"transfers": NIXL, "context": {"transfers": PIPELINED}} if transfers == "pipelined" else {}
    pair = EarlyPair(make_engine, request_of, **settings, **sides)
    for length in (3, 19, 50):
        tokens = prompt(length, length)
        for _ in range(2):
            ids = torch.from_numpy(np.frombuffer(tokens, dtype=np.int32).astype(np.int64))[None]
            reference.generation_config.eos_token_id = None
            expected = reference.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            answer = pair.run(tokens)[1]
            assert answer.tokens == expected.tolist(), answer.failure
    pair.check_idle()


def test_a_prompt_that_is_being_sent_is_not_preempted(make_engine: Make, request_of: Make, prompt: Make) -> None:
    """It has its pages reserved, and whoever is in its way gives way."""
    if "NIXL" not in installed_backends():
        pytest.skip("needs kvmesh[engine] (NIXL)")
    context = {"max_num_tokens": 8, "transfers": PIPELINED, "tokens": 120}
    pair = EarlyPair(make_engine, request_of, transfers=NIXL, context=context)
    whole = [request_of(f"whole-{number}", prompt(40, seed=number), priority=5, max_tokens=40) for number in range(3)]
    for request in whole:
        pair.context.submit(request)
    legs = [pair.start(prompt(67, seed=10 + number)) for number in range(3)]
    sending: dict[str, int] = {}

    def over() -> bool:
        for seq in pair.context.executor._live.values():
            if seq.pipelined:
                before = sending.get(seq.request_id, 0)
                assert seq.num_computed >= before, "what was computed and sent is kept"
                assert seq.phase is not Phase.SUSPENDED
                sending[seq.request_id] = seq.num_computed
        answers = [pair.context.answers[request.request_id] for request in whole]
        return all(answer.over for leg in legs for answer in leg) and all(answer.over for answer in answers)

    pair.until(over)
    assert [leg[1].reason for leg in legs] == ["length"] * 3
    assert pair.context.executor.counters.preemptions > 0, "pages were short"
    pair.check_idle()


@pytest.mark.parametrize("transfers", ["whole", "pipelined"])
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_32_requests_at_once_never_deadlock(
    transfers: str, policy: str, make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """Pools with room for two or three prompts on each side, and legs that arrive in different orders."""
    if transfers == "pipelined" and "NIXL" not in installed_backends():
        pytest.skip("needs kvmesh[engine] (NIXL)")
    order = random.Random(7)
    pipelined = {"transfers": PIPELINED} if transfers == "pipelined" else {}
    pair = EarlyPair(
        make_engine,
        request_of,
        transfers=NIXL if pipelined else {},
        scheduler_policy=policy,
        context={"max_num_tokens": 16, "tokens": 160, **pipelined},
        generation={"tokens": 200},
    )
    prompts = {number: prompt(order.randrange(4, 70), seed=number) for number in range(100, 132)}
    reference = make_engine()
    expected = {
        number: reference.run(request_of(f"r{number}", tokens, max_tokens=8))[0].tokens
        for number, tokens in prompts.items()
    }
    for side, leg in ((pair.context, pair.context_leg), (pair.generation, pair.generation_leg)):
        numbers = list(prompts)
        order.shuffle(numbers)
        for number in numbers:
            side.submit(leg(number, prompts[number], max_tokens=8))
    answers = [side.answers[f"{kind}{number}"] for number in prompts for side, kind in pair.sides]
    pair.until(lambda: all(answer.over for answer in answers))
    assert {number: pair.generation.answers[f"g{number}"].tokens for number in prompts} == expected
    pair.check_idle()


@pytest.mark.parametrize("transfers", ["whole", "pipelined"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_leave_nothing_behind(
    transfers: str, seed: int, make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """Legs that come late or never, that are aborted on either side, and pools that are too small for all of them."""
    if transfers == "pipelined" and "NIXL" not in installed_backends():
        pytest.skip("needs kvmesh[engine] (NIXL)")
    order = random.Random(seed)
    pipelined = {"transfers": PIPELINED} if transfers == "pipelined" else {}
    pair = EarlyPair(
        make_engine,
        request_of,
        transfers=NIXL if pipelined else {},
        context={"max_num_tokens": 16, "tokens": 160, **pipelined},
        generation={"tokens": 200},
    )
    prefix = prompt(24)
    sides = {"c": (pair.context, pair.context_leg), "g": (pair.generation, pair.generation_leg)}
    to_come: list[tuple[str, int]] = []
    for number in range(200, 240):
        legs = [(kind, number) for kind in "cg" if order.random() > 0.1]
        to_come += legs
    order.shuffle(to_come)
    to_come.sort(key=lambda leg: leg[1] // 8)
    asked: list[tuple[str, int]] = []
    while to_come or any(not sides[kind][0].answers[f"{kind}{number}"].over for kind, number in asked):
        if to_come and order.random() < 0.5:
            kind, number = to_come.pop(0)
            side, leg = sides[kind]
            tokens = (prefix if number % 3 else b"") + prompt(4 + number % 40, seed=number)
            side.submit(leg(number, tokens, max_tokens=1 + number % 9))
            asked.append((kind, number))
        if asked and order.random() < 0.1:
            kind, number = order.choice(asked)
            sides[kind][0].executor.abort(f"{kind}{number}")
        pair.step()
        if not to_come:
            # Whoever is alone would wait for its deadline.
            for kind, number in asked:
                other = f"{'g' if kind == 'c' else 'c'}{number}"
                partner = sides["g" if kind == "c" else "c"][0].answers.get(other)
                if partner is None or (partner.over and partner.reason in (None, "cancelled")):
                    sides[kind][0].executor.abort(f"{kind}{number}")
    for number in range(200, 240):
        answers = [sides[kind][0].answers.get(f"{kind}{number}") for kind in "cg"]
        if all(answer is not None and answer.reason in ("not_finished", "length") for answer in answers):
            assert answers[1].tokens[:1] == answers[0].tokens
    pair.check_idle()
    assert pair.run(prompt(40, seed=999))[1].reason == "length"
    pair.check_idle()
