"""Prompts to token ids, once per request: workers are sent ids and never tokenise what the router has tokenised."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio
import numpy as np
from anyio import to_thread

from kvmesh.models.tokenizer import ChatTemplateError
from kvmesh.protocol.errors import bad_request
from kvmesh.protocol.openai.chat import template_messages
from kvmesh.protocol.openai.fanout import prompts_of
from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest
from kvmesh.protocol.openai.validate import check_token_ids

__all__ = ["Prompt", "PromptCache", "PromptTokenizer", "TextTokenizer"]

INLINE_CHARS = 2000
"""Shorter texts are tokenised on the event loop: a hop to a thread costs as much (tens of microseconds)."""
CACHE_CHARS = 4 * 1024 * 1024
"""Text kept for prompts that come again, retries and benchmarks above all; ids take about as much again."""

T = TypeVar("T")


class TextTokenizer(Protocol):
    """What the router needs of :class:`kvmesh.models.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def longest_token_chars(self) -> int:
        """Characters of the longest token."""

    def encode_many(self, texts: Sequence[str], *, add_special: bool = True) -> list[np.ndarray]:
        """Int32 ids ``[n]`` of each text. A long one leaves other threads running."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as a prompt."""


class Prompt(NamedTuple):
    """One tokenised prompt."""

    ids: np.ndarray
    """Int32 ``[n]``, n > 0; shared, never written to."""
    text: str | None
    """What it was made from; None when it came as ids."""


class PromptCache:
    """The most recently used texts with their ids, bounded by the length of the texts."""

    def __init__(self, max_chars: int = CACHE_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._entries: OrderedDict[tuple[str, bool], np.ndarray] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, text: str, add_special: bool) -> np.ndarray | None:
        """Ids of a known text."""
        ids = self._entries.get((text, add_special))
        if ids is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end((text, add_special))
        return ids

    def put(self, text: str, add_special: bool, ids: np.ndarray) -> None:
        """Remember ids, forgetting the least recently used texts; a text over the whole budget is not kept."""
        if len(text) > self._max_chars or (text, add_special) in self._entries:
            return
        self._entries[(text, add_special)] = ids
        self._chars += len(text)
        while self._chars > self._max_chars:
            (old, _), _ = self._entries.popitem(last=False)
            self._chars -= len(old)


class PromptTokenizer:
    """Tokenises requests, long ones in threads.

    Args:
        tokenizer: of the served model.
        threads: how many run at a time.
    """

    def __init__(self, tokenizer: TextTokenizer, *, threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self._limiter = anyio.CapacityLimiter(threads)
        self._cache = PromptCache()

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._tokenizer.vocab_size

    async def prompts(
        self, request: CompletionRequest | ChatCompletionRequest, *, max_seq_len: int = 0
    ) -> list[Prompt]:
        """The prompts of a checked request, in order.

        Args:
            request: checked.
            max_seq_len: the context in tokens; a text that is too long for it whatever its tokens is not tokenised.
                0: unknown.

        Raises:
            ApiError: 400 when a prompt is empty or too long, holds ids of no token, or the chat template refuses the
                messages.
        """
        if isinstance(request, ChatCompletionRequest):
            return [await self.chat(request, max_seq_len=max_seq_len)]
        prompts = list(prompts_of(request.prompt))
        params = ["prompt" if index == 0 else f"prompt[{index}]" for index in range(len(prompts))]
        texts = {param: prompt for param, prompt in zip(params, prompts, strict=True) if isinstance(prompt, str)}
        found = await self._texts(texts, add_special=request.add_special_tokens is not False, max_seq_len=max_seq_len)
        return [
            found[param] if isinstance(prompt, str) else self._ids(prompt, param)
            for param, prompt in zip(params, prompts, strict=True)
        ]

    async def chat(self, request: ChatCompletionRequest, *, max_seq_len: int = 0) -> Prompt:
        """The prompt of a conversation: the model's template, rendered and tokenised."""
        messages = template_messages(request)
        generation = request.add_generation_prompt is not False
        render: Callable[[], str] = lambda: self._tokenizer.apply_chat_template(  # noqa: E731
            messages, add_generation_prompt=generation, variables=request.chat_template_kwargs
        )
        try:
            text = await self._run(render, sum(len(message["content"]) for message in messages))
        except ChatTemplateError as error:
            param = "messages" if error.variable is None else f"chat_template_kwargs.{error.variable}"
            raise bad_request(str(error), param=param, code="chat_template_error") from None
        return await self.text(text, add_special=False, param="messages", max_seq_len=max_seq_len)

    async def text(self, text: str, *, add_special: bool, param: str, max_seq_len: int = 0) -> Prompt:
        """The prompt of a text.

        Raises:
            ApiError: 400 when the text has no tokens, is too long or is not Unicode; names ``param``.
        """
        return (await self._texts({param: text}, add_special=add_special, max_seq_len=max_seq_len))[param]

    async def _texts(self, texts: Mapping[str, str], *, add_special: bool, max_seq_len: int) -> dict[str, Prompt]:
        """The prompts of texts by the parameters that hold them; all that are new are tokenised in one call."""
        known: dict[str, np.ndarray] = {}
        new: dict[str, str] = {}
        for param, text in texts.items():
            self._check_length(text, param, max_seq_len)
            ids = None if text in known else self._cache.get(text, add_special)
            if ids is not None:
                known[text] = ids
            elif text not in known:
                new.setdefault(text, param)
        if new:
            wanted = list(new)
            try:
                encoded = await self._run(
                    lambda: self._tokenizer.encode_many(wanted, add_special=add_special), sum(map(len, wanted))
                )
            except ValueError as error:
                param = next((new[text] for text in wanted if not _is_unicode(text)), new[wanted[0]])
                raise bad_request(str(error), param=param) from None
            for text, ids in zip(wanted, encoded, strict=True):
                known[text] = ids
                self._cache.put(text, add_special, ids)
        for param, text in texts.items():
            if not len(known[text]):
                raise bad_request("The prompt is empty; send at least one token.", param=param, code="empty_prompt")
        return {param: Prompt(known[text], text) for param, text in texts.items()}

    def _check_length(self, text: str, param: str, max_seq_len: int) -> None:
        if max_seq_len and len(text) > max_seq_len * self._tokenizer.longest_token_chars:
            raise bad_request(
                f"This model's context is {max_seq_len} tokens and the prompt, of {len(text)} characters, has more; "
                "send a shorter prompt.",
                param=param,
                code="context_length_exceeded",
            )

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            ApiError: 400 when an id belongs to no token.
        """
        check_token_ids("tokens", ids, self.vocab_size)
        return await self._run(lambda: self._tokenizer.decode(ids, skip_special_tokens=False), 4 * len(ids))

    async def token_texts(self, ids: list[int]) -> list[str]:
        """The text of each token by itself."""

        def decode() -> list[str]:
            texts = {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in set(ids)}
            return [texts[token] for token in ids]

        return await self._run(decode, 4 * len(ids))

    def statistics(self) -> dict[str, float]:
        """How often a prompt had been seen before."""
        return {"prompt_cache_hits_total": self._cache.hits, "prompt_cache_misses_total": self._cache.misses}

    def _ids(self, ids: list[int], param: str) -> Prompt:
        check_token_ids(param, ids, self.vocab_size)
        return Prompt(np.asarray(ids, dtype=np.int32), None)

    async def _run(self, work: Callable[[], T], chars: int) -> T:
        if chars <= INLINE_CHARS:
            return work()
        return await to_thread.run_sync(work, limiter=self._limiter)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
