"""Request bodies of any shape: valid fields, fields of wrong types, unknown fields, in any order."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st

__all__ = ["request_bodies"]

_TEXTS = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates, too
_NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
)
_JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=5,
)


@st.composite
def _object(draw: st.DrawFn, /, **fields: st.SearchStrategy[Any]) -> dict[str, Any]:
    """A few of the fields in any order, each perhaps of another type, now and then one that is not known."""
    names = draw(st.lists(st.sampled_from([*fields, "unknown"]), unique=True, max_size=6))
    return {name: draw(_JUNK if draw(_ONE_IN_FOUR) else fields.get(name, _JUNK)) for name in names}


_ONE_IN_FOUR = st.integers(0, 3).map(lambda drawn: drawn == 3)


_RANGE = _object(
    token_start=st.integers(-1, 40),
    token_end=st.one_of(st.none(), st.integers(0, 60)),
    priority=st.integers(-1, 101),
    duration_ms=st.one_of(st.none(), st.integers(0, 10**6)),
)
_SHARED: dict[str, st.SearchStrategy[Any]] = {
    "kv_cache_retention_config": _object(
        token_range_retention_configs=st.lists(_RANGE, max_size=3),
        decode_retention_priority=st.integers(-1, 101),
        decode_duration_ms=st.integers(0, 10**6),
        transfer_mode=st.sampled_from(["DRAM", "GDS"]),
        directory=st.just(""),
    ),
    "conversation_params": _object(conversation_id=_TEXTS),
    "disaggregated_params": _object(
        request_type=st.sampled_from(["context_and_generation", "Context_Only", "generation_only"]),
        conversation_id=_TEXTS,
        disagg_request_id=st.integers(-1, 2**63),
        first_gen_tokens=st.lists(st.integers(-1, 300), max_size=2),
        first_gen_log_probs=_JUNK,
        encoded_opaque_state=_TEXTS,
        ctx_usage=_object(prompt_tokens=st.integers(0, 9), cached_tokens=st.integers(0, 9)),
    ),
    "cache_salt": _TEXTS,
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 10),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 3),
    "stop": st.one_of(_TEXTS, st.lists(_TEXTS, max_size=3)),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=2),
    "priority": st.integers(-5, 5),
    "request_id": st.just("client-1"),
    "prompt_cache_key": _TEXTS,
    "stream": st.booleans(),
    "stream_options": _object(include_usage=st.booleans()),
    "metadata": _JUNK,
    "prompt_token_ids": st.lists(st.integers(0, 90), min_size=1, max_size=4),
}
_COMPLETION = _object(
    prompt=st.one_of(_TEXTS, st.lists(st.integers(-1, 300), max_size=4), st.lists(_TEXTS, max_size=2)),
    logprobs=st.integers(-1, 3),
    **_SHARED,
)
_CHAT = _object(
    messages=st.lists(_object(role=st.sampled_from(["user", "system", "robot"]), content=_TEXTS), max_size=3),
    logprobs=st.booleans(),
    top_logprobs=st.integers(-1, 3),
    chat_template_kwargs=_JUNK,
    **_SHARED,
)


def request_bodies(kind: Literal["completions", "chat"], model: str) -> st.SearchStrategy[dict[str, Any]]:
    """JSON bodies for one API; most name ``model`` and have what they must."""
    required: dict[str, Any] = {"prompt": "abc"} if kind == "completions" else {}
    if kind == "chat":
        required = {"messages": [{"role": "user", "content": "abc"}]}
    bodies = _COMPLETION if kind == "completions" else _CHAT
    return st.one_of(
        bodies.map(lambda body: {"model": model, **required, **body}),
        bodies.map(lambda body: {**body, **required, "model": model}),
        bodies,
        _JUNK.map(lambda junk: {"model": junk, **required}),
    )
