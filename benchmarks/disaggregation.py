"""Running streams while long prompts arrive: one context and one generation server against one server that does both.

Both meshes have the same cores: one thread each for the two servers, two for the one. Rounds alternate between them.
Each round runs steady streams beside Poisson arrivals of 512-token prompts with ``kvmesh bench``, and the medians over
the rounds of the streams' time per token are compared. The last line is JSON: milliseconds of both, and the ratios
(aggregated / disaggregated; above 1 the disaggregated streams are smoother).

    python benchmarks/disaggregation.py [--rounds 3] [--rate 0.5] [--requests 12] [--streams 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MESHES = {
    "disaggregated": ["--set", "context.num_threads=1", "--set", "generation.num_threads=1"],
    "aggregated": ["--context", "0", "--generation", "0", "--aggregated", "1", "--set", "aggregated.num_threads=2"],
}
PROMPT_TOKENS = 512
MEASURES = (("tpot_ms", "p50"), ("tpot_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"))
START_S = 300
BENCH_S = 300


def kvmesh(*arguments: str, run_dir: Path, timeout_s: float) -> None:
    """One command of the product, its output on stderr."""
    environment = {**os.environ, "KVMESH_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-m", "kvmesh.cli.main", *arguments]
    subprocess.run(command, env=environment, check=True, timeout=timeout_s, stdout=sys.stderr)


def measure(mesh: str, options: argparse.Namespace) -> dict[str, Any]:
    """Summary of the steady streams of one round."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, report = Path(directory) / "run", Path(directory) / "bench.json"
        kvmesh("up", "--detach", "--port", "0", *MESHES[mesh], run_dir=run_dir, timeout_s=START_S)
        try:
            load = {
                "--steady": options.streams,
                "--steady-output-tokens": 256,
                "--rate": options.rate,
                "--requests": options.requests,
                "--prompt-tokens": PROMPT_TOKENS,
                "--output-tokens": 8,
                "--json": report,
            }
            arguments = [str(part) for pair in load.items() for part in pair]
            kvmesh("bench", *arguments, run_dir=run_dir, timeout_s=BENCH_S)
        finally:
            kvmesh("down", run_dir=run_dir, timeout_s=60)
        groups: list[dict[str, Any]] = json.loads(report.read_text())["groups"]
        return next(group for group in groups if group["group"] == "steady")


def main() -> None:
    """Alternate, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in MESHES}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            rounds.append(measure(name, options))
    result: dict[str, float] = {}
    for measure_name, percentile in MEASURES:
        key = f"{measure_name.removesuffix('_ms')}_{percentile}"
        medians = {
            name: statistics.median(round_[measure_name][percentile] for round_ in rounds)
            for name, rounds in found.items()
        }
        result |= {f"{key}_{name}_ms": round(value, 2) for name, value in medians.items()}
        result[f"{key}_ratio"] = round(medians["aggregated"] / medians["disaggregated"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
