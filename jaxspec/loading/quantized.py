"""The tensors of a quantised checkpoint, by the names and shapes of parameter tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.config.quantization import Quantization
from jaxspec.loading.fp8 import Readable, Tensor

# One number each, with an axis or without.
SCALES = (".weight_scale", ".input_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Reshaped:
    """A tensor of a checkpoint, in the shape that a table has it."""

    tensor: Readable
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return self.tensor.read().reshape(self.shape)


@dataclass(frozen=True)
class Ones:
    """The scales of keys or values of a layer without any in its checkpoint."""

    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return np.ones(self.shape, np.float32)


def stored_tensors(
    tensors: Mapping[str, Tensor],
    quantization: Quantization,
    wanted: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor | Reshaped | Ones]:
    """Return the tensors of a quantised checkpoint, as a table has them.

    wanted: names and shapes of the table's tensors
    """

    def in_our_shape(name: str, tensor: Tensor) -> Tensor | Reshaped:
        if name.endswith(SCALES) and tensor.shape == ():
            return Reshaped(tensor, (1,))
        # compressed-tensors: KV heads, tokens and dimensions of a head.
        if name.endswith(quantization.kv_scales) and tensor.shape[1:] == (1, 1):
            return Reshaped(tensor, tensor.shape[:1])
        return tensor

    found: dict[str, Tensor | Reshaped | Ones] = {
        name: in_our_shape(name, tensor) for name, tensor in tensors.items()
    }
    absent = {
        name: Ones(shape)
        for name, shape in wanted.items()
        if name.endswith(quantization.kv_scales) and name not in found
    }
    return found | absent
