"""A draft head of plain weights -> one in float8, which loading makes plain again, and back.

It has codes and scales as DeepSeek writes them: float8 (e4m3) with a scale for each block
(jaxspec.loading.fp8). So the files are half as large, and a round computes as it does with plain
weights. All matrices have codes: an embedding, lm_head and Markov tables of the head's own, too.
Other programs do not read such heads. They read the bfloat16 that the way back writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.quantization import BLOCK, read_quantization
from jaxspec.config.quantization.forms import SCALE_DTYPES
from jaxspec.drafts.families import BLOCKS
from jaxspec.drafts.head_layout import head_method
from jaxspec.layers.quantized import rounding
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.conversion import open_plain, write_converted
from jaxspec.loading.fp8 import SCALE, with_scales
from jaxspec.loading.weight_checks import check_finite
from jaxspec.loading.weights import LazyTensor

FP8, PLAIN = FORMATS = ("fp8-block", "bfloat16")
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "dequantize": True,
}


def convert_head(source: Path, out: Path, format: str) -> None:
    """Write the head in `source` in one of FORMATS into `out`, which must not exist.

    ConfigError for another format, for codes of another one, and for weights that are not finite.
    Names and shapes are compared with the config when the head is loaded.
    """
    if format not in FORMATS:
        raise ConfigError(f"format: expected {' or '.join(FORMATS)} for a head, got {format!r}")
    if format == FP8:
        checkpoint = open_plain(source)
        write_converted(checkpoint, out, QUANTIZATION, _coded(checkpoint))
        return
    checkpoint = open_checkpoint(source)
    write_converted(checkpoint, out, None, plain_tensors(checkpoint))


def _coded(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the new head: matrices as codes with scales, single rows as they are."""
    for name, array in _floats(checkpoint, checkpoint.tensors):
        if array.dtype.name in SCALE_DTYPES and array.ndim == 2 and min(array.shape) > 1:
            scales = rounding.fp8_block_scales(array)
            yield name, rounding.fp8_codes(array, scales)
            yield name + SCALE, scales
        else:
            yield name, array


def plain_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a head's tensors in bfloat16, vocabulary maps as they are.

    ConfigError for a head whose products read codes.
    """
    is_block = head_method(checkpoint.config, checkpoint.tensors) in BLOCKS
    if not is_block and read_quantization(checkpoint.config) is not None:
        raise ConfigError(
            f"{checkpoint.path}: expected a head that loading makes plain, got one whose products "
            "read codes"
        )
    tensors = with_scales(checkpoint.tensors, checkpoint.config, str(checkpoint.path))
    for name, array in _floats(checkpoint, tensors):
        is_map = array.dtype.name not in SCALE_DTYPES
        yield name, array if is_map else array.astype(ml_dtypes.bfloat16)


def _floats(
    checkpoint: Checkpoint, tensors: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor by name; ConfigError for codes, and for floats that are not finite."""
    for name, tensor in tensors.items():
        array = tensor.read()
        if name.endswith(SCALE) or array.dtype.name.startswith("float8"):
            raise ConfigError(
                f"{checkpoint.path}: {name}: expected plain weights, got {array.dtype} codes or "
                "scales without a quantization_config"
            )
        if array.dtype.name in SCALE_DTYPES:
            check_finite(array, f"{checkpoint.path}: {name}")
        yield name, array
