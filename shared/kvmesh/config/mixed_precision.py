"""The layout of a mixed-precision KV cache: NVFP4 history, wider first and last tokens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIXED_DTYPE_PREFIX", "RETAINED_DTYPES", "MixedPrecisionKV"]

MIXED_DTYPE_PREFIX = "mixed_nvfp4_"
RETAINED_DTYPES = ("fp8", "float16", "bfloat16")
"""What may follow the prefix in ``KvCacheConfig.dtype``."""


@dataclass(frozen=True, slots=True)
class MixedPrecisionKV:
    """Which tokens of a sequence are kept at ``retained_dtype`` beside the full history in ``history_dtype``.

    Attributes:
        retained_dtype: dtype of the first and last tokens, one of :data:`RETAINED_DTYPES`.
        first_n_tokens: leading tokens kept, >= 0.
        last_n_tokens: most recent tokens kept, >= 0.
        history_dtype: dtype of the full history.
    """

    retained_dtype: str
    first_n_tokens: int
    last_n_tokens: int
    history_dtype: str = "nvfp4"

    @classmethod
    def from_dtype(cls, dtype: str, first_n_tokens: int, last_n_tokens: int) -> MixedPrecisionKV | None:
        """The layout that ``mixed_nvfp4_<dtype>`` asks for, or None for any other dtype."""
        if not dtype.startswith(MIXED_DTYPE_PREFIX):
            return None
        return cls(dtype.removeprefix(MIXED_DTYPE_PREFIX), first_n_tokens, last_n_tokens)

    def retained_blocks(self, sequence_tokens: int, tokens_per_block: int) -> tuple[range, range]:
        """Blocks kept at the retained dtype: the leading ones, then the trailing ones that are not among them.

        Retention has the granularity of a block: one that holds a single retained token is kept whole.
        """
        total = -(-sequence_tokens // tokens_per_block)
        leading_end = min(-(-min(self.first_n_tokens, sequence_tokens) // tokens_per_block), total)
        if self.last_n_tokens == 0:
            return range(leading_end), range(total, total)
        trailing_start = max(sequence_tokens - self.last_n_tokens, 0) // tokens_per_block
        return range(leading_end), range(max(trailing_start, leading_end), total)
