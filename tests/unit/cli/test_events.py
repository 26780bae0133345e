from __future__ import annotations

import io

import msgspec
from rich.console import Console

from kvmesh.cli.events import _Printer, describe
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


def test_events_are_readable():
    stored = BlockStored(block_hashes=[1, -1], parent_block_hash=None, token_ids=[0] * 8, block_size=4)
    assert describe(stored) == "stored   2 blocks, 8 tokens, after root, GPU: 0000000000000001 ffffffffffffffff"
    moved = BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[], block_size=4, medium="CPU")
    assert describe(moved) == "moved    1 blocks to CPU: 0000000000000001"
    assert describe(BlockRemoved(block_hashes=[1] * 6)).endswith("0000000000000001 ... 2 more")
    assert describe(AllBlocksCleared()) == "cleared  everything"


async def test_gaps_restarts_and_the_end_are_noticed():
    console = Console(record=True, width=200, file=io.StringIO())
    printer = _Printer(console, count=3)
    payload = msgspec.msgpack.encode(EventBatch(ts=0.0, events=[AllBlocksCleared()], data_parallel_rank=0))
    for sequence in (0, 1, 5, 0):
        printer.batch("context-0", [b"", sequence.to_bytes(8, "big"), payload])
    printer.batch("context-1", [b"", (0).to_bytes(8, "big"), b"\xc1"])
    text = console.export_text()
    assert "missed 3 batches" in text
    assert "publisher restarted" in text
    assert "does not read" in text
    assert text.count("cleared  everything") == 3
    assert printer.done.is_set()
