"""Token ids equal the golden ids and transformers' ids; text comes back exactly, whole and piece by piece."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from kvmesh.models.checkpoint import open_gguf
from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_tokenizer import build_tokenizer
from kvmesh.models.store import ModelSource
from kvmesh.models.tokenizer import IncrementalDetokenizer, Tokenizer

SAMPLES = [
    "Hello, world!",
    "In 1969 and 12345.678e-9",
    "naïve café — “quotes” ½ ²",
    "日本語のテキスト 한국어 العربية",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "def f(x):\n\treturn x**2  # twice\r\n\r\n",
    "   leading,  double   and trailing   ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "I'll we've don't 'S 'LL",
    "",
    "\x00\x1f\u200b\ufeff",
]


@pytest.fixture(scope="module")
def tokenizer(default_source: ModelSource) -> Tokenizer:
    return Tokenizer.from_source(default_source)


@pytest.fixture(scope="module")
def reference(default_source: ModelSource) -> tokenizers.Tokenizer:
    return build_tokenizer(open_gguf(default_source.path))


def test_golden_prompts_and_texts(tokenizer: Tokenizer, golden: list[dict[str, Any]]) -> None:
    for item in golden:
        ids = tokenizer.encode(item["prompt"])
        assert ids.dtype == np.int32
        assert ids.tolist() == item["prompt_ids"]
        assert tokenizer.decode(item["greedy_ids"], skip_special_tokens=False) == item["text"]


def test_encode_many_equals_encode(tokenizer: Tokenizer) -> None:
    texts = [*SAMPLES, "a long one " * 1000]
    for special in (True, False):
        many = tokenizer.encode_many(texts, add_special=special)
        assert [ids.tolist() for ids in many] == [
            tokenizer.encode(text, add_special=special).tolist() for text in texts
        ]
        assert all(ids.dtype == np.int32 for ids in many)
    assert tokenizer.encode_many([]) == []
    for text in ("\ud800", "long" * 1000 + "\ud800"):
        with pytest.raises(ValueError, match="unpaired surrogate"):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match="unpaired surrogate"):
        tokenizer.encode_many(["fine", "\ud800"])


def test_a_long_text_leaves_other_threads_running(tokenizer: Tokenizer) -> None:
    done = threading.Event()

    def encode() -> None:
        tokenizer.encode("some words and 123 " * 40_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    ticks = 0
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 10


def test_longest_token(tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    assert tokenizer.longest_token_chars == max(map(len, reference.get_vocab()))


def test_facts_of_the_built_in_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_chat_template
    assert tokenizer.encode("<|im_end|>").tolist() == [2]
    assert tokenizer.decode([1, 4093, 2]) == "user"
    assert tokenizer.decode(np.array([1, 4093, 2]), skip_special_tokens=False) == "<|im_start|>user<|im_end|>"


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_a_round_trip(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_an_unpaired_surrogate_is_a_sentence(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="unpaired surrogate"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, 49152, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(token_id: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode([token_id])
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.push(tokenizer.encode("é").tolist()[:1])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        detokenizer.push([5, token_id])


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans(), data=st.data())
def test_pieces_add_up_to_the_whole(
    ids: list[int], skip: bool, data: Any, tokenizer: Tokenizer, reference: Any
) -> None:
    """Any ids, cut anywhere: random ids are mostly invalid UTF-8 in places, which is the hard case."""
    detokenizer, pieces, position = IncrementalDetokenizer(tokenizer, skip), [], 0
    while position < len(ids):
        size = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(ids[position : position + size]))
        position += size
    text = "".join(pieces) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == reference.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_characters_are_never_split(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text).tolist()
    assume(tokenizer.decode(ids, skip_special_tokens=False) == text)  # this vocabulary lacks some rare bytes
    detokenizer, so_far = IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ""
    for token_id in ids:
        piece = detokenizer.push([token_id])
        assert "\ufffd" not in piece or "\ufffd" in text
        so_far += piece
        assert text.startswith(so_far)
    assert so_far == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_flushed(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    first = tokenizer.encode("👩").tolist()[0]
    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_tokenizer_of_a_directory_equals_the_gguf_one(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    reference.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.from_source(ModelSource("m", tmp_path, "huggingface"))
    for text in SAMPLES:
        assert ours.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert (ours.eos_token_ids, ours.bos_token_id) == ({2}, 1)
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "<|im_start|>"
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    ours = Tokenizer.from_source(ModelSource("m", tmp_path, "huggingface"))
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "from the file"
    assert ours.eos_token_ids == {0, 2}


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A vocabulary in the manner of Llama 2: U+2581 for spaces, byte tokens for what is not in it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlo", "▁a", "he"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("h", "e")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return built


@pytest.mark.parametrize("text", ["hello a bed", "a é 日本 👍", " a  b", "</s>"])
def test_sentencepiece_vocabularies(text: str, tmp_path: Path) -> None:
    reference = sentencepiece_like()
    reference.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_source(ModelSource("m", tmp_path, "huggingface"))
    ids = ours.encode(text).tolist()
    assert ids == reference.encode(text).ids
    assert ours.decode(ids) == reference.decode(ids)
    detokenizer = IncrementalDetokenizer(ours)
    text_of_pieces = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert text_of_pieces.removeprefix(" ") == ours.decode(ids)


def test_gemma_puts_no_space_in_front(tmp_path: Path) -> None:
    """Its normaliser only replaces spaces, so its decoder strips none."""
    reference = sentencepiece_like()
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    reference.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_source(ModelSource("m", tmp_path, "huggingface"))
    for text in ("hello a bed", " a  b", "é a"):
        ids = ours.encode(text).tolist()
        assert ids == reference.encode(text).ids
        assert ours.decode(ids) == reference.decode(ids) == text


def test_unsupported_and_broken_tokenizers(tmp_path: Path) -> None:
    source = ModelSource("m", tmp_path, "huggingface")
    with pytest.raises(ModelError, match=r"Cannot read .*tokenizer\.json"):
        Tokenizer.from_source(source)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"Cannot read .*tokenizer\.json"):
        Tokenizer.from_source(source)
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    wordpiece.pre_tokenizer, wordpiece.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"decoder \(WordPiece\) is not supported"):
        Tokenizer.from_source(source)
