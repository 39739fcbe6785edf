"""`python -m tests.fuzz`: the command, in a process that is fit to fork."""

import os
import warnings

# Before NumPy, torch and tokenizers start their threads: a fork has only the thread that forks.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
warnings.filterwarnings("ignore", message="os.fork\\(\\) was called", category=RuntimeWarning)

from jaxspec.tools.cli import command  # noqa: E402
from tests.fuzz.command import main  # noqa: E402

command(main)(prog_name="python -m tests.fuzz")
