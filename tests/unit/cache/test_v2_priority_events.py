"""What the priority events of V2 say about a block whose page is replaced by a better placed one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmesh.hashing import ReuseScope
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

PROMPT = np.arange(8, dtype=np.int32)


def kept(priority: int) -> RetentionConfig:
    ranges = (TokenRangeRetention(token_start=0, priority=priority),)
    return RetentionConfig(token_range_retention_configs=ranges)


@pytest.mark.parametrize("priority", [35, 60])
def test_a_page_that_comes_back_under_another_priority(
    priority: int, make_manager: Any, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """§4.1: the block moves to the device, and has the priority of the page that is there now."""
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(sink, "on_priority", lambda group, keys, old, new: told.append((len(keys), old, new)))
    manager = make_manager(4, host=4)
    late = manager.create(ReuseScope(), PROMPT, "late", retention=kept(priority))
    early = manager.create(ReuseScope(), PROMPT, "early", retention=kept(60))
    for cache in (early, late):
        assert cache.resume()
        assert cache.resize(8)
        if cache is early:
            cache.commit(PROMPT)
            cache.close()
    assert sink.moves == []
    other = manager.create(ReuseScope(), PROMPT[:1], "other", reuse=False)
    assert other.resume()
    assert other.resize(8)
    assert sink.moves == [(0, 1)] * 2
    late.commit(PROMPT)
    assert sink.moves[2:] == [(1, 0)] * 2
    assert told == ([] if priority == 60 else [(1, 60, 35)] * 2)
    other.close()
    late.close()
