"""The official OpenAI client, as the deployment tests use it."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai

from containers.project import Project
from kvmesh.models.store import DEFAULT_MODEL

__all__ = ["Ask", "asking"]

Ask = Callable[..., tuple[list[int], list[int]]]


@contextmanager
def asking(mesh: Project, *, verify: ssl.SSLContext | bool = True) -> Iterator[Ask]:
    """A function that asks for a greedy completion; gives the token ids of prompt and answer."""
    with openai.OpenAI(
        base_url=f"{mesh.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=openai.DefaultHttpxClient(verify=verify),
    ) as client:

        def ask(prompt: str | list[int], tokens: int = 64) -> tuple[list[int], list[int]]:
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer = client.completions.create(
                model=DEFAULT_MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra
            )
            [choice] = answer.choices
            return choice.prompt_token_ids, choice.token_ids  # type: ignore[attr-defined]

        yield ask
