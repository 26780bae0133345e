"""SIGTERM: what runs is finished, what is new goes elsewhere, and the process leaves right after."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from meshes.by_hand import Mesh
from meshes.process import until

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

LENGTH = 150
LEAVES_WITHIN_S = 4.0


@pytest.fixture(scope="module")
def drained(make_mesh: Callable[..., Mesh]) -> Any:
    return make_mesh({"context": {}, "generation": {}, "generation-2": {}})


class Reader(threading.Thread):
    """Reads one long stream."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.events: list[str] = []
        body = {"model": DEFAULT_MODEL, "prompt": "Once", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        self._asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )

    def run(self) -> None:
        with urllib.request.urlopen(self._asked, timeout=60) as response:
            for line in response:
                if data := line.decode().strip():
                    self.events.append(data.removeprefix("data: "))


@pytest.mark.parametrize("leaving", [("generation",), ("context", "router")])
def test_streams_are_finished(drained: Mesh, leaving: tuple[str, ...]) -> None:
    url = drained["router"].url
    readers = [Reader(url), Reader(url)]
    for reader in readers:
        reader.start()
    until(lambda: all(len(reader.events) > 3 for reader in readers), "both streams run")
    processes = [drained[name] for name in leaving]
    for process in processes:
        process.terminate()
    if leaving == ("generation",):
        # The other one takes what is new.
        status, answer = drained["router"].post(
            "/v1/completions", {"model": DEFAULT_MODEL, "prompt": "Hi", "max_tokens": 2}
        )
        assert status == 200, answer
    for reader in readers:
        reader.join()
        assert reader.events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in reader.events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
    finished_s = time.monotonic()
    assert [process.wait_gone() for process in processes] == [0] * len(processes)
    assert time.monotonic() - finished_s < LEAVES_WITHIN_S
