"""Who publishes, by the topic (§2.1)."""

from __future__ import annotations

import pytest

from kvmesh.events.topics import PodTopic


@pytest.mark.parametrize(
    ("topic", "pod", "model", "host"),
    [
        ("kv@10.0.0.5:8000@m", "10.0.0.5:8000", "m", "10.0.0.5"),
        ("kv@pod-1@org/model", "pod-1", "org/model", "pod-1"),
        ("kv@pod-1@a@b", "pod-1", "a@b", "pod-1"),
        ("kv@[::1]:8000@m", "[::1]:8000", "m", "[::1]"),
        ("kv@fe80::1@m", "fe80::1", "m", "fe80::1"),
    ],
)
def test_pods(topic: str, pod: str, model: str, host: str) -> None:
    parsed = PodTopic.parse(topic)
    assert parsed is not None
    assert (parsed.pod, parsed.model, parsed.host) == (pod, model, host)


@pytest.mark.parametrize("topic", ["", "kv-events", "kv@", "kv@pod", "kv@pod@", "kv@@m", "KV@pod@m"])
def test_other_topics(topic: str) -> None:
    assert PodTopic.parse(topic) is None
