"""Requests that stress a KV cache: shared beginnings, overlaps inside blocks, second turns, cancelled clients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvmesh.protocol.engine import Generate
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention
from kvmesh.protocol.sampling import SamplingParams

__all__ = ["STREAMS", "Ask", "check_answers", "continued", "first_turns", "generate", "serve"]

STREAMS = 64
VOCABULARY = 96
MAX_PROMPT = 70
MAX_LENGTH = 128
PREFIXES = 6
LONG_ANSWERS = 0.15
"""Share of requests that outgrow what they began with, so that others have to give way."""


class Ask(NamedTuple):
    """One request, without the name that it has in a run."""

    tokens: tuple[int, ...]
    sampling: dict[str, Any]
    salt: str | None
    retention: RetentionConfig | None
    gone_after: int | None
    """Its client leaves after so many tokens; None: it stays."""
    conversation: int
    """Of which it is a turn."""


def first_turns(seed: int, count: int = STREAMS) -> list[Ask]:
    """Mixed lengths: alone, behind one of a few long beginnings, or branching off inside one."""
    choose = random.Random(seed)
    beginnings = [_tokens(choose, MAX_PROMPT) for _ in range(PREFIXES)]
    return [_first(choose, beginnings, number) for number in range(count)]


def continued(asks: Sequence[Ask], answers: Sequence[Sequence[int]], seed: int) -> list[Ask]:
    """The next turn of each, where there is room for one: what was said, the answer, and some more."""
    choose = random.Random(seed)
    turns = []
    for ask, answer in zip(asks, answers, strict=True):
        tokens = (*ask.tokens, *answer, *_tokens(choose, choose.randrange(1, 9)))
        if len(tokens) <= MAX_LENGTH - 16:
            turns.append(_ask(choose, tokens, ask.conversation, salt=ask.salt))
    return turns


def generate(name: str, ask: Ask, **fields: Any) -> Generate:
    """The message to an engine; ``fields`` go to it."""
    params = {"temperature": 0.0, "ignore_eos": True, **ask.sampling}
    return Generate(
        request_id=name,
        prompt_token_ids=np.array(ask.tokens, dtype=np.int32).tobytes(),
        sampling=SamplingParams(**params),
        cache_salt=ask.salt,
        **fields,
    )


def serve(
    bench: Any,
    name: str,
    asks: Sequence[Ask],
    *,
    steps: int = 20_000,
    each_step: Callable[[int], None] = lambda step: None,
    **fields: Any,
) -> list[list[int]]:
    """All at once, to their end; clients leave as they will.

    Args:
        bench: the engine.
        name: of the run; no two of an engine have the same.
        asks: the requests.
        steps: most steps that it may take.
        each_step: called after each with its number.
        fields: of the messages.

    Returns:
        What was generated.
    """
    requests = [
        generate(
            f"{name}-{i}", ask, retention=ask.retention, conversation_id=f"conversation-{ask.conversation}", **fields
        )
        for i, ask in enumerate(asks)
    ]
    for request in requests:
        bench.submit(request)
    answers = [bench.answers[request.request_id] for request in requests]
    leaving = {
        request.request_id: ask.gone_after
        for request, ask in zip(requests, asks, strict=True)
        if ask.gone_after is not None
    }
    for number in range(steps):
        if all(answer.over for answer in answers):
            break
        bench.step()
        each_step(number)
        for request_id, after in list(leaving.items()):
            if len(bench.answers[request_id].tokens) >= after:
                bench.executor.abort(request_id)
                del leaving[request_id]
    assert all(answer.over for answer in answers), "not finished"
    assert [answer.failure for answer in answers if answer.failure] == []
    return [answer.tokens for answer in answers]


def check_answers(answers: Sequence[list[int]], expected: Sequence[list[int]], asks: Sequence[Ask]) -> None:
    """What was generated is what should have been, as far as the client stayed."""
    wrong = []
    for number, (tokens, whole, ask) in enumerate(zip(answers, expected, asks, strict=True)):
        stayed = ask.gone_after is None
        if tokens != (whole if stayed else whole[: len(tokens)]):
            wrong.append((number, tokens, whole))
    assert wrong == []


def _first(choose: random.Random, beginnings: Sequence[tuple[int, ...]], number: int) -> Ask:
    if choose.random() < LONG_ANSWERS:
        return _ask(choose, _tokens(choose, choose.randrange(1, 16)), number, fewest=30, most=60)
    return _ask(choose, _prompt(choose, beginnings), number)


def _prompt(choose: random.Random, beginnings: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if choose.random() < 0.2:
        return _tokens(choose, choose.randrange(1, MAX_PROMPT))
    beginning = choose.choice(beginnings)
    # Most share whole blocks and a part of the next one.
    return (*beginning[: choose.randrange(1, len(beginning))], *_tokens(choose, choose.randrange(1, 24)))


def _ask(
    choose: random.Random,
    tokens: tuple[int, ...],
    conversation: int,
    *,
    salt: str | None = None,
    fewest: int = 1,
    most: int = 16,
) -> Ask:
    sampling: dict[str, Any] = {"max_tokens": choose.randrange(fewest, most + 1)}
    if choose.random() < 0.3:
        sampling |= {"temperature": 0.8, "seed": choose.randrange(1 << 30), "top_p": 0.9}
    return Ask(
        tokens,
        sampling,
        salt or ("other" if choose.random() < 0.1 else None),
        _retention(choose, len(tokens)) if choose.random() < 0.5 else None,
        choose.randrange(sampling["max_tokens"]) if choose.random() < 0.15 else None,
        conversation,
    )


def _retention(choose: random.Random, length: int) -> RetentionConfig:
    """Priorities on both sides of what may be offloaded, some for a moment only."""
    start = choose.randrange(length)
    return RetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetention(token_start=0, token_end=start or None, priority=choose.choice([0, 40, 100])),
            TokenRangeRetention(
                token_start=start, priority=choose.choice([10, 29, 30]), duration_ms=choose.choice([None, 1])
            ),
        ),
        decode_retention_priority=choose.choice([0, 35, 80]),
        decode_duration_ms=choose.choice([None, 1, 1000]),
    )


def _tokens(choose: random.Random, count: int) -> tuple[int, ...]:
    return tuple(choose.randrange(3, VOCABULARY) for _ in range(count))
