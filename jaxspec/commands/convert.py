"""Quantise a checkpoint, in the compressed-tensors format that vLLM and transformers load.

jaxspec convert meta-llama/Llama-3.1-8B-Instruct llama-3.1-8b-fp8 --format fp8
jaxspec convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-int4 --format int4 --group-size 64
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.loading.conversion import FORMATS, convert_checkpoint
from jaxspec.loading.resolve import resolve
from jaxspec.tools.cli import command, one_of, option


def main(
    source: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id of plain weights.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    format: Annotated[
        str,
        option(
            "fp8 (a scale for each output channel), fp8-block (for 128 x 128) or int4 (for each "
            "group of an output channel)."
        ),
    ] = "fp8",
    group_size: Annotated[
        int | None, option("Weights that share a scale, for int4 alone. [default: 128]")
    ] = None,
) -> None:
    """Write a quantised copy of a checkpoint. The head, routers and experts keep their weights."""
    one_of("--format", format, FORMATS)
    convert_checkpoint(resolve(source, kind="target"), out, format, group_size=group_size)  # type: ignore[arg-type]
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {format}, {size / 1e9:.2f} GB of weights")


app = command(main)
