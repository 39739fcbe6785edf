"""Quantise a checkpoint: a target in the compressed-tensors format, or a head, and a head back.

jaxspec convert meta-llama/Llama-3.1-8B-Instruct llama-3.1-8b-fp8 --format fp8
jaxspec convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-int4 --format int4 --group-size 64
jaxspec convert OUT/head dspark-fp8 --format fp8-block
jaxspec convert dspark-fp8 dspark-plain --format bfloat16
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.config import ConfigError
from jaxspec.config.quantization import FROM_FLOATS
from jaxspec.drafts.head_layout import is_head
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.head_conversion import PLAIN, convert_head
from jaxspec.loading.resolve import own_drafts, resolve
from jaxspec.tools.cli import command, one_of, option


def main(
    source: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    format: Annotated[
        str,
        option(
            "fp8 (a scale for each output channel), fp8-block (for 128 x 128), int4 (for each "
            "group of an output channel), or bfloat16 (of a head alone)."
        ),
    ] = "fp8",
    group_size: Annotated[
        int | None, option("Weights that share a scale, for int4 alone. [default: 128]")
    ] = None,
) -> None:
    """Write a quantised copy of a checkpoint. `lm_head` and routers of a target keep their weights.

    A draft head takes fp8-block, which is plain again once it is loaded, and which other programs
    do not read. bfloat16 writes that head for them.
    """
    one_of("--format", format, (*FROM_FLOATS, PLAIN))
    folder = own_drafts().get(source) or resolve(source, kind="target")
    checkpoint = open_checkpoint(folder)
    if format == PLAIN or is_head(checkpoint.config, checkpoint.tensors):
        if group_size is not None:
            raise ConfigError(f"group_size: expected none for a head, got {group_size}")
        convert_head(folder, out, format)
    else:
        convert_checkpoint(folder, out, format, group_size=group_size)  # type: ignore[arg-type]
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {format}, {size / 1e9:.2f} GB of weights")


app = command(main)
