"""Heads whose weights are float8 in blocks with a scale each, as in DeepSeek-V3's own files.

Configs with a quantisation keep codes and scales (jaxspec/layers/quantized/). Here the tensors of
other models become plain as they are read: those of DFlash, DSpark and Llama 4's heads.

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
        rows, columns = self.shape
        scales = self.scales.read()
        check_scales(scales, self.name + SCALE, signed=False)
        spread = np.repeat(np.repeat(scales, self.block[0], axis=0)[:rows], self.block[1], axis=1)[
            :, :columns
        ]
        codes = self.weight.read().astype(np.float32)
        if not scales.all() and codes[spread == 0].any():
            raise zero_scale(self.name + SCALE)
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
    block = quantization.get("weight_block_size")
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(n) is int and n > 0 for n in block)
    ):
        raise ConfigError(
            f"{source} quantization_config: expected weight_block_size as two sizes, got {block!r}"
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
        expected = tuple(-(-n // size) for n, size in zip(tensor.shape, block, strict=False))
        if len(tensor.shape) != 2 or scales.shape != expected:
            raise ConfigError(
                f"{source} {name + SCALE}: expected {expected} scales of a matrix {tensor.shape}, "
                f"got {scales.shape}"
            )
        found[name] = ScaledTensor(tensor, scales, (block[0], block[1]), name)
    return found
