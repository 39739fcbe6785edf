"""Weights that are float8 in blocks with a scale each, as in DeepSeek-V3's own files.

Configs with a quantisation keep codes and scales (jaxspec/layers/quantized/). Here all other float8
tensors become plain as they are read: those of DFlash and DSpark heads, and of every checkpoint
whose quantization_config has `dequantize`.

A matrix NAME is float8 (e4m3), and NAME_scale_inv holds a float32 for each block of
weight_block_size, rows by columns (2412.19437, section 3.3). The weight is their product, in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.quantization import block_sizes
from jaxspec.config.quantization.forms import SCALE_DTYPES
from jaxspec.config.reading import shown
from jaxspec.layers.quantized import rounding
from jaxspec.layers.quantized.files import check_scales, zero_scale

SCALE = "_scale_inv"


class Readable(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> np.ndarray: ...


Tensor = TypeVar("Tensor", bound=Readable)


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix and its scales; nothing of them is in memory until ``read``.

    name: of the matrix in the checkpoint
    """

    weight: Readable
    scales: Readable
    block: tuple[int, int]
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self) -> np.ndarray:
        scales, name = self.scales.read(), self.name + SCALE
        if scales.dtype.name not in SCALE_DTYPES:
            kinds = " or ".join(SCALE_DTYPES)
            raise ConfigError(f"{name}: expected scales in {kinds}, got {scales.dtype}")
        check_scales(scales, name, signed=False)
        spread = rounding.spread(scales.astype(np.float32), self.shape, self.block)
        codes = self.weight.read().astype(np.float32)
        if not scales.all() and np.where(spread == 0, codes, 0).any():
            raise zero_scale(name)
        with np.errstate(over="ignore"):  # loading refuses weights that are not finite
            return codes * spread


def with_scales(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str
) -> Mapping[str, Tensor | ScaledTensor]:
    """Return a checkpoint's tensors with each float8 matrix joined to its scales.

    Tensors stay as they are unless config.json has quant_method "fp8". Raises ConfigError for a
    float8 tensor without scales, for scales without a matrix, and for a wrong number of scales.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return tensors
    if quantization.get("fmt") not in (None, "e4m3"):
        raise ConfigError(
            f"{source} quantization_config: expected fmt 'e4m3', got {shown(quantization['fmt'])}"
        )
    given = quantization.get("weight_block_size")
    block = block_sizes(given)
    if block is None:
        raise ConfigError(
            f"{source} quantization_config: expected weight_block_size as two sizes, got {given!r}"
        )
    found: dict[str, Tensor | ScaledTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in tensors:
                raise ConfigError(
                    f"{source} {name}: expected the tensor {name.removesuffix(SCALE)} "
                    "that it scales, got none"
                )
            continue
        scales = tensors.get(name + SCALE)
        if scales is None:
            if getattr(tensor, "dtype", None) == ml_dtypes.float8_e4m3fn:
                raise ConfigError(
                    f"{source} {name}: expected {name + SCALE} beside a float8 tensor, got none"
                )
            found[name] = tensor
            continue
        if len(tensor.shape) != 2:
            raise ConfigError(
                f"{source} {name + SCALE}: expected scales of a matrix, got those of a tensor "
                f"{tensor.shape}"
            )
        expected = tuple(-(-n // size) for n, size in zip(tensor.shape, block, strict=True))
        if scales.shape != expected:
            raise ConfigError(
                f"{source} {name + SCALE}: expected {expected} scales of a matrix {tensor.shape}, "
                f"got {scales.shape}"
            )
        found[name] = ScaledTensor(tensor, scales, block, name)
    return found
