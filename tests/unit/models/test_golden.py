"""The built-in model end to end: greedy output equals transformers' for every golden prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvmesh.models.registry import load_model
from kvmesh.models.store import ModelSource

SAFE_MARGIN = 1e-3  # below it, rounding alone may swap the two best tokens


@pytest.fixture(scope="module")
def model(default_source: ModelSource) -> Any:
    return load_model(default_source)


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 7))])
def test_greedy_continuation(index: int, model: Any, runner: Any, golden: list[dict[str, Any]]) -> None:
    item = golden[index]
    ids, logits = runner(model, tokens_per_block=32, num_pages=32).greedy(item["prompt_ids"], 64, chunk=100)
    margins = item["top2_margin"]
    certain = next((step for step, margin in enumerate(margins) if margin < SAFE_MARGIN), len(margins))
    assert ids[:certain] == item["greedy_ids"][:certain]
    for step in range(certain):
        best = torch.topk(logits[step], 2).values
        assert float(best[0] - best[1]) == pytest.approx(margins[step], abs=2e-3)


def test_results_do_not_depend_on_the_batch(model: Any, runner: Any, golden: list[dict[str, Any]]) -> None:
    prompts = [item["prompt_ids"] for item in golden[:4]]
    together = runner(model, tokens_per_block=32, num_pages=32)
    joint = together.step(dict(enumerate(prompts)))
    joint_next = together.step({i: [int(row.argmax())] for i, row in enumerate(joint)})
    for index, ids in enumerate(prompts):
        alone = runner(model, tokens_per_block=32, num_pages=32)
        torch.testing.assert_close(alone.step({0: ids})[0], joint[index], atol=1e-3, rtol=0)
        decoded = alone.step({0: [int(joint[index].argmax())]})
        torch.testing.assert_close(decoded[0], joint_next[index], atol=1e-3, rtol=0)
