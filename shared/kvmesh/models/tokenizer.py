"""Text to token ids and back, and conversations to prompts, for any checkpoint. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from kvmesh.models.chat_template import ChatTemplate, ChatTemplateError
from kvmesh.models.checkpoint import int_set, open_gguf, read_json
from kvmesh.models.detokenizer import IncrementalDetokenizer as _IncrementalDetokenizer
from kvmesh.models.detokenizer import TokenBytes
from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_tokenizer import build_tokenizer
from kvmesh.models.store import ModelSource

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "Tokenizer"]

_NOT_UNICODE = "The text is not valid Unicode: it holds an unpaired surrogate."
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_LONG_CHARS = 2000
"""Longer texts go through ``tokenizers``' batch call, which releases the GIL as its ``encode`` does not."""
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Thread-safe: its methods change no state that can be seen.

    Attributes:
        eos_token_ids: ids that end a generation.
        bos_token_id: id that ``encode`` puts first, or None.
        longest_token_chars: characters of the longest token: a text of more than ``n`` times as many has more than
            ``n`` tokens.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        self.eos_token_ids = eos_token_ids
        bos = special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else tokenizer.token_to_id(bos)
        self.token_bytes = _token_bytes(tokenizer)
        self.longest_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """The tokenizer of a checkpoint.

        Raises:
            ModelError: it has none, or one that is damaged or not supported.
        """
        return _from_gguf(source.path) if source.format == "gguf" else _from_directory(source.path)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; the model's output may be padded beyond it."""
        return len(self.token_bytes)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can be used."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """Token ids of ``text`` as int32 ``[n]``; special tokens written in the text are recognised.

        A long text leaves other threads running.

        Args:
            text: any Unicode text.
            add_special: add what the checkpoint puts around a text (BOS). False for rendered chat templates, which
                write it themselves.

        Raises:
            ValueError: the text holds half of a surrogate pair, which no UTF-8 can express.
        """
        if len(text) > _LONG_CHARS:
            return self.encode_many([text], add_special=add_special)[0]
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(_NOT_UNICODE) from error
        return np.array(encoding.ids, dtype=np.int32)

    def encode_many(self, texts: Sequence[str], *, add_special: bool = True) -> list[np.ndarray]:
        """:meth:`encode` of each text, spread over the processors while other threads run.

        Raises:
            ValueError: one of the texts holds half of a surrogate pair.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(_NOT_UNICODE) from error
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        data = self.token_bytes.join(_as_list(ids), skip_special_tokens)
        if self.token_bytes.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as a prompt; encode it with ``add_special=False``.

        Args:
            messages: ``{"role", "content"}`` objects as OpenAI's API has them.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further template variables (``chat_template_kwargs``); an ``add_generation_prompt`` among them
                counts more than the argument.

        Raises:
            ChatTemplateError: no template, malformed messages or variables, or a conversation that the template
                refuses.
        """
        if self._chat_template is None:
            raise ChatTemplateError("This model has no chat template; use /v1/completions with a plain prompt.")
        return self._chat_template.render(
            messages, {"add_generation_prompt": add_generation_prompt, **(variables or {})}
        )


class IncrementalDetokenizer(_IncrementalDetokenizer):
    """:class:`kvmesh.models.detokenizer.IncrementalDetokenizer` of a :class:`Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        super().__init__(tokenizer.token_bytes, skip_special_tokens)


def _as_list(ids: Iterable[int]) -> Iterable[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else ids  # numpy scalars hash and compare slowly


def _token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    pieces: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, index in vocabulary.items():
        pieces[index] = piece
    added: dict[int, tokenizers.AddedToken] = tokenizer.get_added_tokens_decoder()
    special = frozenset(index for index, token in added.items() if token.special)
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    return TokenBytes(pieces, frozenset(added), special, decoder)


def _from_gguf(path: Path) -> Tokenizer:
    file = open_gguf(path)
    tokenizer = build_tokenizer(file)
    meta = file.metadata
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    eos_ids = frozenset(int(meta[key]) for name in _GGUF_EOS_KEYS if (key := f"tokenizer.ggml.{name}") in meta)
    ids = {
        "bos_token": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token": meta.get("tokenizer.ggml.padding_token_id"),
        "unk_token": meta.get("tokenizer.ggml.unknown_token_id"),
    }
    special_tokens = {name: tokens[index] for name, index in ids.items() if index is not None}
    return Tokenizer(
        tokenizer,
        eos_token_ids=eos_ids,
        special_tokens=special_tokens,
        chat_template=meta.get("tokenizer.chat_template"),
    )


def _from_directory(path: Path) -> Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for a missing or malformed file
        raise ModelError(f"Cannot read {path / 'tokenizer.json'}: {error}.") from error
    settings = read_json(path / "tokenizer_config.json", required=False)
    special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
    eos_ids = _directory_eos(path)
    if not eos_ids and "eos_token" in special_tokens:
        eos_ids = int_set(tokenizer.token_to_id(special_tokens["eos_token"]))
    return Tokenizer(
        tokenizer,
        eos_token_ids=eos_ids,
        special_tokens=special_tokens,
        chat_template=_directory_template(path, settings),
    )


def _directory_eos(path: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        if ids := int_set(read_json(path / name, required=False).get("eos_token_id")):
            return ids
    return frozenset()


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):  # a serialised AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else None


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
