"""Token ids to text: one byte string per token, so that text can be cut at any token and never inside a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from kvmesh.models.errors import ModelError

__all__ = ["IncrementalDetokenizer", "TokenBytes", "byte_to_unicode"]

_SPIECE_SPACE = "\u2581"


def byte_to_unicode() -> dict[int, str]:
    """GPT-2's printable alphabet: the character that stands for each byte in a byte-level vocabulary."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 0x100)]
    moved = [byte for byte in range(0x100) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(0x100 + index) for index, byte in enumerate(moved)}


class TokenBytes:
    """The UTF-8 bytes that each token contributes to a text.

    Byte-level vocabularies (GPT-2's alphabet) and SentencePiece ones (``\u2581`` for space, ``<0xAB>`` for a byte) are
    understood. Text is ``b"".join(of(id) ...).decode("utf-8", "replace")`` in every path, whole or incremental.

    Attributes:
        strips_leading_space: a whole text loses the space that its vocabulary puts in front (Llama 2 does, Gemma not).

    Args:
        pieces: token string by id, None where the vocabulary has a hole.
        added: ids whose string is literal text (added tokens).
        special: ids that ``skip_special_tokens`` leaves out.
        decoder: the ``decoder`` object of tokenizer.json.

    Raises:
        ModelError: the decoder is of another kind.
    """

    def __init__(
        self, pieces: list[str | None], added: frozenset[int], special: frozenset[int], decoder: dict[str, Any] | None
    ) -> None:
        self._pieces = pieces
        self._added = added
        self.special = special
        self._cache: dict[int, bytes] = {}
        kinds = _decoder_kinds(decoder)
        self._byte_of = {char: byte for byte, char in byte_to_unicode().items()} if "ByteLevel" in kinds else None
        self.strips_leading_space = self._byte_of is None and bool(kinds & {"Strip", "Metaspace"})
        if self._byte_of is None and not kinds & {"ByteFallback", "Metaspace"}:
            raise ModelError(f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported.")

    def __len__(self) -> int:
        return len(self._pieces)

    def of(self, token_id: int) -> bytes:
        """The token's bytes; empty for a hole.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        cached = self._cache.get(token_id)
        if cached is None:
            if not 0 <= token_id < len(self._pieces):
                raise ValueError(f"Token id {token_id} is outside the vocabulary of {len(self._pieces)} tokens.")
            cached = self._cache[token_id] = self._bytes(token_id)
        return cached

    def join(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """The bytes of a sequence of tokens."""
        of = self.of
        if skip_special_tokens:
            special = self.special
            return b"".join([of(token_id) for token_id in ids if token_id not in special])
        return b"".join(map(of, ids))

    def _bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._byte_of is not None:
            try:
                return bytes([self._byte_of[char] for char in piece])
            except KeyError:  # a piece outside the alphabet stands for itself
                return piece.encode()
        if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_SPIECE_SPACE, " ").encode()


class IncrementalDetokenizer:
    """Text of a growing token sequence, without ever splitting a character; O(1) per token.

    The concatenation of all :meth:`push` results and one :meth:`flush` equals ``decode`` of all the ids. (A
    SentencePiece text keeps its leading space here: a continuation of a prompt needs it.)
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._bytes = token_bytes
        self._skip = skip_special_tokens
        # Keeps at most the 3 bytes of an unfinished character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these tokens; may be empty.

        Raises:
            ValueError: an id is outside the vocabulary; the state is unchanged.
        """
        return self._decoder.decode(self._bytes.join(ids, self._skip))

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD if a character stayed unfinished, else empty."""
        return self._decoder.decode(b"", final=True)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    nested = decoder.get("decoders", [])
    return {decoder["type"]} | {kind for inner in nested for kind in _decoder_kinds(inner)}
