"""Build a ``tokenizers.Tokenizer`` from the vocabulary and merges in GGUF metadata."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile

__all__ = ["build_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the GGUF file describes; its ids equal llama.cpp's and transformers'.

    Raises:
        ModelError: the file has no tokenizer, or one of a kind that is not supported.
    """
    meta = file.metadata
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is read from GGUF. "
            "Use the model's Hugging Face directory instead."
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception for a merge outside the vocabulary
        raise ModelError(f"The vocabulary of {file.path} is inconsistent: {error}.") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, file)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, meta)
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos_id = int(meta["tokenizer.ggml.bos_token_id"])
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _pre_tokenizer(pre: str, file: GgufFile) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = {"llama-bpe": _LLAMA3_PATTERN, "qwen2": _QWEN2_PATTERN}.get(pre)
    if pattern is None:
        raise ModelError(
            f"{file.path} uses the pre-tokenizer {pre!r}, which is not supported; use the model's Hugging Face "
            "directory instead."
        )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], meta: dict[str, Any]) -> None:
    types = meta.get("tokenizer.ggml.token_type")
    if types is None:
        return
    special = [AddedToken(tokens[i], special=True, normalized=False) for i in (types == _CONTROL).nonzero()[0]]
    literal = [AddedToken(tokens[i], special=False, normalized=False) for i in (types == _USER_DEFINED).nonzero()[0]]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(literal)
