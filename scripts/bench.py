"""Time rounds, part by part. The same as `jaxspec bench`."""

from jaxspec.commands.bench import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
