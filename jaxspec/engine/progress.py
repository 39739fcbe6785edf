"""Progress on standard error: bars that count finished requests and compiled programs."""

from __future__ import annotations

import contextlib
import sys
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


@contextlib.contextmanager
def compile_progress(is_shown: bool) -> Iterator[Callable[[int, int], object]]:
    """Show compilations; yield a function to call with the number of finished programs and of all.

    On a terminal a bar counts them. Elsewhere a line says how many there are, before the first.
    """
    if not is_shown:
        yield report_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line
        return
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda finished, total: bar.update(task, completed=finished, total=total)


def _line(finished: int, total: int) -> None:
    if finished == 0 and total > 0:
        programs = "program" if total == 1 else "programs"
        print(f"compiling {total} {programs}", file=sys.stderr, flush=True)


def report_nothing(finished: int, total: int) -> None:
    """Show no compilations."""


def no_progress(_: int) -> None:
    """Show nothing."""
