"""Reads the body of ``POST /query``, whose token ids are nearly all of it and never become Python numbers."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.hashing import TokenIds, as_token_ids
from kvmesh.indexer.faces import Query
from kvmesh.kernels import _native
from kvmesh.net.http import decode_json
from kvmesh.protocol.errors import bad_request

__all__ = ["Question", "read_question"]


class Question(NamedTuple):
    """What is asked, ``query.token_ids`` apart."""

    query: Query
    token_ids: TokenIds


def read_question(body: bytes) -> Question:
    """Read a body.

    Raises:
        ApiError: 400 when it is no JSON, or not a query.
    """
    taken = _native.json_take_integers(body, "token_ids")
    if taken is not None:
        rest, numbers = taken
        return Question(decode_json(rest, Query), as_token_ids(numbers))
    query = decode_json(body, Query)
    try:
        return Question(query, as_token_ids(query.token_ids))
    except OverflowError:
        raise bad_request("A token id does not fit 32 bits.", param="token_ids") from None
