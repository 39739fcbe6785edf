"""The tensors of a quantised checkpoint, by the names and shapes of parameter tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from jaxspec.config.quantization import Form, Int4Form, Quantization
from jaxspec.config.quantization.forms import SCALE_DTYPES, exactly
from jaxspec.layers.quantized.files import scales_of
from jaxspec.loading.fp8 import Readable, Tensor

Config = TypeVar("Config")

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

    def is_empty_bias(name: str, tensor: Tensor) -> bool:
        """Return whether it is AutoGPTQ's bias of zeros, where the model has none."""
        module, _, part = name.rpartition(".")
        if part != "bias" or name in wanted:
            return False
        form = quantization.form_of(module)
        return isinstance(form, Int4Form) and form.source == "gptq" and not tensor.read().any()

    found: dict[str, Tensor | Reshaped | Ones] = {
        name: in_our_shape(name, tensor)
        for name, tensor in tensors.items()
        if not is_empty_bias(name, tensor)
    }
    ends = quantization.kv_scales

    def has_no_scale(name: str) -> bool:
        """Return whether a name is a wanted k or v scale of a layer whose file has neither."""
        layer = next((name.removesuffix(end) for end in ends if name.endswith(end)), None)
        return layer is not None and not any(layer + end in found for end in ends)

    return found | {name: Ones(shape) for name, shape in wanted.items() if has_no_scale(name)}


def with_stored_names(cfg: Config, names: Mapping[str, str]) -> Config:
    """Return a head's config whose rules hold for modules by the names in its file, too.

    names: of tensors, in the file -> in the table
    """
    held: Any = cfg
    quantization: Quantization | None = getattr(held, "quantization", None)
    if quantization is None:
        return cfg
    modules = {name.rpartition(".")[0]: ours.rpartition(".")[0] for name, ours in names.items()}
    rules = tuple(
        (exactly(ours), form)
        for stored, ours in modules.items()
        if stored != ours
        and (form := quantization.form_of(ours, stored)) != quantization.form_of(ours)
    )
    return replace(held, quantization=replace(quantization, rules=rules + quantization.rules))


def with_stored_scales(cfg: Config, tensors: Mapping[str, Any]) -> Config:
    """Return a model's config whose 4-bit weights have scales of the dtype that is stored.

    config.json has the dtype of the plain model, and AutoGPTQ, GPTQModel and AutoAWQ may store
    float16 beside bfloat16. A form whose scales have several dtypes stays as it is.
    """
    held: Any = cfg
    quantization: Quantization | None = getattr(held, "quantization", None)
    if quantization is None:
        return cfg
    forms = [f for f in quantization.forms if isinstance(f, Int4Form) and f.source != "floats"]
    ends = {scales_of(form) for form in forms}
    dtypes: dict[Form | None, set[str]] = {form: set() for form in forms}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end in ends and (form := quantization.form_of(module)) in dtypes:
            dtypes[form].add(tensor.dtype.name)
    stored: dict[Form | None, Form] = {}
    for form in forms:
        if len(dtypes[form]) == 1 and dtypes[form] <= set(SCALE_DTYPES):
            stored[form] = replace(form, scale_dtype=dtypes[form].pop())
    rules = tuple((pattern, stored.get(form, form)) for pattern, form in quantization.rules)
    return replace(held, quantization=replace(quantization, rules=rules))
