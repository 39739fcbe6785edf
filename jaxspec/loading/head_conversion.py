"""A DFlash or DSpark head of plain weights -> one in float8, which loading makes plain again.

It has codes and scales as DeepSeek writes them: float8 (e4m3) with a scale for each block
(jaxspec.loading.fp8). So the files are half as large, and a round computes as it does with plain
weights. All matrices have codes: an embedding, lm_head and Markov tables of the head's own, too.
Other programs do not read such heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.quantization import BLOCK
from jaxspec.config.quantization.forms import SCALE_DTYPES
from jaxspec.drafts.families import BLOCKS
from jaxspec.drafts.head_layout import head_method
from jaxspec.layers.quantized import rounding
from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.loading.conversion import open_plain, write_converted
from jaxspec.loading.fp8 import SCALE
from jaxspec.loading.weight_checks import check_finite

FORMAT = "fp8-block"
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def convert_head(source: Path, out: Path, format: str) -> None:
    """Write the head in `source`, its matrices in float8, into `out`, which must not exist.

    ConfigError for another method's head, another format, and weights that are quantised already or
    not finite. Names and shapes are compared with the config when the head is loaded.
    """
    checkpoint = open_plain(source)
    method = head_method(checkpoint.config, checkpoint.tensors)
    if method not in BLOCKS:
        raise ConfigError(
            f"{source}: expected a target, or a head of {' or '.join(BLOCKS)}, got one of {method}"
        )
    if format != FORMAT:
        raise ConfigError(f"format: expected {FORMAT!r} for a head of {method}, got {format!r}")
    write_converted(checkpoint, out, QUANTIZATION, _tensors(checkpoint))


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the new head: matrices as codes with scales, single rows as they are."""
    for name, tensor in checkpoint.tensors.items():
        array = tensor.read()
        if name.endswith(SCALE) or array.dtype.name.startswith("float8"):
            raise ConfigError(
                f"{checkpoint.path}: {name}: expected plain weights, got {array.dtype} codes or "
                "scales without a quantization_config"
            )
        if array.dtype.name not in SCALE_DTYPES:  # vocabulary maps
            yield name, array
            continue
        check_finite(array, f"{checkpoint.path}: {name}")
        if array.ndim == 2 and min(array.shape) > 1:
            scales = rounding.fp8_block_scales(array)
            yield name, rounding.fp8_codes(array, scales)
            yield name + SCALE, scales
        else:
            yield name, array
