"""Plan the memory of a target and a draft on a GPU. The same as `jaxspec plan`."""

from jaxspec.commands.plan import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
