"""Measure how many drafts are accepted. The same as `jaxspec acceptance`."""

from jaxspec.commands.acceptance import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
