"""Chat templates: Jinja from the checkpoint, rendered in a sandbox with the names that transformers offers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvmesh.models.errors import ModelError

__all__ = ["ChatTemplate", "ChatTemplateError"]

_RESERVED = frozenset({"messages", "self", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"})
"""Variables that a request has other fields for, or that are the checkpoint's."""


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered; the message is a sentence for the client.

    Attributes:
        variable: the template variable at fault; None when it is the messages.
    """

    def __init__(self, message: str, *, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


class ChatTemplate:
    """A compiled chat template.

    The template is untrusted: it runs in Jinja's immutable sandbox and sees only the conversation and the special
    tokens. It sees no file, no environment and no Python object of ours.

    Args:
        source: the Jinja text.
        special_tokens: values of ``bos_token``, ``eos_token`` and so on.

    Raises:
        ModelError: the text is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"The checkpoint's chat template is invalid: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The conversation as one prompt string.

        Args:
            messages: ``{"role", "content"}`` objects as OpenAI's API has them; a list of text parts is joined.
            variables: further template variables (``chat_template_kwargs``). ``add_generation_prompt``, whether to end
                with the opening of the assistant's turn, is true where it is not given.

        Raises:
            ChatTemplateError: malformed messages or variables, or a conversation that the template refuses.
        """
        values = {"add_generation_prompt": True, **(variables or {})}
        if taken := next((name for name in values if name in _RESERVED), None):
            raise ChatTemplateError(f"The chat template variable {taken!r} cannot be set; remove it.", variable=taken)
        if not isinstance(values["add_generation_prompt"], bool):
            raise ChatTemplateError(
                "The chat template variable 'add_generation_prompt' must be true or false.",
                variable="add_generation_prompt",
            )
        turns = _checked_messages(messages)
        try:
            # As one mapping: a variable may be called what no keyword argument can be.
            return self._template.render({**values, "messages": turns, **self._special_tokens})
        except (
            jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            # Whatever the template's own expressions can raise on a conversation it was not written for.
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error}") from error


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise ChatTemplateError("messages must hold at least one message.")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"messages[{index}] must be an object with role and content.")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(f"messages[{index}].role must be a non-empty string.")
        turns.append({**message, "content": _text_of(message.get("content"), index)})
    return turns


def _text_of(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(f"messages[{index}].content must be a string or a list of text parts.")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ChatTemplateError(
                f"messages[{index}].content holds a part that is not text; this model reads only parts of "
                'the form {"type": "text", "text": "..."}.'
            )
        texts.append(text)
    return "\n".join(texts)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks training targets; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # noqa: DTZ005 (templates print the reader's local date)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, no HTML escapes: the result goes into a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
