"""Chat templates render as transformers renders them, in a sandbox, and fail with sentences."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvmesh.models.chat_template import ChatTemplate, ChatTemplateError
from kvmesh.models.errors import ModelError
from kvmesh.models.store import ModelSource
from kvmesh.models.tokenizer import Tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&</b> é"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]

TEMPLATES = {
    "whitespace control": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    {% endif %}\n{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% break %}{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "variables": "{{ bos_token }}{{ add_generation_prompt }}{{ enable_thinking }}{{ missing is defined }}",
    "strings": "{{ messages[0].content.split(' ')[0].upper() }}{{ messages[-1]['content'] | trim }}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("prompt", [True, False])
def test_same_text_as_transformers(source: str, prompt: bool) -> None:
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(
        TURNS, {"add_generation_prompt": prompt, "enable_thinking": False}
    )
    (theirs,), _ = render_jinja_template(
        [TURNS], chat_template=source, add_generation_prompt=prompt, bos_token="<s>", enable_thinking=False
    )
    assert ours == theirs


def test_the_built_in_model(default_source: ModelSource, golden: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_source(default_source)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt == golden[0]["prompt"]
    assert tokenizer.encode(prompt, add_special=False).tolist() == golden[0]["prompt_ids"]
    own_system = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=False)
    assert tokenizer.apply_chat_template(TURNS[:2], variables={"add_generation_prompt": False, "cls": 1}) == own_system
    assert own_system == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b> é<|im_end|>\n"


def test_the_date() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TURNS)
    assert year == str(dt.datetime.now().astimezone().year)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "not text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "not text"),
    ],
)
def test_malformed_messages(messages: Any, sentence: str) -> None:
    with pytest.raises(ChatTemplateError, match=sentence):
        ChatTemplate("x", {}).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_or_unhappy_template_is_a_sentence(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="The model's chat template refuses these messages: "):
        ChatTemplate(source, {}).render(TURNS)


def test_the_template_cannot_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].update({'content': 'y'}) }}", {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_reserved_variables() -> None:
    template = ChatTemplate("{{ add_generation_prompt }}{{ cls }}", {})
    assert template.render(TURNS) == "True"
    assert template.render(TURNS, {"add_generation_prompt": False, "cls": 1}) == "False1"
    for name in ("bos_token", "messages", "self", "tools", "documents"):
        with pytest.raises(ChatTemplateError, match=f"'{name}' cannot be set") as caught:
            template.render(TURNS, {name: []})
        assert caught.value.variable == name
    with pytest.raises(ChatTemplateError, match="must be true or false"):
        template.render(TURNS, {"add_generation_prompt": "yes"})


def test_an_invalid_template_is_found_at_start() -> None:
    with pytest.raises(ModelError, match="chat template is invalid"):
        ChatTemplate("{% for %}", {})


def test_no_template(default_source: ModelSource, tmp_path: Any) -> None:
    built_in = Tokenizer.from_source(default_source)
    plain = Tokenizer(built_in._tokenizer, eos_token_ids=frozenset(), special_tokens={}, chat_template=None)
    assert not plain.has_chat_template
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        plain.apply_chat_template(TURNS)
