"""Floats to codes and scales, as llm-compressor rounds them without calibration data.

A scale is the largest magnitude over the largest code, in float32; codes are rounded to the
nearest, ties to even. A scale of zeros alone is 1.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxspec.config.quantization import BLOCK
from pallas_kernels.fp8_matmul.weight import LARGEST
from pallas_kernels.int4_matmul.weight import ZERO

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_FP8 = np.float32(LARGEST)
HALF_OF_INT4 = np.float32(7.5)  # of the 16 codes, as compressed-tensors takes it


def dtype_of(name: str) -> np.dtype:
    """Return numpy's dtype of a name such as "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def fp8_scales(weight: np.ndarray) -> np.ndarray:
    """Return float32 [out, 1], a scale for each output channel of weight [out, in]."""
    return _scales(np.abs(weight.astype(np.float32)).max(axis=1, keepdims=True), LARGEST_FP8)


def fp8_block_scales(weight: np.ndarray) -> np.ndarray:
    """Return float32 [out / BLOCK, in / BLOCK], rounded up, of weight [out, in]."""
    rows, columns = weight.shape
    padded = np.pad(np.abs(weight.astype(np.float32)), ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    return _scales(blocks.max(axis=(1, 3)), LARGEST_FP8)


def fp8_codes(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return float8_e4m3fn [out, in]; scales: as fp8_scales or fp8_block_scales returns them."""
    values = weight.astype(np.float32) / spread(scales, weight.shape)
    return np.clip(values, -LARGEST_FP8, LARGEST_FP8).astype(FP8)


def int4_scales(weight: np.ndarray, group_size: int, dtype: np.dtype) -> np.ndarray:
    """Return scales of this dtype [out, in / group_size] of weight [out, in]."""
    groups = np.abs(weight.astype(np.float32)).reshape(weight.shape[0], -1, group_size)
    with np.errstate(over="ignore"):  # loading and converting refuse scales that are not finite
        scales = _scales(groups.max(axis=-1), HALF_OF_INT4).astype(dtype)
    return np.where(scales == 0, scales.dtype.type(1), scales)  # too small for the dtype


def int4_codes(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return uint8 [out, in], codes 0 .. 15 whose zero is ZERO."""
    group_size = weight.shape[1] // scales.shape[1]
    values = weight.astype(np.float32) / np.repeat(scales.astype(np.float32), group_size, axis=1)
    return (np.clip(np.rint(values), -8, 7) + ZERO).astype(np.uint8)


def spread(
    scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)
) -> np.ndarray:
    """Return scales in a shape that broadcasts over a weight [out, in].

    scales: [out, 1], [1, 1], or one for each block
    block:  its rows and columns, which may be more than the weight's
    """
    rows, columns = shape
    if scales.shape in ((rows, 1), (1, 1)):
        return scales
    in_rows = np.repeat(scales, min(block[0], rows), axis=0)[:rows]
    return np.repeat(in_rows, min(block[1], columns), axis=1)[:, :columns]


def _scales(largest: np.ndarray, code: np.float32) -> np.ndarray:
    scales = (largest / code).astype(np.float32)
    return np.where(scales == 0, np.float32(1), scales)
