"""The executor over a real cache and a tiny real model: batching, chunking, reuse, preemption, limits, failures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvmesh.engine.report import INTEGRITY_QUIET_S, INTEGRITY_SHARE
from kvmesh.net import faults
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.cache_report import IterationRecord
from kvmesh.protocol.engine import EngineStats, Generate, IterationRecords

BLOCK = 4
EOS = 2
Make = Callable[..., Any]


def test_chunk_sizes_do_not_change_the_output(make_engine: Make, prompt: Make, request_of: Make) -> None:
    tokens = prompt(61)
    whole = make_engine(max_num_tokens=256).run(request_of("a", tokens))[0].tokens
    for size in (1, 3, 8, 32):
        bench = make_engine(max_num_tokens=size, max_batch_size=1)
        assert bench.run(request_of("a", tokens))[0].tokens == whole, size
        bench.check_idle()


def test_batched_outputs_equal_solo_outputs(make_engine: Make, prompt: Make, request_of: Make) -> None:
    requests = [request_of(f"r{i}", prompt(3 + 7 * i, i), max_tokens=10 + i) for i in range(8)]
    together = make_engine(max_num_tokens=24).run(*requests)
    alone = make_engine()
    for request, answer in zip(requests, together, strict=True):
        assert answer.tokens == alone.run(request)[0].tokens
        assert answer.reason == "length"
        assert len(answer.tokens) == request.sampling.max_tokens


@pytest.mark.parametrize(("partial", "expected"), [(True, 32), (False, 32)])
@pytest.mark.parametrize("length", [33, 30])
def test_a_repeated_prompt_is_reused(
    make_engine: Make, prompt: Make, request_of: Make, partial: bool, expected: int, length: int
) -> None:
    bench = make_engine(cache={"enable_partial_reuse": partial})
    first, *_ = bench.run(request_of("a", prompt(length)))
    again, *_ = bench.run(request_of("b", prompt(length)))
    assert first.last.cached_tokens == 0
    assert again.last.cached_tokens == (length - 1 if partial else (length - 1) // BLOCK * BLOCK)
    assert again.last.prompt_tokens == length
    assert again.tokens == first.tokens
    bench.check_idle()


def test_without_reuse_nothing_is_cached(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(cache={"enable_block_reuse": False})
    first, *_ = bench.run(request_of("a", prompt(33)))
    again, *_ = bench.run(request_of("b", prompt(33)))
    assert again.last.cached_tokens == 0
    assert again.tokens == first.tokens
    bench.check_idle()


def test_salted_prompts_are_not_shared(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine()
    bench.run(request_of("a", prompt(33), cache_salt="x"))
    assert bench.run(request_of("b", prompt(33), cache_salt="y"))[0].last.cached_tokens == 0
    assert bench.run(request_of("c", prompt(33), cache_salt="x"))[0].last.cached_tokens == 32


def test_choices_of_one_prompt_prefill_once(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(max_num_tokens=16)
    bench.run(*(request_of(f"n{i}", prompt(41), temperature=1.0, seed=i) for i in range(4)))
    assert bench.executor.counters.prefilled_tokens < 41 + 4 * (BLOCK + 1)


def test_without_prefix_awareness_every_choice_prefills(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(max_num_tokens=200, enable_prefix_aware_scheduling=False)
    bench.run(*(request_of(f"n{i}", prompt(41), temperature=1.0, seed=i) for i in range(4)))
    assert bench.executor.counters.prefilled_tokens == 4 * 41


def test_a_context_cap_has_no_effect_without_mla_layers(
    make_engine: Make, prompt: Make, request_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """§2 fp8_context_mla_kv_len_cap: start-up says so in one line, and long prompts are computed as ever."""
    bench = make_engine(cache={"fp8_context_mla_kv_len_cap": 1})
    assert capsys.readouterr().out.count("fp8_context_mla_kv_len_cap=1") == 1
    bench.run(request_of("a", prompt(41)), request_of("b", prompt(41, 1)))
    assert bench.executor.counters.prefilled_tokens == 82


def test_what_does_nothing_with_this_model_is_told_at_start(
    make_engine: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"enable_kv_pool_rebalance": True, "enable_swa_scratch_reuse": True, "disk_prefetch_num_reqs": 1}
    make_engine(cache=settings)
    lines = capsys.readouterr().out
    for name in settings:
        assert lines.count(f"kv_cache_config.{name}=") == 1


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_a_cache_too_small_for_all_serves_all(make_engine: Make, prompt: Make, request_of: Make, policy: str) -> None:
    """Sixteen requests that need several times the cache: all finish, with their solo outputs, and no page is lost."""
    requests = [
        request_of(f"r{i}", prompt(5 + (i * 13) % 40, i), max_tokens=20 + (i * 7) % 30, seed=i, temperature=i % 2 * 0.8)
        for i in range(16)
    ]
    alone = make_engine()
    expected = [alone.run(request)[0].tokens for request in requests]
    bench = make_engine(tokens=120, max_num_tokens=32, scheduler_policy=policy)
    answers = bench.run(*requests)
    for request, answer, tokens in zip(requests, answers, expected, strict=True):
        assert answer.tokens == tokens, request.request_id
    assert (bench.executor.counters.preemptions > 0) == (policy == "max_utilization")
    bench.check_idle()


def test_one_sequence_can_fill_the_whole_cache(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(tokens=38, cache={"max_util_for_resume": 1.0})
    pages = bench.cache.total
    request = request_of("a", prompt(20), max_tokens=pages * BLOCK - 20 + 1)
    first = bench.run(request)[0]
    assert first.reason == "length"
    # Again, with every page full of its own prefix.
    again = bench.run(Generate(**{**{f: getattr(request, f) for f in request.__struct_fields__}, "request_id": "b"}))[0]
    assert again.tokens == first.tokens
    bench.check_idle()


def test_a_request_beyond_the_cache_is_refused_with_numbers(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(tokens=40)
    [answer] = bench.run(request_of("a", prompt(60)))
    assert answer.failure.status == 400
    assert "75 tokens (60 of them the prompt)" in answer.failure.message
    assert f"holds {bench.cache.total * BLOCK}" in answer.failure.message


def test_seeds_reproduce_and_differ(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine()
    sampled = {"temperature": 1.0, "max_tokens": 24}
    runs = [
        bench.run(request_of(f"s{i}", prompt(9), seed=seed, **sampled))[0].tokens for i, seed in enumerate([1, 1, 2])
    ]
    assert runs[0] == runs[1] != runs[2]
    crowd = bench.run(
        request_of("again", prompt(9), seed=1, **sampled),
        *(request_of(f"other{i}", prompt(12, i + 1), seed=i, **sampled) for i in range(5)),
    )
    assert crowd[0].tokens == runs[0]


def test_stop_ids_end_a_sequence(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine()
    free = bench.run(request_of("free", prompt(9)))[0].tokens
    stop = free[5]
    first = free.index(stop)
    answer = bench.run(request_of("a", prompt(9), stop_token_ids=[stop]))[0]
    assert answer.tokens == free[: first + 1]
    assert (answer.reason, answer.last.stop_token_id) == ("stop", stop)
    held_off = bench.run(request_of("b", prompt(9), stop_token_ids=[stop], min_tokens=12))[0]
    assert len(held_off.tokens) >= 12
    assert stop not in held_off.tokens[:12]


def test_eos_ends_a_sequence_unless_ignored(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine()
    bias = {"logit_bias": {EOS: 100.0}, "max_tokens": 5}
    assert bench.run(request_of("a", prompt(9), ignore_eos=False, **bias))[0].tokens == [EOS]
    assert bench.run(request_of("b", prompt(9), ignore_eos=True, **bias))[0].tokens == [EOS] * 5


def test_logprobs_come_with_every_token(make_engine: Make, prompt: Make, request_of: Make) -> None:
    answer = make_engine().run(request_of("a", prompt(9), logprobs=2, max_tokens=5))[0]
    assert [entry.token_id for entry in answer.logprobs] == answer.tokens
    for entry in answer.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert len(entry.top) == 2
        assert entry.logprob <= 0


def test_aborts_at_random_times_lose_no_page(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(tokens=200, max_num_tokens=16)
    rng = random.Random(3)
    alive: list[str] = []
    for index in range(120):
        if rng.random() < 0.6:
            bench.submit(request_of(f"r{index}", prompt(1 + rng.randrange(50), rng.randrange(6)), max_tokens=30))
            alive.append(f"r{index}")
        if alive and rng.random() < 0.5:
            bench.executor.abort(alive.pop(rng.randrange(len(alive))))
        bench.step()
    for name in alive:
        bench.executor.abort(name)
    bench.executor.abort("never heard of")
    bench.step()
    assert all(answer.over for answer in bench.answers.values())
    assert "cancelled" in {answer.reason for answer in bench.answers.values()}
    bench.check_idle()
    assert bench.run(request_of("next", prompt(30)))[0].reason == "length"


def test_a_deadline_ends_a_request(make_engine: Make, prompt: Make, request_of: Make) -> None:
    clock = ManualClock()
    bench = make_engine(clock=clock)
    bench.submit(request_of("a", prompt(9), deadline_s=2.0, max_tokens=400))
    bench.step()
    assert bench.executor.next_deadline_in_s() == pytest.approx(2.0)
    clock.advance(2.5)
    bench.step()
    assert bench.answers["a"].failure.status == 504
    assert bench.answers["a"].failure.code == "deadline_exceeded"
    assert bench.executor.next_deadline_in_s() is None
    bench.check_idle()


def test_a_failing_batch_fails_its_requests_only(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine()

    def broken() -> None:
        raise RuntimeError("illegal instruction")

    bench.submit(request_of("a", prompt(9)))
    bench.submit(request_of("b", prompt(12, 1)))
    with faults.injected("engine.batch", broken):
        bench.step()
    for name in "ab":
        failure = bench.answers[name].failure
        assert (failure.status, failure.code) == (500, "model_error")
        assert "illegal" not in failure.message
    bench.check_idle()
    assert bench.run(request_of("c", prompt(9)))[0].reason == "length"


def test_a_row_of_nan_fails_its_request_only(
    make_engine: Make, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_engine()
    runner = bench.executor._runner
    real = runner.run

    def poisoned(chunks: Any) -> torch.Tensor:
        logits = real(chunks).clone()
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(runner, "run", poisoned)
    bench.submit(request_of("a", prompt(9)))
    bench.submit(request_of("b", prompt(12, 1)))
    bench.step()
    monkeypatch.setattr(runner, "run", real)
    assert bench.answers["a"].failure.code == "model_error"
    while not bench.answers["b"].over:
        bench.step()
    assert bench.answers["b"].reason == "length"
    bench.check_idle()


def test_duplicates_and_a_full_queue_are_refused(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(max_queue=2, max_batch_size=1)
    bench.submit(request_of("a", prompt(9)))
    bench.executor.submit(request_of("b", prompt(9, 1)))
    bench.executor.submit(request_of("c", prompt(9, 2)))
    assert bench.answers["c"].failure.status == 429
    bench.executor.submit(request_of("d", prompt(9, 2), priority=1))
    assert bench.answers["d"].failure.code == "queue_full"


def test_statistics(make_engine: Make, prompt: Make, request_of: Make) -> None:
    clock = ManualClock()
    bench = make_engine(clock=clock)
    bench.run(request_of("a", prompt(33)), request_of("b", prompt(33, 5)))
    bench.run(request_of("c", prompt(33)))
    assert sum(isinstance(message, EngineStats) for message in bench.messages) == 1  # time stands still
    assert bench.engine.reporter.due_in_s() == pytest.approx(0.25)
    clock.advance(5.0)
    bench.step()
    stats = bench.messages[-1]
    assert isinstance(stats, EngineStats)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.generated_tokens_total) == (99, 32, 48)
    assert stats.prefilled_tokens_total == 67
    assert stats.integrity_checks_total > 0
    assert stats.integrity_failures_total == 0
    assert stats.pages_free + stats.pages_evictable == stats.pages_total
    assert bench.engine.reporter.due_in_s() is None
    before = len(bench.messages)
    clock.advance(5.0)
    bench.step()
    assert len(bench.messages) == before


def test_statistics_are_collected_every_so_many_iterations(make_engine: Make, prompt: Make, request_of: Make) -> None:
    clock = ManualClock()
    bench = make_engine(clock=clock, cache={"iteration_stats_interval": 5})
    bench.submit(request_of("a", prompt(4), max_tokens=13))
    told = []
    while not bench.answers["a"].over:
        clock.advance(1.0)
        assert bench.step()
        told += [message.generated_tokens_total for message in bench.messages if isinstance(message, EngineStats)]
        bench.messages.clear()
    assert told == [5, 10]
    # Nothing is left to compute, so that no fifth iteration would come.
    assert not bench.step()
    assert [message.generated_tokens_total for message in bench.messages if isinstance(message, EngineStats)] == [13]
    assert bench.engine.reporter.due_in_s() == INTEGRITY_QUIET_S, "the integrity check is all that is left"


def test_integrity_checks_wait_until_it_is_quiet_and_take_little_time(
    make_engine: Make, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(1000.0)
    bench = make_engine(clock=clock)
    reporter, counters = bench.engine.reporter, bench.executor.counters
    took_s = 0.25
    monkeypatch.setattr(bench.engine.manager, "check_integrity", lambda: clock.advance(took_s))

    bench.run(request_of("a", prompt(9)))
    for _ in range(3):
        clock.advance(INTEGRITY_QUIET_S - 0.5)
        assert not bench.step()
        assert counters.integrity_checks == 0
        bench.run(request_of("b", prompt(9)))
        bench.answers.clear()
    clock.advance(INTEGRITY_QUIET_S)
    assert reporter.due_in_s() == 0.0
    assert not bench.step()
    assert counters.integrity_checks == 1

    # Nothing has happened since.
    clock.advance(1000.0)
    bench.step()
    bench.step()
    assert counters.integrity_checks == 1
    assert reporter.due_in_s() is None

    # What has happened is checked, but the time that checks take is a hundredth of all at most.
    bench.run(request_of("c", prompt(9)))
    clock.advance(INTEGRITY_QUIET_S)
    bench.step()
    assert counters.integrity_checks == 2
    ended_s = clock.monotonic_s()
    bench.run(request_of("d", prompt(9)))
    clock.advance(INTEGRITY_QUIET_S)
    bench.step()
    assert reporter.due_in_s() == pytest.approx(ended_s + took_s / INTEGRITY_SHARE - clock.monotonic_s())
    clock.advance(ended_s + took_s / INTEGRITY_SHARE - clock.monotonic_s() - 0.01)
    bench.step()
    assert counters.integrity_checks == 2
    clock.advance(0.02)
    bench.step()
    assert counters.integrity_checks == 3


def test_the_end_of_an_engine_is_checked_at_once(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(clock=ManualClock())
    bench.run(request_of("a", prompt(9)))
    reporter, counters = bench.engine.reporter, bench.executor.counters
    bench.step()
    assert counters.integrity_checks == 0
    reporter.after_last_step()
    assert (counters.integrity_checks, counters.integrity_failures) == (1, 0)
    reporter.after_last_step()
    assert counters.integrity_checks == 1, "nothing has happened since"


def test_records_of_iterations_add_up_over_the_gap(make_engine: Make, prompt: Make, request_of: Make) -> None:
    """§2 ``iteration_stats_interval``, §3.10: every N iterations one record, which has the deltas of all of them."""
    clock = ManualClock()
    bench = make_engine(clock=clock, cache={"iteration_stats_interval": 3})
    records: list[IterationRecord] = []
    iterations = 0
    for name in ("cold", "warm"):
        bench.submit(request_of(name, prompt(8 * 4), max_tokens=6))
        while not bench.answers[name].over:
            clock.advance(1.0)
            iterations += bench.step()
    for message in bench.messages:
        if isinstance(message, IterationRecords):
            records += message.records
    assert iterations == 12
    assert [one.iterations for one in records] == [3] * 4
    assert sum(one.prompt_tokens for one in records) == 2 * 8 * 4
    assert sum(one.generated_tokens for one in records) == 12
    first, third = records[0], records[2]
    assert (first.reused_blocks, first.missed_blocks, first.cache_hit_rate) == (0, 8, 0.0)
    assert (third.reused_blocks, third.missed_blocks) == (8, 0), "7 full blocks, and the last one but for a token"
    assert third.cache_hit_rate == 1.0
    assert [peak.unavailable for peak in first.pools] == [9], "8 blocks, and one for the first generated token"
    counters = bench.cache.counters
    assert sum(one.counters.get("allocated_pages", 0) for one in records) == counters.allocated_pages


def test_a_sequence_of_one_step_is_in_the_peaks(make_engine: Make, prompt: Make, request_of: Make) -> None:
    """§3.10: its pages are given back before the iteration ends."""
    clock = ManualClock()
    bench = make_engine(clock=clock)
    bench.submit(request_of("one", prompt(8 * 4), max_tokens=1))
    clock.advance(1.0)
    bench.step()
    assert bench.answers["one"].over
    [record] = [
        record for message in bench.messages if isinstance(message, IterationRecords) for record in message.records
    ]
    [peak] = record.pools
    assert (peak.unavailable, peak.evictable) == (8, 8)


def test_priority_is_served_first(make_engine: Make, prompt: Make, request_of: Make) -> None:
    bench = make_engine(max_batch_size=1)
    order = []
    for index in range(3):
        bench.submit(request_of(f"r{index}", prompt(5, index), max_tokens=2, priority=index))
    while len(order) < 3:
        bench.step()
        order += [name for name, answer in bench.answers.items() if answer.over and name not in order]
    assert order == ["r2", "r1", "r0"]


def test_token_ids_are_little_endian_int32(make_engine: Make, request_of: Make) -> None:
    tokens = np.array([5, 6, 7], dtype="<i4").tobytes()
    assert make_engine().run(request_of("a", tokens))[0].last.prompt_tokens == 3
