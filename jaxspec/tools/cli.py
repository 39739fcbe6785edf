"""What the scripts share on a command line: flags, errors as one sentence, exact products."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import typer

from jaxspec.config import ConfigError

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes: as click's for a wrong flag; 128 + SIGINT


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """End the program with `error: ...` on stderr and exit code 2 where the user can mend it, with 130 on Ctrl-C."""
    try:
        yield
    except ConfigError as e:
        _exit(f"error: {e}", BAD_INPUT)
    except OSError as e:
        if e.filename is None:  # not about a file of the user's: a closed pipe, or a fault of ours
            raise
        _exit(f"error: {e.filename}: {e.strerror}", BAD_INPUT)
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)


def option(text: str, *names: str) -> Any:
    """A flag of a script's main function, with its default in the help; names: in place of the parameter's own."""
    return typer.Option(*names, help=text, show_default=True)


def command(main: Callable[..., None]) -> typer.Typer:
    """A script's main function as a command line, in plain text: rich would take "[default: ...]" in a flag's help for markup, and break a
    wrong flag's sentence into a box."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    return app


def run_program(main: Callable[..., None]) -> None:
    """Run a script's main function. An interrupted one leaves at once: XLA's threads may still be at work on a program, and
    taking the interpreter down under them can crash."""
    try:
        command(main)()
    except SystemExit as e:
        if e.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _exit(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    raise SystemExit(code) from None


def exact_float32() -> None:
    """Multiply float32 matrices in float32, not in TF32 as a GPU does by default, unless the user has chosen a precision."""
    if jax.config.jax_default_matmul_precision is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_default_matmul_precision", "highest")
