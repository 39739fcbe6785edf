"""Train a draft head. The same as `jaxspec train`."""

from jaxspec.commands.train import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
