"""The command line that the scripts share: flags, errors as one sentence, exact products."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import jax.numpy as jnp
import typer

from jaxspec.config import ConfigError
from jaxspec.loading.pretrained import DTYPES, check_platform
from jaxspec.tools.flags import Flag, expand
from jaxspec.tools.lasting_stdout import lasting_stdout

# Exit codes: as click's for a wrong flag; 128 + SIGINT; 128 + SIGTERM.
BAD_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143
# The committed heads, by method; they fit the default target only.
DEFAULT_DRAFTS = {
    "eagle3": "smollm2-135m-instruct-eagle3",
    "eagle": "smollm2-135m-instruct-eagle",
    "dspark": "smollm2-135m-instruct-dspark",
}
DEFAULT_DRAFT = DEFAULT_DRAFTS["eagle3"]
DRAFT = Flag(DEFAULT_DRAFT, names=("--draft",))  # for SpeculativeConfig.model


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Exit with `error: ...` on stderr and code 2 for the user's mistakes, with 130 on Ctrl-C."""
    try:
        yield
    except ConfigError as e:
        _exit(f"error: {e}", BAD_INPUT)
    except OSError as e:
        if e.filename is None:  # a closed pipe, or a fault of ours: no file that the user named
            raise
        _exit(f"error: {e.filename}: {e.strerror}", BAD_INPUT)
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)


def option(text: str, *names: str, least: int | None = None) -> Any:
    """Return typer's mark of a flag with its default in the help.

    names: in place of the parameter's own. least: the smallest integer that is accepted.
    """
    return typer.Option(*names, help=text, show_default=True, min=least)


Target = Annotated[
    str | None,
    option("Folder, .gguf file or hub id of the target. [default: SmolLM2-135M-Instruct]"),
]
Dtype = Annotated[str, option("float32, bfloat16, or auto: bfloat16 on a GPU.")]
OutputJson = Annotated[Path | None, option("Write the figures to this file.")]


def plain_app(help: str | None = None) -> typer.Typer:
    """Return an empty command line that prints plain text.

    rich would take "[default: ...]" in a flag's help for markup, and break the sentence about a
    wrong flag into a box.
    """
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        help=help,
        no_args_is_help=help is not None,
    )


def command(main: Callable[..., None]) -> typer.Typer:
    """Return a main function as a command line; its groups of flags become flags."""
    app = plain_app()
    app.command()(_with_sentences(main))
    return app


def commands(mains: Mapping[str, Callable[..., None]], *, help: str | None) -> typer.Typer:
    """Return main functions as sub-commands by name. help: what they do together."""
    app = plain_app(help)
    for name, main in mains.items():
        app.command(name)(_with_sentences(main))
    return app


def _with_sentences(main: Callable[..., None]) -> Callable[..., None]:
    run = expand(main)

    @functools.wraps(run)
    def with_sentences(**values: Any) -> None:
        with errors_as_sentences():
            run(**values)

    return with_sentences


def run_program(program: Callable[..., None] | typer.Typer, name: str | None = None) -> None:
    """Run a main function, or a command line under this name (None: the script's).

    After an interruption the process exits at once: XLA's threads may still run a program, and
    shutting the interpreter down under them can crash.
    """
    # SIGTERM unwinds the stack, so that temporary files are removed.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with lasting_stdout():
            app = program if isinstance(program, typer.Typer) else command(program)
            app(prog_name=name)
    except SystemExit as e:
        if e.code in (INTERRUPTED, TERMINATED):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(e.code)
        raise


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(TERMINATED)


def _exit(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    raise SystemExit(code) from None


def one_of(flag: str, given: str, known: Sequence[str]) -> None:
    """Raise ConfigError if a flag's value is none of the known ones."""
    if given not in known:
        raise ConfigError(f"{flag}: expected one of {', '.join(known)}, got {given!r}")


def dtype_of(name: str) -> jnp.dtype:
    """Return the dtype of a benchmark; "auto" is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        check_platform()
        name = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if name not in DTYPES:
        raise ConfigError(f"--dtype: expected one of auto, {', '.join(DTYPES)}, got {name!r}")
    return jnp.dtype(DTYPES[name])


def exact_float32() -> None:
    """Multiply float32 matrices in float32, unless the user has chosen a precision.

    A GPU multiplies them in TF32 by default.
    """
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None:
        jax.config.update("jax_default_matmul_precision", "highest")
