"""The token ids of a stored event: plain numbers, EAGLE's pairs, digests that stand for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvmesh.events.dialects.base import RejectedError
from kvmesh.hashing import TokenIds, as_token_ids
from kvmesh.kernels import _native

__all__ = ["WireTokens", "read_tokens", "with_lookahead"]

_NOTHING = b"\xc0"
_STAND_IN = 0
"""The token id of a digest; what it is of is told by the block's extra keys."""


class WireTokens(NamedTuple):
    """Tokens of consecutive blocks."""

    ids: TokenIds
    """int32 ``[blocks * block_size + lookahead]``."""
    lookahead: int = 0
    """How many tokens after its own are part of a block's identity."""
    digests: tuple[tuple[int, Any], ...] = ()
    """Positions whose token is the digest of something else than text."""


def read_tokens(packed: msgspec.Raw) -> WireTokens:
    """From the msgpack value of ``token_ids``: numbers, pairs of numbers, or numbers among digests; nil is none.

    Raises:
        RejectedError: it is nothing of that.
    """
    plain = _native.unpack_token_ids(packed)
    if plain is not None:
        return WireTokens(np.frombuffer(plain, dtype="<i4"))
    if bytes(packed) == _NOTHING:
        return WireTokens(np.empty(0, dtype="<i4"))
    values = msgspec.msgpack.decode(packed)
    if not isinstance(values, list):
        raise RejectedError("malformed")
    if isinstance(values[0], list):
        return _from_pairs(values)
    digests = tuple((at, value) for at, value in enumerate(values) if isinstance(value, str | bytes))
    return WireTokens(_array([_STAND_IN if isinstance(value, str | bytes) else value for value in values]), 0, digests)


def with_lookahead(tokens: WireTokens, following: Sequence[Sequence[int]], block_size: int) -> WireTokens:
    """Tokens whose event says for each block which ones come after it.

    Raises:
        RejectedError: that contradicts the tokens themselves.
    """
    length = len(following[-1]) if following else 0
    if not length:
        return tokens
    ids = np.concatenate([tokens.ids, _array(list(following[-1]))])
    told = [list(after) for after in following]
    found = [ids[end : end + length].tolist() for end in range(block_size, len(ids) - length + 1, block_size)]
    if tokens.lookahead or told != found:
        raise RejectedError("broken_lookahead")
    return WireTokens(ids, length, tokens.digests)


def _from_pairs(pairs: list[Any]) -> WireTokens:
    """EAGLE drafts from a token and the one after it: ``[[a, b], [b, c]]`` is a, b, and then c."""
    try:
        firsts = _array([first for first, _ in pairs])
        seconds = _array([second for _, second in pairs])
    except (TypeError, ValueError):
        raise RejectedError("malformed") from None
    if not np.array_equal(firsts[1:], seconds[:-1]):
        raise RejectedError("broken_lookahead")
    return WireTokens(np.append(firsts, seconds[-1:]), 1)


def _array(values: list[Any]) -> TokenIds:
    try:
        return as_token_ids(values)
    except TypeError:
        raise RejectedError("malformed") from None
    except OverflowError:
        raise RejectedError("token_out_of_range") from None
