"""The tensors of a quantised checkpoint, by the names and shapes of parameter tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.config.quantization import Quantization
from jaxspec.loading.fp8 import Readable, Tensor

# One number each, with an axis or without.
SCALES = (".weight_scale", ".input_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Scalar:
    """A scalar of a checkpoint, as an array of one number."""

    tensor: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def read(self) -> np.ndarray:
        return self.tensor.read().reshape(1)


@dataclass(frozen=True)
class One:
    """The scale of keys or values of a layer without one in its checkpoint."""

    shape: tuple[int, ...] = (1,)

    def read(self) -> np.ndarray:
        return np.ones(1, np.float32)


def stored_tensors(
    tensors: Mapping[str, Tensor], quantization: Quantization, wanted: Iterable[str]
) -> dict[str, Tensor | Scalar | One]:
    """Return the tensors of a quantised checkpoint, as a table with these names has them."""
    found: dict[str, Tensor | Scalar | One] = {
        name: Scalar(tensor) if name.endswith(SCALES) and tensor.shape == () else tensor
        for name, tensor in tensors.items()
    }
    absent = [
        name for name in wanted if name.endswith(quantization.kv_scales) and name not in found
    ]
    return found | {name: One() for name in absent}
