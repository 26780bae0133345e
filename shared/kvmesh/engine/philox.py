"""Philox4x32-10, the counter-based random generator behind seeded sampling.

A draw is a pure function of (seed, position): it needs no state, so it does not depend on who shares the batch,
survives preemption, and continues on another server after a hand-off.
"""

from __future__ import annotations

__all__ = ["philox4x32", "uniform"]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The ten-round Philox bijection of Salmon et al. (2011) on four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIER_0
        product1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0 = (k0 + _WEYL_0) & _MASK32
        k1 = (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """One double in [0, 1) with 53 random bits for the token at ``position`` (its index in prompt + output).

    ``seed`` is taken modulo 2**64, so negative seeds are as good as any.
    """
    seed &= _MASK64
    high, low, _, _ = philox4x32(
        (position & _MASK32, (position >> 32) & _MASK32, 0, 0),
        (seed & _MASK32, seed >> 32),
    )
    return (((high << 32) | low) >> 11) * 2.0**-53
