"""Generate text with speculative decoding. The same as `jaxspec generate`."""

from jaxspec.commands.generate import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
