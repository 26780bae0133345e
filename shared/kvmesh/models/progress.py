"""The progress bar of a model download, for commands that a person watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

__all__ = ["download_bar"]


@contextmanager
def download_bar(title: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar in bytes on standard error; yields the callback that :func:`kvmesh.models.store.fetch` takes.

    The bar appears with the first report, so a model that is already there shows nothing.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, visible=False)

        def report(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield report
