"""Measure throughput and latency under load. The same as `jaxspec throughput`."""

from jaxspec.commands.throughput import app
from jaxspec.tools.cli import run_program

if __name__ == "__main__":
    run_program(app)
