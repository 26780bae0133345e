from __future__ import annotations

from kvmesh.config.llm_args import FOREIGN_KEYS
from kvmesh.config.nearest import unknown_key_message


def test_a_near_key_is_suggested() -> None:
    assert unknown_key_message("Max-Tokns", ["max_tokens", "port"]) == (
        "unknown key 'Max-Tokns'; did you mean 'max_tokens'?"
    )


def test_without_a_near_one_a_few_that_resemble_it_are_named() -> None:
    message = unknown_key_message("temperature", FOREIGN_KEYS)
    named = message.removeprefix("unknown key 'temperature'; the nearest are ").removesuffix(
        "; see docs/configuration.md"
    )
    names = named.split(", ")
    assert len(names) == 5
    assert set(names) <= FOREIGN_KEYS


def test_a_key_like_no_other_is_sent_to_the_reference() -> None:
    assert unknown_key_message("zzz", FOREIGN_KEYS) == "unknown key 'zzz'; see docs/configuration.md"


def test_a_short_list_is_shown_whole() -> None:
    assert unknown_key_message("zzz", ["b", "a"]) == "unknown key 'zzz'; known keys: a, b"
