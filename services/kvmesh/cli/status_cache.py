"""One worker's KV cache in the terminal: its tiers and layer groups, hits, moves and pins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvmesh.protocol.cache_report import PIN_AGE_BOUNDS_S, CacheReport, GroupFlows, GroupReport, TierReport

__all__ = ["bar_cells", "cache_block", "hits", "moves", "pins"]

BAR_CELLS = 20
_STATES = ("locked", "pinned", "held", "evictable")
_MOVES = ("offloaded", "onboarded", "dropped", "damaged")
_NOTHING = [0] * (2 + len(_MOVES))


def cache_block(name: str, about: str, report: CacheReport) -> RenderableType:
    """The block of one worker."""
    heading = Text.assemble((name, "bold"), "  ", (about, "dim"))
    if not report.tiers:
        return Group(heading, Text("  no figures yet", "dim"))
    tables: list[RenderableType] = [_pages(report.tiers)]
    if any(_counts(flow) != _NOTHING for flow in report.flows):
        tables.append(_since_start(report))
    if off := [tier.tier for tier in report.tiers if not tier.usable]:
        tables.append(Text(f"{', '.join(off)} failed: off until this server starts again, see its log", "bold red"))
    notes = [line for line in (hits(report.counters), moves(report.counters), pins(report)) if line]
    if damaged := report.counters.get("damaged_pages", 0):
        notes.append(f"[bold red]{damaged} damaged pages of a cold tier, each computed again[/]")
    block = Group(*tables, *(Text.from_markup(line) for line in notes))
    return Group(heading, Padding(block, (0, 0, 0, 2), expand=False))


def hits(counters: Mapping[str, int]) -> str:
    """Prompt blocks that were found; nothing before the first."""
    full, partial = counters.get("reused_full_blocks", 0), counters.get("reused_partial_blocks", 0)
    asked = full + partial + counters.get("missed_blocks", 0)
    return f"hits {(full + partial) / asked:.0%} of {asked} blocks: {full} full, {partial} partial" if asked else ""


def moves(counters: Mapping[str, int]) -> str:
    """What left the device and came back; nothing where nothing did."""
    parts = [
        f"{name} {pages} pages ({counters.get(f'{name}_bytes', 0) / 1e6:.1f} MB)"
        for name in ("offloaded", "onboarded")
        if (pages := counters.get(f"{name}_pages", 0))
    ]
    if dropped := counters.get("dropped_pages", 0):
        parts.append(f"dropped {dropped} pages")
    return ", ".join(parts)


def pins(report: CacheReport) -> str:
    """Pages that transfers pin, by age; old ones stand out."""
    classes = [f"under {bound:g} s" for bound in PIN_AGE_BOUNDS_S] + [f"[yellow]over {PIN_AGE_BOUNDS_S[-1]:g} s[/]"]
    shown = [f"{pages} for {age}" for pages, age in zip(report.pinned_pages_by_age, classes, strict=True) if pages]
    return f"pinned by transfers: {', '.join(shown)}" if shown else ""


def bar_cells(used: int, evictable: int, total: int, cells: int = BAR_CELLS) -> tuple[int, int, int]:
    """Cells of a bar for used, evictable and free pages; whatever there is any of has a cell."""
    amounts = (used, evictable, max(total - used - evictable, 0))
    whole = max(sum(amounts), 1)
    least = [int(amount > 0) for amount in amounts]
    shares = [max(amount * cells // whole, shown) for amount, shown in zip(amounts, least, strict=True)]
    largest = amounts.index(max(amounts))
    shares[largest] += cells - sum(shares)
    return shares[0], shares[1], shares[2]


def _pages(tiers: Iterable[TierReport]) -> Table:
    table = _table(2, "tier", "in use, evictable, free", *_STATES, "free", "pages")
    for tier in tiers:
        for row in _rows(tier):
            table.add_row(*row)
    return table


def _since_start(report: CacheReport) -> Table:
    """Hits and moves by tier, and by layer group where there are several."""
    table = _table(1, "pages since start", "hits", "partial", *_MOVES)
    for tier in report.tiers:
        flows = [flow for flow in report.flows if flow.tier == tier.tier]
        sums = [sum(column) for column in zip(*map(_counts, flows), strict=True)] or _NOTHING
        table.add_row(tier.tier, *map(str, sums))
        if len(flows) > 1:
            for group, flow in zip(tier.groups, flows, strict=False):
                counts = (Text(str(count), "dim") for count in _counts(flow))
                table.add_row(Text(f"  {_group_name(group)}", "dim"), *counts)
    return table


def _counts(flow: GroupFlows) -> list[int]:
    return [flow.reused_full, flow.reused_partial, *(getattr(flow, name) for name in _MOVES)]


def _table(names: int, *headings: str) -> Table:
    """The first ``names`` columns are names, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="left" if index < names else "right")
    return table


def _rows(tier: TierReport) -> Iterable[tuple[RenderableType, ...]]:
    sums = [sum(getattr(group, state) for group in tier.groups) for state in _STATES]
    total, free = sum(tier.total), sum(tier.free)
    used, evictable, left = bar_cells(sum(sums[:-1]), sums[-1], total)
    bar = Text.assemble(("█" * used, "cyan"), ("▒" * evictable, "green"), ("░" * left, "dim"))
    if tier.usable:
        yield (tier.tier, bar, *map(str, sums), str(free), str(total))
    else:  # its free pages are of no use to anybody
        yield (tier.tier, Text("disabled", "bold red"), *map(str, sums), "-", str(total))
    if len(tier.groups) > 1:
        for group in tier.groups:
            yield ("", Text(_group_name(group), "dim"), *(Text(str(getattr(group, state)), "dim") for state in _STATES))


def _group_name(group: GroupReport) -> str:
    return f"group {group.group}, " + ("full attention" if group.window is None else f"window {group.window}")
