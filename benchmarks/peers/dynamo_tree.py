"""Dynamo's radix tree and hash functions, taking commands; started under Dynamo's interpreter.

    python benchmarks/peers/dynamo_tree.py

One line on stdout answers each on stdin, both JSON:

    {"worker": N, "event": {...}}                              Dynamo's own form of an event is applied; whether it was
    {"find": [HASH...]}                                        local hashes of a prompt; blocks by worker
    {"hash": [TOKEN...], "block_size": N, "eagle": BOOL}       local hashes of a prompt
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo.llm import RadixTree, compute_block_hash_for_seq


def answer(tree: Any, command: dict[str, Any]) -> Any:
    """Carry one command out."""
    if "event" in command:
        try:
            tree.apply_event(command["worker"], json.dumps(command["event"]).encode())
        except RuntimeError:  # its indexer goes on, too
            return False
        return True
    if "find" in command:
        return {str(worker[0]): blocks for worker, blocks in tree.find_matches(command["find"]).scores.items()}
    return compute_block_hash_for_seq(command["hash"], command["block_size"], is_eagle=command["eagle"])


def main() -> None:
    tree = RadixTree()
    for line in sys.stdin:
        print(json.dumps(answer(tree, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
