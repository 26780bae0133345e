"""One sequence on its way through the router: what dispatch needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvmesh.protocol.openai.fanout import SequenceSpec
from kvmesh.protocol.openai.requests import ApiKind, ChatCompletionRequest, CompletionRequest
from kvmesh.router.deadline import Deadline
from kvmesh.router.explain import SequenceExplanation
from kvmesh.router.match import Matches
from kvmesh.router.tokenizing import Prompt

__all__ = ["Work"]


@dataclass(slots=True)
class Work:
    """A single sequence, everything that the router resolves being resolved."""

    kind: ApiKind
    request: CompletionRequest | ChatCompletionRequest
    """With ``n`` unset, the prompt as ids, ``max_tokens``, ``seed`` and ``request_id`` set."""
    sequence: SequenceSpec
    prompt: Prompt
    matches: Matches
    explanation: SequenceExplanation
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to every worker: content type, request id and trace context."""
    deadline: Deadline = Deadline()  # noqa: RUF009 (immutable)
    """Of the whole request."""
    conversation_id: str | None = None
    prefer_context: str | None = None
    """Instance that just prefilled the same prompt: the best choice whatever the index says yet."""
    on_prefilled: Callable[[str | None], None] | None = None
    """Told the instance that holds the prompt now, as soon as one does; None: it is over without a word of that."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt.ids)

    @property
    def first_token_only(self) -> bool:
        """Whether the context server's token is all that is wanted."""
        return self.request.max_tokens == 1

    def prefilled_at(self, instance_id: str | None) -> None:
        """The prompt's pages are at a server now, or (None) nothing more will be heard of them; told once."""
        tell, self.on_prefilled = self.on_prefilled, None
        if tell is not None:
            tell(instance_id)
