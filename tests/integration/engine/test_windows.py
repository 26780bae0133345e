"""Engines over models with attention windows: from the model, and from ``max_attention_window``."""

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

from kvmesh.engine.build import EngineBuildError

Make = Callable[..., Any]


def greedy(model: Any, tokens: bytes, count: int) -> list[int]:
    """What transformers generates."""
    ids = torch.from_numpy(np.frombuffer(tokens, dtype=np.int32).astype(np.int64))[None]
    model.generation_config.eos_token_id = None
    return model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_models_with_windows(
    family: str, v2: bool, make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """Prompts on both sides of the window, in chunks and together, with and without reuse."""
    reference = build(family)
    reference.save_pretrained(tmp_path)
    bench = make_engine(model=str(tmp_path), max_num_tokens=16, cache={"use_kv_cache_manager_v2": v2})
    assert {group.window for group in bench.engine.manager.layout.groups} == ({7} if family == "mistral" else {7, None})
    prompts = [prompt(length, length) for length in (3, 19, 50)]
    expected = [greedy(reference, tokens, 16) for tokens in prompts]
    for attempt in ("first", "reused"):
        requests = [request_of(f"{attempt}-{i}", tokens) for i, tokens in enumerate(prompts)]
        assert [answer.tokens for answer in bench.run(*requests)] == expected
    bench.check_idle()


def test_a_window_from_the_configuration(make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path) -> None:
    """§2 max_attention_window: the tokens of a model that has this window itself."""
    build("mistral", sliding_window=None).save_pretrained(tmp_path)
    reference = build("mistral", sliding_window=9)
    bench = make_engine(model=str(tmp_path), cache={"max_attention_window": [9]})
    answer, *_ = bench.run(request_of("a", prompt(40)))
    assert answer.tokens == greedy(reference, prompt(40), 16)
    whole = make_engine(model=str(tmp_path), cache={"max_attention_window": [128]})
    assert [group.window for group in whole.engine.manager.layout.groups] == [None]
    assert whole.run(request_of("a", prompt(40)))[0].tokens != answer.tokens


SCRATCH = {"enable_swa_scratch_reuse": True}


@pytest.mark.parametrize("policy", ["all_reusable", "per_request"])
@pytest.mark.parametrize("chunk", [16, 21, 64])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_scratch_slots(
    family: str, chunk: int, policy: str, make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """§3.7: chunks that end inside blocks and on their boundaries, alone and beside decodes, computed and reused."""
    reference = build(family)
    reference.save_pretrained(tmp_path)
    bench = make_engine(
        model=str(tmp_path), max_num_tokens=chunk, cache={**SCRATCH, "block_reuse_config": {"policy": policy}}
    )
    prompts = [prompt(length, length) for length in (3, 19, 50, 77)]
    expected = [greedy(reference, tokens, 16) for tokens in prompts]
    for attempt in ("first", "reused"):
        requests = [request_of(f"{attempt}-{i}", tokens) for i, tokens in enumerate(prompts)]
        assert [answer.tokens for answer in bench.run(*requests)] == expected
    bench.check_idle()


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_tight_cache(
    family: str, scratch: bool, make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """Shared prefixes, eviction and preemption around windows."""
    reference = build(family)
    reference.save_pretrained(tmp_path)
    cache = {"enable_swa_scratch_reuse": scratch, "host_cache_size": 0}
    bench = make_engine(model=str(tmp_path), max_num_tokens=24, tokens=160, cache=cache)
    choice = random.Random(4)
    base = prompt(70, 7)
    prompts = [base[: 4 * choice.randrange(1, 60)] + prompt(choice.randrange(1, 30), i) for i in range(14)]
    answers = bench.run(*(request_of(f"r{i}", tokens) for i, tokens in enumerate(prompts)))
    assert [answer.tokens for answer in answers] == [greedy(reference, tokens, 16) for tokens in prompts]
    bench.check_idle()


def pages_while_computing(bench: Any, request: Any) -> int:
    """Pages that the first step of ``request`` holds while the model runs."""
    bench.submit(request)
    before, model = bench.cache.free, bench.executor._runner._computer._model
    forward, held = model.forward, []

    def looking(*arguments: Any) -> torch.Tensor:
        held.append(before - bench.cache.free)
        return forward(*arguments)

    model.forward = looking
    bench.step()
    return held[0]


def test_scratch_slots_save_pages(make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path) -> None:
    """§2.2: a 64-token prefill with a window of 16 holds fewer pages with scratch reuse than without."""
    build("mistral", sliding_window=16).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "max_num_tokens": 64}
    plain, scratch = (
        make_engine(**settings, cache={**cache, "tokens_per_block": 8, "max_tokens": 512}) for cache in ({}, SCRATCH)
    )
    assert pages_while_computing(plain, request_of("a", prompt(64))) == 8
    # Blocks 0 to 5 take a slot for each two of them, as there are two layers.
    assert pages_while_computing(scratch, request_of("a", prompt(64))) == 2 + 3


@pytest.mark.parametrize("cache", [{}, SCRATCH], ids=["pages", "scratch"])
@pytest.mark.parametrize("length", [5, 21, 50])
def test_two_legs(
    length: int, cache: dict[str, Any], make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """Pages of both layer groups go from one engine to the other, those that the window has left behind do not."""
    reference = build("gemma3")
    reference.save_pretrained(tmp_path)
    engines = {"model": str(tmp_path), "transfers": {"backend": "DEFAULT"}, "max_num_tokens": 16, "cache": cache}
    context, generation = make_engine(name="context", **engines), make_engine(name="generation", **engines)
    tokens = prompt(length)
    first, *_ = context.run(request_of("a", tokens, kind="context", transfer_id=1))
    request = request_of(
        "b", tokens, kind="generation", transfer_id=1, first_tokens=first.tokens, handoff=first.last.handoff
    )
    generation.submit(request)
    answer = generation.answers["b"]
    end_s = time.monotonic() + 20.0
    while not answer.over:
        assert time.monotonic() < end_s, "waited too long"
        context.step()
        generation.step()
    assert answer.tokens == greedy(reference, tokens, 16)


def test_a_window_that_no_attention_layer_can_have(make_engine: Make) -> None:
    with pytest.raises(EngineBuildError, match="layer 0, which is an attention layer"):
        make_engine(cache={"max_attention_window": [-0x7FFFFFFF]})
