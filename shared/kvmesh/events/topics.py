"""Topics that say who publishes: ``kv@POD@MODEL``, as llm-d's convention has it."""

from __future__ import annotations

from typing import NamedTuple, Self

__all__ = ["POD_PREFIX", "PodTopic"]

POD_PREFIX = "kv@"


class PodTopic(NamedTuple):
    """A worker and its model, by their topic."""

    pod: str
    """An address or a name, perhaps with a port."""
    model: str

    @classmethod
    def parse(cls, topic: str) -> Self | None:
        """None for a topic that is not of this form."""
        if not topic.startswith(POD_PREFIX):
            return None
        pod, separator, model = topic.removeprefix(POD_PREFIX).partition("@")
        return cls(pod, model) if pod and separator and model else None

    @property
    def host(self) -> str:
        """The pod without its port; an IPv6 address keeps its brackets."""
        host, separator, port = self.pod.rpartition(":")
        return host if separator and port.isdecimal() and (host.endswith("]") or ":" not in host) else self.pod
