"""Streams of answers: ends, errors and merging."""

from __future__ import annotations

import json

import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.fanout import SequenceSpec
from kvmesh.protocol.openai.responses import usage
from kvmesh.protocol.openai.sse import DONE, ChunkEncoder, error_event, event_data
from kvmesh.router.answer import EventSource, StreamAnswer
from kvmesh.router.merge import StreamMerger
from kvmesh.router.upstream import UpstreamBrokenError


class FakeResponse:
    """Pieces of a body; None breaks the connection."""

    status = 200
    retry_after_s = None

    def __init__(self, *pieces: bytes | None) -> None:
        self._pieces = list(pieces)

    async def next_chunk(self) -> bytes:
        piece = self._pieces.pop(0) if self._pieces else b""
        if piece is None:
            raise UpstreamBrokenError("reset by peer")
        return piece


async def play(*pieces: bytes | None) -> tuple[list[bytes], list[bool], ApiError | None]:
    ends: list[bool] = []
    out: list[bytes] = []
    answer = StreamAnswer(
        b"data: 0\n\n", EventSource(FakeResponse(*pieces)), on_end=lambda error: ends.append(error is None)
    )
    try:
        async for block in answer.events():
            out.append(block)
    except ApiError as error:
        return out, ends, error
    return out, ends, None


async def test_events_go_on_as_they_come() -> None:
    out, ends, error = await play(b"data: 1\n\ndata", b": 2\n\n", b"data: 3\n\n" + DONE)
    assert out == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n" + DONE]
    assert (ends, error) == ([True], None)


@pytest.mark.parametrize("pieces", [(b"data: 1\n\n", None), (b"data: 1\n\n", b"data: half"), (b"data: 1\n\n",)])
async def test_a_stream_without_its_end_is_an_error(pieces: tuple[bytes | None, ...]) -> None:
    out, ends, error = await play(*pieces)
    assert out == [b"data: 0\n\n", b"data: 1\n\n"]
    assert ends == [False]
    assert error is not None
    assert (error.status, error.code) == (502, "upstream_broken")


async def test_a_break_after_the_end_is_no_error() -> None:
    assert (await play(DONE, None))[1:] == ([True], None)


async def test_an_error_event_is_raised_after_what_came_before_it() -> None:
    out, ends, error = await play(b"data: 1\n\n" + error_event(ApiError(500, "boom", type="server_error", code="x")))
    assert out == [b"data: 0\n\n", b"data: 1\n\n"]
    assert ends == [False]
    assert error is not None
    assert (error.message, error.code, error.type) == ("boom", "x", "server_error")


def chunks(events: bytes) -> list[dict[str, object]]:
    return [json.loads(event_data(event)) for event in events.split(b"\n\n")[:-1]]


def test_merger_tells_choices_apart_and_sends_one_usage() -> None:
    merger = StreamMerger("chatcmpl-all")
    specs = [SequenceSpec(index=index, prompt_index=index // 2, seed=0) for index in range(3)]
    for spec in specs:
        encoder = ChunkEncoder("chat", id=f"own-{spec.index}", model="m", created=spec.index, include_usage=True)
        out = merger.feed(spec, encoder.first() + encoder.chunk("a", finish_reason="stop"))
        for chunk in chunks(out):
            assert (chunk["id"], chunk["created"]) == ("chatcmpl-all", 0)
            assert chunk["choices"][0]["index"] == spec.index  # type: ignore[index]
        assert merger.feed(spec, encoder.usage(usage(10, 2, spec.index)) + DONE) == b""
    end = merger.end()
    assert end.endswith(DONE)
    [counted] = chunks(end.removesuffix(DONE))
    assert counted["usage"]["prompt_tokens"] == 20  # type: ignore[index]
    assert counted["usage"]["completion_tokens"] == 6  # type: ignore[index]
    assert counted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 + 2  # type: ignore[index]


def test_merger_without_usage_just_ends() -> None:
    assert StreamMerger("x").end() == DONE


@pytest.mark.parametrize("event", [b"data: nonsense\n\n", b"data: 5\n\n", b"data: {}\n\n"])
def test_merger_refuses_what_is_no_chunk(event: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        StreamMerger("x").feed(SequenceSpec(index=0, prompt_index=0, seed=0), event)
    assert caught.value.status == 502
