"""Prompts become ids once, and everything wrong with them is the client's 400."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvmesh.models.tokenizer import ChatTemplateError
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.requests import ChatCompletionRequest, ChatMessage, CompletionRequest
from kvmesh.router.tokenizing import INLINE_CHARS, PromptCache, PromptTokenizer


class FakeTokenizer:
    """One id per character; id 1 is put first when special tokens are asked for."""

    vocab_size = 200
    longest_token_chars = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def encode_many(self, texts: Sequence[str], *, add_special: bool = True) -> list[np.ndarray]:
        self.calls.append(("/".join(text[:10] for text in texts), threading.current_thread().name))
        if any("\ud800" in text for text in texts):
            raise ValueError("The text is not valid Unicode.")
        return [np.array([1] * add_special + [ord(char) % 200 for char in text], dtype=np.int32) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if variables and "fail" in variables:
            raise ChatTemplateError("The template refuses.", variable=variables["fail"])
        return "|".join(message["content"] for message in messages) + ">" * add_generation_prompt


def completion(prompt: Any, **fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt, **fields)


def chat(*contents: str, **fields: Any) -> ChatCompletionRequest:
    messages = [ChatMessage(role="user", content=content) for content in contents]
    return ChatCompletionRequest(model="m", messages=messages, **fields)


async def test_forms_of_prompts() -> None:
    tokenizer = PromptTokenizer(FakeTokenizer())
    [one] = await tokenizer.prompts(completion("ab"))
    assert (one.ids.tolist(), one.text) == ([1, 97, 98], "ab")
    [bare] = await tokenizer.prompts(completion("ab", add_special_tokens=False))
    assert bare.ids.tolist() == [97, 98]
    two = await tokenizer.prompts(completion([[5, 6], [7]]))
    assert [(prompt.ids.tolist(), prompt.text) for prompt in two] == [([5, 6], None), ([7], None)]
    assert two[0].ids.dtype == np.int32


async def test_chat_is_rendered_without_special_tokens() -> None:
    tokenizer = PromptTokenizer(FakeTokenizer())
    [prompt] = await tokenizer.prompts(chat("a", "b"))
    assert (prompt.text, prompt.ids.tolist()) == ("a|b>", [97, 124, 98, 62])
    [continued] = await tokenizer.prompts(chat("a", add_generation_prompt=False))
    assert continued.text == "a"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion("", add_special_tokens=False), "prompt"),
        (completion(["a", ""], add_special_tokens=False), "prompt[1]"),
        (completion([5, 200]), "prompt"),
        (completion([[5], [-1]]), "prompt[1]"),
        (completion("\ud800"), "prompt"),
        (completion(["a", "\ud800", "b"]), "prompt[1]"),
        (chat("x", chat_template_kwargs={"fail": None}), "messages"),
        (chat("x", chat_template_kwargs={"fail": "tools"}), "chat_template_kwargs.tools"),
    ],
)
async def test_what_is_wrong_is_a_400(request_: CompletionRequest, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        await PromptTokenizer(FakeTokenizer()).prompts(request_)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_long_texts_leave_the_event_loop_and_known_ones_are_not_tokenised_again() -> None:
    fake = FakeTokenizer()
    tokenizer = PromptTokenizer(fake)
    await tokenizer.prompts(completion("short"))
    await tokenizer.prompts(completion("x" * (INLINE_CHARS + 1)))
    await tokenizer.prompts(completion("x" * (INLINE_CHARS + 1)))
    here = threading.current_thread().name
    assert [name == here for _, name in fake.calls] == [True, False]
    assert tokenizer.statistics() == {"prompt_cache_hits_total": 1, "prompt_cache_misses_total": 2}


async def test_a_batch_is_one_call_and_a_repeated_text_is_tokenised_once() -> None:
    fake = FakeTokenizer()
    tokenizer = PromptTokenizer(fake)
    await tokenizer.prompts(completion("a"))
    prompts = await tokenizer.prompts(completion(["a", "b", "c", "b"], add_special_tokens=True))
    assert [prompt.ids.tolist() for prompt in prompts] == [[1, 97], [1, 98], [1, 99], [1, 98]]
    assert [texts for texts, _ in fake.calls] == ["a", "b/c"]


@pytest.mark.parametrize("request_", [completion(["ok", "x" * 21]), chat("x" * 21)])
async def test_a_text_that_cannot_fit_is_not_tokenised(
    request_: CompletionRequest | ChatCompletionRequest,
) -> None:
    fake = FakeTokenizer()
    with pytest.raises(ApiError) as caught:
        await PromptTokenizer(fake).prompts(request_, max_seq_len=10)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert fake.calls == []
    await PromptTokenizer(fake).prompts(completion("x" * 20), max_seq_len=10)


async def test_token_texts() -> None:
    assert await PromptTokenizer(FakeTokenizer()).token_texts([97, 98, 97]) == ["a", "b", "a"]


def test_cache_is_bounded_by_text() -> None:
    cache = PromptCache(max_chars=10)
    ids = np.array([1], dtype=np.int32)
    cache.put("a" * 6, True, ids)
    cache.put("a" * 6, False, ids)
    assert cache.get("a" * 6, True) is None
    assert cache.get("a" * 6, False) is ids
    cache.put("b" * 11, True, ids)
    assert cache.get("b" * 11, True) is None
    cache.put("c" * 4, True, ids)
    assert cache.get("a" * 6, False) is ids


async def test_detokenize_checks_ids() -> None:
    tokenizer = PromptTokenizer(FakeTokenizer())
    assert await tokenizer.decode([97, 98]) == "ab"
    with pytest.raises(ApiError) as caught:
        await tokenizer.decode([200])
    assert caught.value.param == "tokens"
