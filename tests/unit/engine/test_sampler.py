"""The sampler: every parameter, independence of the batch, and agreement with the stated distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvmesh.engine.sampler import BROKEN_LOGITS, NO_CHOICE, Sampler, filtered_probabilities
from kvmesh.engine.sampler_state import SamplerState
from kvmesh.engine.tokens import TokenHistory
from kvmesh.protocol.sampling import SamplingParams

VOCABULARY = 50
EOS = 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(frozenset({EOS}))


def history(prompt: list[int], output: list[int] | None = None) -> TokenHistory:
    tokens = TokenHistory(np.array(prompt, dtype=np.int32))
    for token in output or []:
        tokens.append(token)
    return tokens


def state(sampler: Sampler, prompt: list[int], output: list[int] | None = None, **params: object) -> SamplerState:
    settings = {"max_tokens": 16, "temperature": 0.0, **params}
    return sampler.state(SamplingParams(**settings), history(prompt, output))  # type: ignore[arg-type]


def random_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def test_empty_batch(sampler: Sampler) -> None:
    assert sampler.sample(torch.empty(0, VOCABULARY), []) == []


def test_greedy_takes_the_maximum(sampler: Sampler) -> None:
    logits = random_logits(3)
    chosen = sampler.sample(logits.clone(), [state(sampler, [1]) for _ in range(3)])
    assert [sampled.token_id for sampled in chosen] == logits.argmax(-1).tolist()
    assert all(sampled.logprob is None for sampled in chosen)


def test_same_seed_same_token_whatever_the_batch(sampler: Sampler) -> None:
    logits = random_logits(4, seed=3)
    params = {"temperature": 0.9, "seed": 11}
    alone = sampler.sample(logits[2:3].clone(), [state(sampler, [1, 2, 3], **params)])[0]
    others = [
        state(sampler, [4], temperature=1.3, top_k=3, seed=1),
        state(sampler, [5], repetition_penalty=1.5),
        state(sampler, [1, 2, 3], **params),
        state(sampler, [6], temperature=0.5, top_p=0.4, seed=9, logprobs=2),
    ]
    assert sampler.sample(logits.clone(), others)[2] == alone


def test_the_stream_continues_after_a_hand_off(sampler: Sampler) -> None:
    """A prompt whose first tokens were sampled elsewhere draws what the uninterrupted sequence would draw."""
    params = {
        "temperature": 1.0,
        "seed": 5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    }
    whole = state(sampler, [3, 4, 5], **params)
    tokens = []
    for step in range(8):
        token = sampler.sample(random_logits(seed=step), [whole])[0].token_id
        whole.history.append(token)
        tokens.append(token)
    resumed = state(sampler, [3, 4, 5], tokens[:3], **params)
    for step in range(3, 8):
        token = sampler.sample(random_logits(seed=step), [resumed])[0].token_id
        resumed.history.append(token)
    assert resumed.history.output().tolist() == tokens


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_frequencies_match_the_filtered_distribution(sampler: Sampler, params: dict[str, float]) -> None:
    logits = random_logits(seed=1)
    expected = reference_distribution(logits[0], **params)
    draws = 4000
    row = state(sampler, [], **params, seed=99)
    counts = np.zeros(VOCABULARY)
    for _ in range(draws):
        counts[sampler.sample(logits.clone(), [row])[0].token_id] += 1
        row.history.append(0)  # only the position matters here
    assert counts[expected == 0].sum() == 0
    kept = expected > 5 / draws
    chi_square = float((((counts - draws * expected) ** 2)[kept] / (draws * expected)[kept]).sum())
    freedom = int(kept.sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


def reference_distribution(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """HF's warpers, written naively in float64."""
    scores = logits.double().numpy() / temperature
    if top_k:
        scores[scores < np.sort(scores)[-top_k]] = -np.inf
    if top_p < 1.0:
        order = np.argsort(-scores)
        shares = np.exp(scores[order] - scores.max())
        shares /= shares.sum()
        before = np.cumsum(shares) - shares
        scores[order[before >= top_p]] = -np.inf
    shares = np.exp(scores - scores.max())
    shares[shares < min_p] = 0.0
    return shares / shares.sum()


def test_nucleus_wider_than_the_first_guess() -> None:
    logits = torch.zeros(2000)
    logits[:700] = 1.0
    params = SamplingParams(max_tokens=1, top_p=0.5)
    weights = filtered_probabilities(logits, params)
    assert int((weights > 0).sum()) == 700  # ties with the last kept token are kept


def test_ties_at_top_k_are_kept() -> None:
    weights = filtered_probabilities(torch.tensor([1.0, 2.0, 2.0, 0.0]), SamplingParams(max_tokens=1, top_k=1))
    assert (weights > 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-38, 1e-6])
def test_tiny_temperature_is_greedy(sampler: Sampler, temperature: float) -> None:
    logits = random_logits(seed=8) * 100
    row = state(sampler, [1], temperature=temperature, seed=4)
    assert row.greedy
    assert sampler.sample(logits.clone(), [row])[0].token_id == int(logits.argmax())


def test_repetition_penalty_covers_prompt_and_output(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.9, 2.0
    row = state(sampler, [10], [11], repetition_penalty=2.0)
    assert sampler.sample(logits, [row])[0].token_id == 12
    assert logits[0, 10] == pytest.approx(1.5)
    assert logits[0, 11] == pytest.approx(1.45)


def test_repetition_penalty_multiplies_negative_logits(sampler: Sampler) -> None:
    logits = torch.full((1, VOCABULARY), -5.0)
    logits[0, 10] = -1.0
    sampler.sample(logits, [state(sampler, [10], repetition_penalty=3.0)])
    assert logits[0, 10] == pytest.approx(-3.0)


def test_presence_and_frequency_penalties_cover_the_output_only(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCABULARY)
    row = state(sampler, [7], [8, 9, 9], presence_penalty=0.5, frequency_penalty=0.25)
    sampler.sample(logits, [row])
    assert logits[0, 7] == 0.0
    assert logits[0, 8] == pytest.approx(-0.75)
    assert logits[0, 9] == pytest.approx(-1.0)


def test_penalties_follow_tokens_appended_later(sampler: Sampler) -> None:
    row = state(sampler, [7], presence_penalty=1.0)
    sampler.sample(torch.zeros(1, VOCABULARY), [row])
    row.history.append(20)
    logits = torch.zeros(1, VOCABULARY)
    sampler.sample(logits, [row])
    assert logits[0, 20] == -1.0


def test_logit_bias(sampler: Sampler) -> None:
    row = state(sampler, [1], logit_bias={33: 100.0})
    assert sampler.sample(random_logits(), [row])[0].token_id == 33


def test_min_tokens_masks_every_end(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, EOS], logits[0, 30], logits[0, 31] = 9.0, 8.0, 7.0
    row = state(sampler, [1], min_tokens=2, stop_token_ids=[30])
    assert sampler.sample(logits.clone(), [row])[0].token_id == 31
    row.history.append(31)
    assert sampler.sample(logits.clone(), [row])[0].token_id == 31
    row.history.append(31)
    assert sampler.sample(logits.clone(), [row])[0].token_id == EOS


def test_end_ids(sampler: Sampler) -> None:
    assert state(sampler, [1], stop_token_ids=[5]).end_ids == {EOS, 5}
    assert state(sampler, [1], stop_token_ids=[5], ignore_eos=True).end_ids == {5}


def test_logprobs_are_of_the_raw_distribution(sampler: Sampler) -> None:
    logits = random_logits(seed=5)
    raw = torch.log_softmax(logits[0], -1)
    row = state(sampler, [1], temperature=0.3, top_k=2, logit_bias={40: 50.0}, logprobs=3, seed=1)
    sampled = sampler.sample(logits.clone(), [row])[0]
    assert sampled.token_id == 40
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(float(raw[40]))
    assert [token for token, _ in sampled.logprob.top] == raw.topk(3).indices.tolist()
    assert [value for _, value in sampled.logprob.top] == pytest.approx(raw.topk(3).values.tolist())


def test_logprobs_zero_gives_the_sampled_token_only(sampler: Sampler) -> None:
    sampled = sampler.sample(random_logits(), [state(sampler, [1], logprobs=0)])[0]
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert sampled.logprob.top == []


def test_broken_rows_do_not_spoil_their_neighbours(sampler: Sampler) -> None:
    logits = random_logits(3)
    expected = int(logits[1].argmax())
    logits[0, 3] = torch.nan
    logits[2] = -torch.inf
    chosen = sampler.sample(logits, [state(sampler, [1], temperature=1.0, logprobs=1), *[state(sampler, [1])] * 2])
    assert [sampled.token_id for sampled in chosen] == [BROKEN_LOGITS, expected, BROKEN_LOGITS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params", [{"min_tokens": 1, "stop_token_ids": list(range(VOCABULARY))}, {"repetition_penalty": 1e-40}]
)
def test_parameters_that_leave_no_token_spoil_their_row_only(
    sampler: Sampler, params: dict[str, object], temperature: float
) -> None:
    logits = random_logits(2)
    rows = [state(sampler, list(range(VOCABULARY)), temperature=temperature, **params), state(sampler, [1])]
    expected = int(logits[1].argmax())
    assert [sampled.token_id for sampled in sampler.sample(logits, rows)] == [NO_CHOICE, expected]


def test_a_distribution_that_is_not_finite_is_not_drawn_from(sampler: Sampler) -> None:
    """An infinite temperature makes -inf / inf of a masked token."""
    row = state(sampler, [1], temperature=math.inf, min_tokens=1)
    assert sampler.sample(random_logits(), [row])[0].token_id == NO_CHOICE
