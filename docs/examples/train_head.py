"""Train a head for your model: python docs/examples/train_head.py --target MODEL --output FOLDER.

The target writes its own training text. The flags are those of `jaxspec train all`; with
--dry-run a tiny random target is trained for in a minute, on a CPU.
"""

import sys

from jaxspec.commands.train import app

app(["all", *sys.argv[1:]])
