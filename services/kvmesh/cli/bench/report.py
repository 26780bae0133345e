"""What a benchmark found: a table and histograms for the terminal, JSON for machines, a PNG for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.cli.bench.summary import Distribution, GroupSummary, RequestRecord

__all__ = ["print_report", "write_json", "write_plot"]

BINS = 40
_BARS = " ▁▂▃▄▅▆▇█"


def print_report(console: Console, summaries: Sequence[GroupSummary], records: Sequence[RequestRecord]) -> None:
    """A table a group, and the distribution of its latencies."""
    for summary in summaries:
        console.print(_table(summary))
        console.print(_throughput(summary), highlight=False, soft_wrap=True)
        of_group = [record for record in records if record.group == summary.group]
        for name, values_s in (
            ("TTFT", [record.ttft_s for record in of_group if record.ttft_s is not None]),
            ("ITL", [gap for record in of_group for gap in record.gaps_s]),
        ):
            if len(values_s) > 1:
                console.print(_histogram(name, values_s))
        console.print()


def write_json(
    path: Path, run: dict[str, Any], summaries: Sequence[GroupSummary], records: Sequence[RequestRecord]
) -> None:
    """Parameters, summaries and every request."""
    body = {"run": run, "groups": summaries, "requests": records}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")


def write_plot(path: Path, summaries: Sequence[GroupSummary], records: Sequence[RequestRecord]) -> None:
    """Cumulative distributions of TTFT, TPOT and ITL, and first tokens over time; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for summary in summaries:
        of_group = [record for record in records if record.group == summary.group]
        curves = (
            ("time to first token", [r.ttft_s for r in of_group if r.ttft_s is not None]),
            ("time per output token", [r.tpot_s for r in of_group if r.tpot_s is not None]),
            ("inter-token latency", [gap for r in of_group for gap in r.gaps_s]),
        )
        for axis, (title, values_s) in zip(axes, curves, strict=False):
            axis.set(title=title, xlabel="ms", ylabel="share of requests", ylim=(0, 1))
            if values_s:
                axis.ecdf([value * 1e3 for value in values_s], label=summary.group)
        started = [(record.started_s, record.ttft_s * 1e3) for record in of_group if record.ttft_s is not None]
        axes[3].set(title="first token over the run", xlabel="start of the request, s", ylabel="TTFT, ms")
        axes[3].plot(*zip(*started, strict=True), ".", label=summary.group) if started else None
    axes[0].legend()
    figure.savefig(path, dpi=120)


def _table(summary: GroupSummary) -> Table:
    table = Table("ms", "mean", "p50", "p90", "p99", "max", title=summary.group, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: tuple[tuple[str, Distribution | None], ...] = (
        ("TTFT first token", summary.ttft_ms),
        ("TPOT per token", summary.tpot_ms),
        ("ITL between pieces", summary.itl_ms),
        ("E2E whole answer", summary.e2e_ms),
    )
    for name, values in rows:
        if values is not None:
            table.add_row(
                name, *(f"{value:.1f}" for value in (values.mean, values.p50, values.p90, values.p99, values.max))
            )
    return table


def _throughput(summary: GroupSummary) -> str:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in summary.outcomes.items())
    cached = (
        f", {summary.cached_tokens / summary.prompt_tokens:.0%} of the prompt cached" if summary.prompt_tokens else ""
    )
    return (
        f"{outcomes} in {summary.wall_s:.1f} s: {summary.requests_per_s:.2f} requests/s, "
        f"{summary.prompt_tokens_per_s:.0f} prompt and {summary.output_tokens_per_s:.0f} output tokens/s{cached}"
    )


def _histogram(name: str, values_s: Sequence[float]) -> Text:
    """One line, its ends named: from the least value to the 99th percentile, what lies above in the last bin."""
    ordered = sorted(values_s)
    least, most = ordered[0], ordered[int(0.99 * (len(ordered) - 1))]
    width = (most - least) / BINS or 1e-9
    counts = [0] * BINS
    for value in values_s:
        counts[min(BINS - 1, int((value - least) / width))] += 1
    highest = max(counts)
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // highest)] for count in counts)
    ends = f"{name:>5}  min {least * 1e3:.1f} ms ", f" p99 {most * 1e3:.1f} ms"
    return Text.assemble((ends[0], "dim"), (bars, "cyan"), (ends[1], "dim"))
