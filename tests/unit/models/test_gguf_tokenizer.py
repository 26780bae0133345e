"""Tokenizers built from GGUF metadata of other families than the built-in model's."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from kvmesh.models.detokenizer import byte_to_unicode
from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile
from kvmesh.models.gguf_tokenizer import build_tokenizer

MERGES = ["1 2", "12 3", "123 4", "e \u0301"]
TOKENS = [*byte_to_unicode().values(), "12", "123", "1234", "<bos>", "<word>"]


def write(path: Path, *, model: str = "gpt2", pre: str, merges: list[str] = MERGES[:3]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(merges)
    normal, control, user_defined = 1, 3, 4
    writer.add_token_types([*[normal] * (len(TOKENS) - 2), control, user_defined])
    writer.add_bos_token_id(TOKENS.index("<bos>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["<bos>", "123", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("gpt-2", "<bos>12<word>", ["<bos>", "12", "<word>"]),
        ("qwen2", "e\u0301", ["\u00c3", "\u00a9"]),  # composed to U+00E9 before its bytes are taken
    ],
)
def test_families(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write(tmp_path / "t.gguf", pre=pre))
    assert tokenizer.encode(text).tokens == pieces


def test_only_control_tokens_are_special(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write(tmp_path / "t.gguf", pre="gpt-2"))
    ids = tokenizer.encode("<bos>1<word>").ids
    assert tokenizer.decode(ids) == "1<word>"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer of kind 'llama'"):
        build_tokenizer(write(tmp_path / "a.gguf", model="llama", pre="default"))
    with pytest.raises(ModelError, match="pre-tokenizer 'deepseek-llm'"):
        build_tokenizer(write(tmp_path / "b.gguf", pre="deepseek-llm"))
    with pytest.raises(ModelError, match="inconsistent"):
        build_tokenizer(write(tmp_path / "c.gguf", pre="gpt-2", merges=MERGES))
