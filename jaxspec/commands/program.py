"""The command `jaxspec`. A sub-command's module is imported when the sub-command is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Annotated

import typer

from jaxspec.tools.cli import plain_app, run_program

NAME = "jaxspec"
SUMMARY = "Speculative decoding of large language models in JAX."
# The name of a module of this room, and its line in `jaxspec --help`.
COMMANDS = {
    "generate": "Generate text; without flags, a demo.",
    "bench": "Time rounds, part by part, against what the device allows.",
    "throughput": "Measure throughput and latency under load.",
    "train": "Train a draft head on the target's own text.",
    "acceptance": "Measure how many drafts are accepted.",
    "doctor": "Find out why a head's drafts are rejected, and what to set.",
    "plan": "Plan the memory of a target and a draft on a GPU.",
    "convert": "Quantise a checkpoint to fp8 or int4.",
}
# The sub-command reads its own flags, --help among them.
PASS_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def program() -> typer.Typer:
    """Return the command with all its sub-commands."""
    app = plain_app(SUMMARY)
    app.callback(help=SUMMARY)(_options)
    for name, summary in COMMANDS.items():
        app.command(name, help=summary, add_help_option=False, context_settings=PASS_ON)(
            _caller(name)
        )
    return app


def main() -> None:
    run_program(program(), NAME)


def _print_version(given: bool) -> None:
    if given:
        print(f"{NAME} {metadata.version(NAME)}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take the options of the command itself."""


def _caller(name: str) -> Callable[[typer.Context], None]:
    def call(context: typer.Context) -> None:
        # What records a command line reads it from here.
        sys.argv = [f"{NAME} {name}", *context.args]
        import_module(f"jaxspec.commands.{name}").app(prog_name=f"{NAME} {name}")

    return call
