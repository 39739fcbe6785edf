"""Quantise a checkpoint. The same as `jaxspec convert`."""

from jaxspec.commands.convert import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
