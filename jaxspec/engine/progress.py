"""A bar on standard error that counts finished requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxspec.config import ConfigError, shown


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar; yield a function to call with the number of requests that finished."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)


def shows_progress(progress: object, use_tqdm: object) -> bool:
    """Return whether a bar is wanted.

    use_tqdm: vLLM's word for it, where a maker of bars is a yes; None: as `progress` says.
    """
    if use_tqdm is None:
        use_tqdm = progress
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise ConfigError(f"progress, use_tqdm: expected true or false, got {shown(use_tqdm)}")
    return use_tqdm is not False


def no_progress(_: int) -> None:
    """Show nothing."""
