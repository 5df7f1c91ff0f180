"""Progress on a terminal's stderr; silence where stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.outputs import RequestOutput


@contextmanager
def generation_progress(
    total: int, *, enabled: bool
) -> Iterator[Callable[[Sequence[RequestOutput]], None]]:
    """A bar over ``total`` requests with the output's tok/s; call what it gives with the outputs
    that have just finished."""
    if not enabled or not sys.stderr.isatty():
        yield lambda finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answering", total=total, rate="")
        tokens = 0

        def advance(finished: Sequence[RequestOutput]) -> None:
            nonlocal tokens
            if not finished:
                return
            tokens += sum(len(one.token_ids) for output in finished for one in output.outputs)
            elapsed = progress.tasks[task].elapsed or 0.0
            rate = f"{tokens / elapsed:,.0f} tok/s" if elapsed else ""
            progress.update(task, advance=len(finished), rate=rate)

        yield advance
