"""Which attention window each layer gets, from the model's own and from ``max_attention_window``; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.models.errors import ModelError

__all__ = ["effective_windows", "mask_windows"]


def effective_windows(
    model_windows: Sequence[int | None], override: Sequence[int] | None, max_seq_len: int
) -> tuple[int | None, ...]:
    """By layer, how many latest tokens' K and V the cache keeps; None is all (semantics §2 max_attention_window).

    Args:
        model_windows: by layer, the checkpoint's attention window in tokens, None for full attention.
        override: ``max_attention_window``, tiled over the layers; None takes the model's windows.
        max_seq_len: longest sequence in tokens; a window of that or more is full attention.

    Raises:
        ModelError: the override has something other than a positive window for an attention layer.
    """
    windows = model_windows
    if override is not None:
        windows = [override[layer % len(override)] for layer in range(len(model_windows))]
    for layer, window in enumerate(windows):
        if window is not None and window < 1:
            raise ModelError(
                f"max_attention_window has {window} for layer {layer}, which is an attention layer; give it a positive "
                "window."
            )
    return tuple(None if window is None or window >= max_seq_len else window for window in windows)


def mask_windows(model_windows: Sequence[int | None], cache_windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """By layer, how many latest tokens attention sees: a cache that keeps more never widens the model's own window."""
    return tuple(
        min((window for window in pair if window is not None), default=None)
        for pair in zip(model_windows, cache_windows, strict=True)
    )
