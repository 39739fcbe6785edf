"""The tensors of a quantised checkpoint, by the names and shapes of parameter tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.config.quantization import Quantization
from jaxspec.loading.fp8 import Readable, Tensor

SCALES = (".weight_scale", ".input_scale")  # one number, with an axis or without
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")


@dataclass(frozen=True)
class Scalar:
    """A scalar of a checkpoint, as an array of one number."""

    tensor: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def read(self) -> np.ndarray:
        return self.tensor.read().reshape(1)


def stored_tensors(
    tensors: Mapping[str, Tensor], quantization: Quantization
) -> dict[str, Tensor | Scalar]:
    """Return the tensors of a quantised checkpoint that a parameter table names.

    Scales of a KV cache are left out: the cache has a dtype of its own.
    """
    return {
        name: Scalar(tensor) if name.endswith(SCALES) and tensor.shape == () else tensor
        for name, tensor in tensors.items()
        if not (quantization.kv_scales and name.endswith(KV_SCALES))
    }
