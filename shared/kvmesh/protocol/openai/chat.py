"""Messages of a chat request as a template reads them."""

from __future__ import annotations

from kvmesh.protocol.openai.requests import ChatCompletionRequest, ChatMessage

__all__ = ["template_messages"]


def template_messages(request: ChatCompletionRequest) -> list[dict[str, str]]:
    """Messages with plain text content, for ``Tokenizer.apply_chat_template``.

    Text parts are joined by line breaks, as vLLM does. ``developer``, OpenAI's newer name of the system role, is
    ``system`` to templates, which do not know it.
    """
    return [_plain(message) for message in request.messages]


def _plain(message: ChatMessage) -> dict[str, str]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain
