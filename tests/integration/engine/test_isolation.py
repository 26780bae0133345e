"""What one request breaks ends that request and no other of its batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvmesh.engine.sequence import Sequence

Make = Callable[..., Any]


def test_a_batch_that_raises_is_tried_again_one_by_one(
    make_engine: Make, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request_of(f"r{i}", prompt(5 + i, i), temperature=0.8, seed=i) for i in range(3)]
    alone = make_engine()
    expected = [alone.run(request)[0].tokens for request in requests]
    bench = make_engine()
    runner = bench.executor._runner
    real = runner.run
    batches: list[list[str]] = []

    def broken(chunks: Any) -> torch.Tensor:
        batches.append([chunk.seq.request_id for chunk in chunks])
        if any(chunk.seq.request_id == "culprit" and chunk.seq.is_decoding for chunk in chunks):
            raise IndexError("index out of range in self")
        return real(chunks)

    monkeypatch.setattr(runner, "run", broken)
    culprit, *others = bench.run(request_of("culprit", prompt(9, 9)), *requests)
    assert (culprit.failure.status, culprit.failure.code) == (500, "model_error")
    assert "index" not in culprit.failure.message
    assert [answer.tokens for answer in others] == expected
    assert batches.count(["culprit"]) == 1, "one more try, and no other"
    assert batches[-1] == [request.request_id for request in requests], "the others go on together"
    bench.check_idle()


@pytest.mark.parametrize("temperature", [1e-46, 1e-320])
def test_a_tiny_temperature_is_greedy_to_its_end(
    make_engine: Make, prompt: Make, request_of: Make, temperature: float
) -> None:
    bench = make_engine()
    greedy, tiny = bench.run(
        request_of("greedy", prompt(9)), request_of("tiny", prompt(9), temperature=temperature, seed=3)
    )
    assert tiny.tokens == greedy.tokens
    bench.check_idle()


def test_a_row_without_a_choice_is_its_request_s_fault(
    make_engine: Make, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_engine()
    runner = bench.executor._runner
    real = runner.run

    def only_one_token(chunks: Any) -> torch.Tensor:
        logits = real(chunks).clone()
        if len(chunks) == 2:
            logits[0] = -torch.inf
            logits[0, 7] = 0.0
        return logits

    monkeypatch.setattr(runner, "run", only_one_token)
    picky, bystander = bench.run(
        request_of("picky", prompt(9), min_tokens=2, stop_token_ids=[7], temperature=0.5),
        request_of("bystander", prompt(12, 1)),
    )
    assert (picky.failure.status, picky.failure.code) == (400, "sampling_failed")
    assert picky.failure.error_type == "invalid_request_error"
    assert bystander.reason == "length"
    bench.check_idle()


def test_a_finished_request_is_not_kept_until_its_deadline(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine()
    for index in range(4):
        bench.run(request_of(f"kept{index}", prompt(9, index), deadline_s=600.0))
    bench.step()
    gc.collect()
    sequences = [thing for thing in gc.get_objects() if type(thing) is Sequence]
    assert [seq.request_id for seq in sequences if seq.request_id.startswith("kept")] == []
    assert bench.executor.next_deadline_in_s() is None
