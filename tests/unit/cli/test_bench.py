from __future__ import annotations

import itertools

import pytest
from rich.console import Console

from kvmesh.cli.bench.report import print_report
from kvmesh.cli.bench.summary import Distribution, RequestRecord, summarize
from kvmesh.cli.bench.workload import LengthRange, arrivals_s, requests

VOCABULARY = list(range(1000, 1100))


def take(count: int, **arguments: object):
    fields = {"seed": 1, **arguments}
    specs = requests("load", VOCABULARY, LengthRange(10, 20), LengthRange(3, 5), **fields)
    return list(itertools.islice(specs, count))


def test_equal_seeds_send_equal_requests():
    assert take(5) == take(5)
    assert take(5) != take(5, seed=2)


def test_lengths_are_exact_and_in_range():
    specs = take(200)
    assert {len(spec.prompt_token_ids) for spec in specs} == set(range(10, 21))
    assert {spec.max_tokens for spec in specs} == {3, 4, 5}
    assert all(set(spec.prompt_token_ids) <= set(VOCABULARY) for spec in specs)


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    first, second = take(2, shared_prefix_tokens=8)
    assert first.prompt_token_ids[:8] == second.prompt_token_ids[:8]
    assert first.prompt_token_ids[8:] != second.prompt_token_ids[8:]
    assert len(take(1, shared_prefix_tokens=30)[0].prompt_token_ids) == 31


def test_arrivals_have_the_rate():
    times = list(itertools.islice(arrivals_s(50.0, seed=3), 5000))
    assert times == sorted(times)
    assert 95 < times[-1] < 105


@pytest.mark.parametrize(("text", "lengths"), [("128", (128, 128)), ("1:3", (1, 3))])
def test_lengths_are_parsed(text, lengths):
    assert LengthRange.parse(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "3:1", "x", "1:y", "-5"])
def test_bad_lengths_are_refused(text):
    with pytest.raises(ValueError):
        LengthRange.parse(text)


def test_percentiles():
    distribution = Distribution.of_seconds([value / 1000 for value in range(101)])
    assert (distribution.count, distribution.mean, distribution.max) == (101, pytest.approx(50), pytest.approx(100))
    assert [distribution.p50, distribution.p90, distribution.p99] == [pytest.approx(x) for x in (50, 90, 99)]
    assert Distribution.of_seconds([0.004]).p99 == pytest.approx(4)
    assert Distribution.of_seconds([]) is None


def test_summaries_by_group_and_outcome():
    records = [
        RequestRecord(
            group="load", started_s=0, duration_s=1, ttft_s=0.1, tpot_s=0.01, gaps_s=[0.01, 0.02], prompt_tokens=100,
            cached_tokens=40, completion_tokens=10,
        ),
        RequestRecord(group="load", started_s=0, duration_s=9, outcome="503 draining"),
        RequestRecord(group="steady", started_s=0, duration_s=2, ttft_s=0.2, completion_tokens=5, outcome="unfinished"),
    ]  # fmt: skip
    load, steady = summarize(records, 2.0)
    assert load.outcomes == {"ok": 1, "503 draining": 1}
    assert (load.requests_per_s, load.prompt_tokens_per_s, load.output_tokens_per_s) == (0.5, 50, 5)
    assert load.cached_tokens == 40
    assert load.itl_ms.count == 2
    assert load.e2e_ms.max == pytest.approx(1000)
    assert (steady.output_tokens, steady.e2e_ms, steady.ttft_ms.count) == (5, None, 1)


def test_the_ends_of_a_distribution_are_named(capsys):
    gaps_s = [0.010, 0.011, 0.012, 0.5]
    record = RequestRecord(group="load", started_s=0, duration_s=1, ttft_s=0.1, gaps_s=gaps_s, completion_tokens=5)
    print_report(Console(width=120), summarize([record], 1.0), [record])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  ITL"))
    assert "min 10.0 ms" in line
    assert line.endswith("p99 12.0 ms")
