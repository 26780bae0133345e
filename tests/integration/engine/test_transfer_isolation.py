"""Whatever moving one request's pages raises ends that request, and neither the engine nor anybody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.protocol.transfer import Aux
from kvmesh.transceiver import TransceiverDeadError, early_sender

PATIENCE_S = 20.0
Make = Callable[..., Any]


def defect(*_: Any, **__: Any) -> None:
    raise IndexError("a defect")


class Pair:
    """A context and a generation engine, stepped in turn, whose requests run both legs at once."""

    def __init__(self, make_engine: Make, request_of: Make) -> None:
        self.context = make_engine(name="context", transfers={"backend": "DEFAULT"})
        self.generation = make_engine(name="generation", transfers={"backend": "DEFAULT"})
        self._request_of = request_of

    @property
    def sides(self) -> tuple[Any, Any]:
        return self.context, self.generation

    def both(self, number: int, tokens: bytes) -> list[Any]:
        """Generation first: the answers of both legs."""
        early = {"generation_first": True, "transfer_id": number}
        self.context.submit(self._request_of(f"c{number}", tokens, kind="context", **early))
        address = self.context.engine.ready.ctx_address
        generation = self._request_of(f"g{number}", tokens, kind="generation", ctx_address=address, **early)
        self.generation.submit(generation)
        return [self.context.answers[f"c{number}"], self.generation.answers[f"g{number}"]]

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "waited too long"
            for side in self.sides:
                side.step()

    def check_works(self, tokens: bytes) -> None:
        """Nothing is left behind, and the next request is answered."""
        self.until(lambda: not any(side.cache.open_leases for side in self.sides))
        answers = self.both(99, tokens)
        self.until(lambda: all(answer.over for answer in answers))
        assert [answer.reason for answer in answers] == ["not_finished", "length"]
        self.until(lambda: not any(side.cache.open_leases for side in self.sides))
        for side in self.sides:
            side.check_idle()


@pytest.fixture
def pair(make_engine: Make, request_of: Make) -> Pair:
    return Pair(make_engine, request_of)


@pytest.mark.parametrize(
    ("side", "method"),
    [("context", "make_parts"), ("generation", "claim_and_receive"), ("generation", "take_aux")],
)
def test_a_defect_in_moving_one_prompt(
    pair: Pair, prompt: Make, monkeypatch: pytest.MonkeyPatch, side: str, method: str
) -> None:
    """§8: no request ends the engine."""
    where = pair.context if side == "context" else pair.generation
    with monkeypatch.context() as patch:
        # What comes with a prompt is used by the executor, and the token ids in it may be none.
        broken = defect if method != "take_aux" else lambda _transfer_id: Aux(first_tokens=[], seed=1, prompt_tokens=1)
        owner = early_sender if method == "make_parts" else where.executor._desk.transceiver
        patch.setattr(owner, method, broken)
        legs = pair.both(7, prompt(9))
        own = legs[0] if side == "context" else legs[1]
        pair.until(lambda: own.over)
        assert own.failure.status == 500
        assert "could not be moved" in own.failure.message
        for answered, name in zip(legs, ("c7", "g7"), strict=True):
            if not answered.over:
                (pair.context if name == "c7" else pair.generation).executor.abort(name)
        pair.until(lambda: all(leg.over for leg in legs))
    pair.check_works(prompt(9))


@pytest.mark.parametrize("method", ["respond_and_send", "request_and_receive"])
def test_a_defect_in_a_hand_off(
    pair: Pair, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    side = pair.context if method == "respond_and_send" else pair.generation
    with monkeypatch.context() as patch:
        patch.setattr(side.executor._desk.transceiver, method, defect)
        [first] = pair.context.run(request_of("c7", prompt(9), kind="context", transfer_id=7))
        failed = first
        if side is pair.generation:
            fields = {"kind": "generation", "first_tokens": first.tokens, "handoff": first.last.handoff}
            [failed] = pair.generation.run(request_of("g7", prompt(9), transfer_id=7, **fields))
            pair.context.executor.abort("c7")
        assert failed.failure.status == 500
    pair.check_works(prompt(9))


def test_an_engine_without_transfers_ends(pair: Pair, prompt: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is isolated is a request: where no transfer can go on, the process must die and be replaced."""

    def dead(*_: Any) -> None:
        raise TransceiverDeadError("a transfer thread ended")

    monkeypatch.setattr(pair.generation.executor._desk.transceiver, "claim_and_receive", dead)
    pair.both(7, prompt(9))
    with pytest.raises(TransceiverDeadError):
        pair.until(lambda: False)
