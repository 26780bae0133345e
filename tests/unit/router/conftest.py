from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.match import WorkerMatch
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.protocol.openai.fanout import SequenceSpec, single_request
from kvmesh.protocol.openai.requests import ChatCompletionRequest, ChatMessage, CompletionRequest
from kvmesh.router.cluster import Cluster
from kvmesh.router.explain import SequenceExplanation
from kvmesh.router.loads import Loads
from kvmesh.router.match import Matches
from kvmesh.router.tokenizing import Prompt
from kvmesh.router.work import Work


@pytest.fixture
def make_work() -> Callable[..., Work]:
    """``make_work(kind, prompt_tokens, matched={server: tokens}, **request fields)``."""

    def make(
        kind: str = "completions",
        prompt_tokens: int = 100,
        matched: dict[str, int] | None = None,
        conversation_id: str | None = None,
        **fields: Any,
    ) -> Work:
        ids = np.arange(prompt_tokens, dtype=np.int32)
        request: CompletionRequest | ChatCompletionRequest
        if kind == "chat":
            messages = [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")]
            request = ChatCompletionRequest(model="m", messages=messages, **fields)
        else:
            request = CompletionRequest(model="m", prompt="text", **fields)
        spec = SequenceSpec(index=0, prompt_index=0, seed=7)
        single = single_request(
            request, spec, prompt_token_ids=ids.tolist(), max_tokens=fields.get("max_tokens", 8), request_id="r"
        )
        found = {
            name: WorkerMatch(instance_id=name, dp_rank=0, device_tokens=tokens)
            for name, tokens in (matched or {}).items()
        }
        return Work(
            kind=kind,
            request=single,
            sequence=spec,
            prompt=Prompt(ids, None),
            matches=Matches("answered", found),
            explanation=SequenceExplanation(index=0, prompt_tokens=prompt_tokens, match_state="answered"),
            conversation_id=conversation_id,
        )

    return make


@pytest.fixture
def cluster() -> Cluster:
    """An empty cluster."""
    return Cluster(ManualClock(), Loads())


@pytest.fixture
def join(cluster: Cluster) -> Callable[..., None]:
    """``join(name, role, **fields)``: a member of model ``m`` joins ``cluster``."""

    def join(name: str, role: str, **fields: Any) -> None:
        member = Member(instance_id=name, role=role, url=f"http://{name}", **{"model": "m", **fields})
        cluster.apply(MemberEvent(revision=1, kind="joined", member=member))

    return join
