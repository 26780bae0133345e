"""From answers to the client: a single answer as it comes, several merged by choice index.

Whichever side ends first ends the other: a client that leaves cancels the task, which closes every upstream
connection; a server that fails ends the stream with an error event and without ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.fanout import SequenceSpec, merge_responses
from kvmesh.protocol.openai.responses import encode
from kvmesh.router.answer import Answer, StreamAnswer, broken_off
from kvmesh.router.dispatch import Dispatcher
from kvmesh.router.merge import StreamMerger
from kvmesh.router.upstream import Reply
from kvmesh.router.work import Work

__all__ = ["MAX_PARALLEL_SEQUENCES", "relay"]

MAX_PARALLEL_SEQUENCES = 64
"""Sequences of one request under way at a time: a batch of thousands must not crowd out everyone else."""

_BUFFERED_BLOCKS = 64
"""Events of all sequences that may wait for a slow client before their servers are held up."""

_Block = tuple[SequenceSpec, bytes]


async def relay(
    works: Sequence[Work], dispatcher: Dispatcher, reply: Reply, *, response_id: str, on_first: Callable[[], None]
) -> None:
    """Answer a request of one or more sequences.

    Args:
        works: its sequences in index order.
        dispatcher: answers them.
        reply: the client.
        response_id: ``id`` of a merged answer; a single one keeps its server's.
        on_first: called when the first byte of the body is ready.

    Raises:
        ApiError: a sequence failed; when ``reply.started``, part of the answer is out.
        ConnectionResetError: the client left.
    """
    if len(works) > 1:
        await _relay_many(works, dispatcher, reply, response_id, on_first)
        return
    async with dispatcher.answer(works[0]) as answer:
        on_first()
        if isinstance(answer, StreamAnswer):
            async with aclosing(answer.events()) as events:  # type: ignore[type-var]
                async for block in events:
                    await reply.write(block)
        else:
            reply.send(answer.body)
    if reply.started:
        await reply.finish()


async def _relay_many(
    works: Sequence[Work], dispatcher: Dispatcher, reply: Reply, response_id: str, on_first: Callable[[], None]
) -> None:
    stream = bool(works[0].request.stream)
    merger = StreamMerger(response_id)
    whole: dict[int, bytes] = {}
    failure: ApiError | ConnectionError | None = None
    parallel = anyio.CapacityLimiter(MAX_PARALLEL_SEQUENCES)
    send, receive = anyio.create_memory_object_stream[_Block](_BUFFERED_BLOCKS)

    async def run(work: Work, ready: anyio.Event, blocks: MemoryObjectSendStream[_Block]) -> None:
        nonlocal failure
        async with blocks:
            await ready.wait()
            try:
                async with parallel, dispatcher.answer(work) as answer:
                    await _pump(work, answer, blocks, whole)
                work.prefilled_at(None)  # whoever still waits for it would wait for ever
            except ApiError as error:
                failure = failure or error
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks, receive:
        for work, ready in _with_siblings(works):
            tasks.start_soon(run, work, ready, send.clone())
        send.close()
        begun = False
        async for sequence, block in receive:
            if not begun:
                begun = True
                on_first()
            try:
                if events := merger.feed(sequence, block):
                    await reply.write(events)
            except (ApiError, ConnectionError) as error:
                failure = error
                tasks.cancel_scope.cancel()
                break
    if failure is not None:
        raise failure
    if stream:
        await reply.write(merger.end())
        await reply.finish()
        return
    on_first()
    reply.send(_merged(works, whole, response_id))


async def _pump(work: Work, answer: Answer, blocks: MemoryObjectSendStream[_Block], whole: dict[int, bytes]) -> None:
    if not isinstance(answer, StreamAnswer):
        whole[work.sequence.index] = answer.body
        return
    async with aclosing(answer.events()) as events:  # type: ignore[type-var]
        async for block in events:
            await blocks.send((work.sequence, block))


def _with_siblings(works: Sequence[Work]) -> list[tuple[Work, anyio.Event]]:
    """Each sequence with the event it waits for: choices of one prompt wait until the first has been prefilled.

    Then they find its pages instead of computing the same prompt ``n`` times.
    """
    by_prompt: dict[int, list[Work]] = {}
    for work in works:
        by_prompt.setdefault(work.sequence.prompt_index, []).append(work)
    waits: list[tuple[Work, anyio.Event]] = []
    for leader, *siblings in by_prompt.values():
        at_once, prefilled = anyio.Event(), anyio.Event()
        at_once.set()
        leader.on_prefilled = _teller(siblings, prefilled)
        waits.append((leader, at_once))
        waits.extend((sibling, prefilled) for sibling in siblings)
    return waits


def _teller(siblings: list[Work], prefilled: anyio.Event) -> Callable[[str | None], None]:
    def tell(instance_id: str | None) -> None:
        for sibling in siblings:
            sibling.prefer_context = instance_id
        prefilled.set()

    return tell


def _merged(works: Sequence[Work], whole: dict[int, bytes], response_id: str) -> bytes:
    try:
        parts = [(work.sequence, msgspec.json.decode(whole[work.sequence.index])) for work in works]
        return encode(merge_responses(parts, id=response_id))
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError, IndexError):
        raise broken_off("with an answer that is no completion") from None
