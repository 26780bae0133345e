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

    def encode(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """Int32 ids ``[n]``."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
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

    async def prompts(self, request: CompletionRequest | ChatCompletionRequest) -> list[Prompt]:
        """The prompts of a checked request, in order.

        Raises:
            ApiError: 400 when a prompt is empty, holds ids of no token, or the chat template refuses the messages.
        """
        if isinstance(request, ChatCompletionRequest):
            return [await self.chat(request)]
        special = request.add_special_tokens is not False
        found = []
        for index, prompt in enumerate(prompts_of(request.prompt)):
            param = "prompt" if index == 0 else f"prompt[{index}]"
            found.append(
                await self.text(prompt, add_special=special, param=param)
                if isinstance(prompt, str)
                else self._ids(prompt, param)
            )
        return found

    async def chat(self, request: ChatCompletionRequest) -> Prompt:
        """The prompt of a conversation: the model's template, rendered and tokenised."""
        messages = template_messages(request)
        generation = request.add_generation_prompt is not False
        kwargs = request.chat_template_kwargs or {}
        render: Callable[[], str] = lambda: self._tokenizer.apply_chat_template(  # noqa: E731
            messages, add_generation_prompt=generation, **kwargs
        )
        try:
            text = await self._run(render, sum(len(message["content"]) for message in messages))
        except ChatTemplateError as error:
            raise bad_request(str(error), param="messages", code="chat_template_error") from None
        return await self.text(text, add_special=False, param="messages")

    async def text(self, text: str, *, add_special: bool, param: str) -> Prompt:
        """The prompt of a text.

        Raises:
            ApiError: 400 when the text has no tokens or is not Unicode; names ``param``.
        """
        ids = self._cache.get(text, add_special)
        if ids is None:
            try:
                ids = await self._run(lambda: self._tokenizer.encode(text, add_special=add_special), len(text))
            except ValueError as error:
                raise bad_request(str(error), param=param) from None
            self._cache.put(text, add_special, ids)
        if not len(ids):
            raise bad_request("The prompt is empty; send at least one token.", param=param, code="empty_prompt")
        return Prompt(ids, text)

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            ApiError: 400 when an id belongs to no token.
        """
        check_token_ids("tokens", ids, self.vocab_size)
        return await self._run(lambda: self._tokenizer.decode(ids, skip_special_tokens=False), 4 * len(ids))

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
