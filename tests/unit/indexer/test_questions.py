"""Bodies of ``POST /query``: token ids are read natively, and mean what JSON says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.indexer.questions import read_question
from kvmesh.kernels import _native
from kvmesh.protocol.errors import ApiError

IDS = st.lists(st.one_of(st.integers(0, 300_000), st.integers(-(2**31), 2**31 - 1)), max_size=40)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")])


@given(IDS, st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), VALUES, max_size=3), SEPARATORS)
def test_ids_are_taken_out_and_the_rest_stays(ids: list[int], other: dict[str, Any], separators: Any) -> None:
    body = json.dumps({**other, "token_ids": ids, "model": "m"}, separators=separators).encode()
    taken = _native.json_take_integers(body, "token_ids")
    if any("\\" in json.dumps(key) for key in other):
        assert taken is None  # such keys are left to the JSON library
        return
    assert taken is not None
    assert np.frombuffer(taken[1], np.int32).tolist() == ids
    assert json.loads(taken[0]) == {**other, "token_ids": [], "model": "m"}


@given(st.text(st.sampled_from('0123456789-+.eE[]{},:" \ntru"token_ids"\\'), max_size=60))
def test_whatever_is_taken_is_what_json_says(text: str) -> None:
    body = ('{"token_ids": ' + text).encode()
    taken = _native.json_take_integers(body, "token_ids")
    if taken is None:
        return
    try:
        whole = json.loads(body)
    except ValueError:
        with pytest.raises(ValueError):  # the rest is as wrong as the whole
            json.loads(taken[0])
        return
    assert np.frombuffer(taken[1], np.int32).tolist() == whole["token_ids"]
    assert json.loads(taken[0]) == {**whole, "token_ids": []}


NO_INTEGERS = """[1.0] [01] [-0] [+1] [1e3] [2147483648] [99999999999999999999] [1,] [,1] [null] ["1"] [1;2] [[1]] {} [1
[true] [1]] [-]"""


@pytest.mark.parametrize("text", [*NO_INTEGERS.split(), "[1 2]"])
def test_anything_but_integers_is_left_to_the_json_library(text: str) -> None:
    assert _native.json_take_integers(f'{{"token_ids": {text}}}'.encode(), "token_ids") is None


@pytest.mark.parametrize(
    "body", ['{"token_ids": [1], "token_ids": [2]}', "[]", '{"model": "m"}', "", '{"a": {"token_ids": [1]}}']
)
def test_the_list_is_there_once_and_outermost(body: str) -> None:
    assert _native.json_take_integers(body.encode(), "token_ids") is None


def test_a_question_is_read() -> None:
    body = b'{"model": "m", "token_ids": [0, 7, 12345678, -5], "instance_id": 3, "cache_salt": "s"}'
    query, token_ids = read_question(body)
    assert (query.model_named, query.instance_id, query.salt) == ("m", 3, "s")
    assert token_ids.tolist() == [0, 7, 12345678, -5]
    assert token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": "m", "token_ids": [1.5]}', "Invalid request body"),
        (b'{"model": "m", "token_ids": [4294967296]}', "32 bits"),
        (b'{"model": 5, "token_ids": [1]}', "Invalid request body"),
        (b'{"model": "m", "token_ids": [1], "x": nonsense}', "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"model": "m"}', "Invalid request body"),
    ],
)
def test_what_is_no_question_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        read_question(body)
