"""The tokens of one sequence: a growing int32 buffer of prompt and output."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["TokenArray", "TokenHistory"]

TokenArray = npt.NDArray[np.int32]

_SPARE_TOKENS = 64


class TokenHistory:
    """Prompt and output tokens in one contiguous int32 buffer.

    Everything that sampling remembers (penalties, minimum length, the random stream's position) is derived from this
    object alone, which is why it survives preemption and a hand-off to another server.

    Args:
        prompt: int32 ``[P]``; copied.
    """

    __slots__ = ("_buffer", "length", "prompt_length")

    def __init__(self, prompt: TokenArray) -> None:
        self.prompt_length = int(prompt.size)
        self.length = self.prompt_length
        self._buffer: TokenArray = np.empty(self.prompt_length + _SPARE_TOKENS, dtype=np.int32)
        self._buffer[: self.prompt_length] = prompt

    @property
    def output_length(self) -> int:
        """Number of generated tokens."""
        return self.length - self.prompt_length

    def append(self, token_id: int) -> None:
        """Add one generated token."""
        if self.length == self._buffer.size:
            grown = np.empty(2 * self._buffer.size, dtype=np.int32)
            grown[: self.length] = self._buffer
            self._buffer = grown
        self._buffer[self.length] = token_id
        self.length += 1

    def slice(self, start: int, stop: int) -> TokenArray:
        """Tokens ``start..stop`` as a view; valid until the next :meth:`append`."""
        return self._buffer[start : min(stop, self.length)]

    def all(self) -> TokenArray:
        """Prompt and output as a view; valid until the next :meth:`append`."""
        return self._buffer[: self.length]

    def output(self) -> TokenArray:
        """The generated tokens as a view; valid until the next :meth:`append`."""
        return self._buffer[self.prompt_length : self.length]
