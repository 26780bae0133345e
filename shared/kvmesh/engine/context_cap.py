"""``fp8_context_mla_kv_len_cap``: how many tokens the context chunks of one step may attend to (semantics §2).

The workspace of fp8 context attention over MLA caches grows with that sum; models without MLA layers have none.
"""

from __future__ import annotations

from kvmesh.cache.layout import PageLayout

__all__ = ["context_kv_cap", "has_context_workspace"]


def context_kv_cap(cap: int | None, *, max_batch_size: int, max_num_tokens: int, max_seq_len: int) -> int:
    """Tokens that the context chunks of one step may attend to, summed.

    At least one sequence of full length always fits, and more than the worst case would bound nothing.

    Args:
        cap: the configured value; None: the worst case.
        max_batch_size: sequences in one step.
        max_num_tokens: tokens in one step; each sequence computes at least one.
        max_seq_len: tokens of the longest sequence.
    """
    worst = min(max_batch_size, max_num_tokens) * max_seq_len
    return min(worst, max(max_seq_len, worst if cap is None else cap))


def has_context_workspace(layout: PageLayout) -> bool:
    """Whether the cap has any effect with this layout: some layer caches MLA latents."""
    return any(group.kind == "mla" for group in layout.groups)
