"""A tokenizer whose tokens are bytes, for tests of what surrounds one."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvmesh.models.detokenizer import TokenBytes, byte_to_unicode

__all__ = ["EOS", "FakeTokenizer"]

EOS = 256
_LETTERS = byte_to_unicode()


class FakeTokenizer:
    """Bytes are tokens; 256 ends the text."""

    eos_token_ids = frozenset({EOS})

    def __init__(self) -> None:
        pieces: list[str | None] = [_LETTERS[byte] for byte in range(256)]
        decoder = {"type": "ByteLevel"}
        self.token_bytes = TokenBytes([*pieces, "<eos>"], frozenset({EOS}), frozenset({EOS}), decoder)

    def encode(self, text: str, *, add_special: bool = True) -> Any:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return "".join(f"{m['role']}:{m['content']};" for m in messages)
