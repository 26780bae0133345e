"""When memory should move between the pools of a level, and how much (semantics §3.9): averages of what requests do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from kvmesh.cache.demand import RequestShape
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.ratios import Ratio, byte_ratio, exact, pages_for_ratio, ratio_of_batches
from kvmesh.config import KvPoolRebalanceConfig

__all__ = ["MovingAverage", "RebalanceTuner", "mismatched"]


class MovingAverage:
    """An exponential moving average; the first sample is its first value.

    Args:
        decay: weight of the past, between 0 and 1.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.value: float | None = None
        """None before the first sample."""

    def add(self, sample: float) -> None:
        """Take a sample in."""
        if self.value is None:
            self.value = sample
        else:
            self.value = self._decay * self.value + (1 - self._decay) * sample


def mismatched(current: Sequence[float | Fraction], target: Sequence[float | Fraction], threshold: float) -> bool:
    """Whether the share of some pool is off by the factor ``threshold`` or more.

    All must satisfy 1 / threshold < target / current < threshold, strictly and exactly.
    """
    bound = exact(threshold)
    pairs = [(exact(now), exact(wanted)) for now, wanted in zip(current, target, strict=True)]
    return any(not (now < wanted * bound and wanted < now * bound) for now, wanted in pairs)


class RebalanceTuner:
    """Learns from requests how large pools should be, and says when it is time to move memory.

    The device is split for a request whose history and capacity are the root mean squares of what closed sequences
    had; colder levels for a prefix of the mean reused length. A target is what is left of such a ratio after floors and
    whole pages: a difference that no adjustment can remove must not ask for one again and again.

    Args:
        config: thresholds.
        layout: page sizes.
        now_s: monotonic time; the cooldown starts here.
        level_bytes: of each level, the device first.
        floors: least pages by level and pool.
    """

    def __init__(
        self,
        config: KvPoolRebalanceConfig,
        layout: PageLayout,
        *,
        now_s: float,
        level_bytes: Sequence[int],
        floors: Sequence[Sequence[int]],
    ) -> None:
        self._config = config
        self._layout = layout
        self.level_bytes = tuple(level_bytes)
        self._floors = tuple(tuple(pages) for pages in floors)
        self._adjusted_s = now_s
        self._reused = MovingAverage(config.moving_average_decay)
        self._capacity_sq = MovingAverage(config.moving_average_decay)
        self._history_sq = MovingAverage(config.moving_average_decay)
        self._num_samples = 0
        self._pages: tuple[tuple[int, ...], ...] | None = None

    def on_create(self, reused_tokens: int) -> None:
        """A sequence was created and found so many tokens cached."""
        self._reused.add(reused_tokens)

    def on_close(self, avg_capacity_sq: float, avg_history_sq: float) -> None:
        """A sequence was closed.

        Args:
            avg_capacity_sq: square of its mean capacity, tokens squared; a sequence that never had any is not counted.
            avg_history_sq: square of its mean history, tokens squared.
        """
        if avg_capacity_sq <= 0:
            return
        self._capacity_sq.add(avg_capacity_sq)
        self._history_sq.add(avg_history_sq)
        self._num_samples += 1
        if self._num_samples % self._config.target_ratio_update_interval == 0:
            self._pages = tuple(
                tuple(pages_for_ratio(self._ratio(level), size, self._layout, floors))
                for level, (size, floors) in enumerate(zip(self.level_bytes, self._floors, strict=True))
            )

    def target_pages(self) -> tuple[tuple[int, ...], ...] | None:
        """Pages by level and pool, None before the first computation."""
        return self._pages

    def targets(self) -> tuple[Ratio, ...] | None:
        """Shares of bytes by level and pool, None before the first computation."""
        return None if self._pages is None else tuple(byte_ratio(pages, self._layout) for pages in self._pages)

    def need_adjustment(self, now_s: float, current_ratios: Sequence[Sequence[float | Fraction]]) -> bool:
        """Whether memory should move now.

        That is so when enough sequences were sampled, the last adjustment is long enough ago, and the device or the
        coldest level is off its target.

        Args:
            now_s: monotonic time.
            current_ratios: shares of bytes by level and pool.
        """
        config, targets = self._config, self.targets()
        if (
            targets is None
            or self._num_samples < config.min_sampled_kv_caches
            or now_s - self._adjusted_s < config.cooldown_secs
        ):
            return False
        return any(mismatched(current_ratios[level], targets[level], config.ratio_threshold) for level in (0, -1))

    def adjusted(self, now_s: float) -> None:
        """An adjustment was made, or tried: the cooldown begins anew."""
        self._adjusted_s = now_s

    def _ratio(self, level: int) -> Ratio:
        """For the requests that were seen."""
        capacity = math.sqrt(self._capacity_sq.value or 0)
        history = math.sqrt(self._history_sq.value or 0)
        if level and self._reused.value is not None:
            capacity = history = self._reused.value
        tokens = round(capacity)
        return ratio_of_batches([(RequestShape(history=min(tokens, round(history)), capacity=tokens),)], self._layout)
