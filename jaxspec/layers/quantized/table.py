"""Parameter tables of quantised checkpoints, made from those of plain weights.

A family's table says which matrices it has, how they are joined, and how a mesh cuts them. Here a
Weight of the table becomes an Fp8Weight or an Int4Weight, whose arrays are specs of codes and
scales. Matrices that no product reads as codes (latent attention's absorbed projections, experts of
a form that `_experts_stay` names) stay plain, and are dequantised while they load. So does a head,
which drafts and training read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.config import ConfigError
from jaxspec.config.quantization import BLOCK, GROUPS, Form, Fp8Form, Int4Form, Quantization
from jaxspec.layers.params import (
    JoinedSpec,
    Params,
    ParamSpec,
    Weight,
    is_spec,
    joined,
    weight,
)
from jaxspec.layers.quantized import files
from jaxspec.layers.quantized.files import Part, Shape
from pallas_kernels.fp8_matmul import Fp8Weight
from pallas_kernels.fp8_matmul.weight import LARGEST
from pallas_kernels.int4_matmul import Int4Weight, pack
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, UNIT

SUFFIX = ".weight"


@dataclass(frozen=True)
class QuantizedSpec(ParamSpec):
    """Codes, scales or zeros of a matrix, of several that are joined, or of experts.

    base:  the plain matrix [in, out], or those of experts [experts, in, out]
    form:  of its modules
    part:  the part of each module that this array holds
    along: (axis of the array, axis of the matrix, weights for each entry); an axis of the matrix
           that the array lacks is not named
    """

    base: ParamSpec = field(default=cast(ParamSpec, None))
    form: Form = field(default=cast(Form, None))
    part: Part = "codes"
    along: tuple[tuple[int, int, int], ...] = ()

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for module, size in modules_of(self.base).items()
            for name, shape in files.tensors(self.form, self.part, module, size).items()
        }

    @property
    def weights_per_entry(self) -> int:
        """Weights that an entry of the array holds; scales hold none."""
        if self.part != "codes":
            return 0
        return 1 if isinstance(self.form, Fp8Form) else files.NIBBLES

    def parts_along(self, dim: int) -> list[tuple[int, str | None]]:
        for own, of_base, unit in self.along:
            if own == dim:
                parts = self.base.parts_along(of_base)
                return [(-(-width // unit), axis) for width, axis in parts]
        return [(self.shape[dim], None)]

    def uneven_pieces(self, dim: int, num_pieces: Callable[[str | None], int]) -> int | None:
        """Return the unit of weights that the pieces of an axis do not fill; None if they do."""
        for own, of_base, unit in self.along:
            for width, axis in self.base.parts_along(of_base) if own == dim else ():
                if unit > 1 and num_pieces(axis) > 1 and width % (num_pieces(axis) * unit):
                    return unit
        return None

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        made = _of_modules(self.form, self.part, self.base, arrays)
        if self.part == "activation_scale":
            return self._only(made)
        if not is_experts(self.base):
            return self._stored(self.base.assemble(made))  # [in, out], or rows of scales [.., out]
        parts = self.base.side_by_side  # of each expert, one expert after the other
        pairs = [made[i : i + parts] for i in range(0, len(made), parts)]
        return np.stack([self._stored(np.concatenate(pair).T) for pair in pairs])

    def check_zero_scales(self, array: np.ndarray, read: Callable[[str], np.ndarray]) -> None:
        """Raise ConfigError if this array has a scale of 0 that hides weights.

        read: returns a tensor of the checkpoint; only those of arrays with a 0 are read
        """
        if self.part != "scales" or array.all():
            return
        for module, size in modules_of(self.base).items():
            parts: dict[Part, np.ndarray] = {
                part: files.read(
                    self.form,
                    part,
                    module,
                    size,
                    [read(name) for name in files.tensors(self.form, part, module, size)],
                )
                for part in files.parts_of(self.form)
            }
            files.check_zero_scales(self.form, module, parts)

    def _stored(self, whole: np.ndarray) -> np.ndarray:
        """Return codes [in, out], or rows of scales [.., out], as products take them."""
        if isinstance(self.form, Fp8Form):
            return self._fp8(whole)
        return pack(whole.T) if self.part == "codes" else np.ascontiguousarray(whole)

    def _only(self, scales: Sequence[np.ndarray]) -> np.ndarray:
        if len({float(scale) for scale in scales}) > 1:
            raise ConfigError(
                f"{self.name}: expected one input_scale for projections of one input, "
                f"got {', '.join(str(float(scale)) for scale in scales)}"
            )
        return scales[0]

    def _fp8(self, whole: np.ndarray) -> np.ndarray:
        if self.part == "codes":
            return np.ascontiguousarray(whole.T)
        assert isinstance(self.form, Fp8Form)
        if self.form.scales != "block":
            return np.ascontiguousarray(whole[0])
        scales = np.ascontiguousarray(whole.T[::BLOCK])
        if not np.array_equal(np.repeat(scales, BLOCK, axis=0)[: self.base.shape[-1]], whole.T):
            raise ConfigError(f"{self.name}: expected blocks of {BLOCK} rows after reordering")
        return scales

    def draw(self, key: jax.Array, dtype: DTypeLike, scale: float | None) -> jax.Array:
        """Return random codes, and scales that give weights of about 1/sqrt(in)."""
        std = scale or self.base.shape[-2] ** -0.5
        if self.part == "activation_scale":
            return jnp.float32(0.1)
        if self.part == "zeros":
            return jax.random.randint(key, self.shape, 6, 11).astype(jnp.uint8)
        if self.part == "scales":
            largest = 120.0 if isinstance(self.form, Fp8Form) else 4.6
            noise = jax.random.uniform(key, self.shape, jnp.float32, 0.5, 1.5)
            return (noise * std / largest).astype(self.dtype or dtype)
        if isinstance(self.form, Fp8Form):
            noise = 120 * jax.random.normal(key, self.shape, jnp.float32)
            return jnp.clip(noise, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(jax.random.bits(key, self.shape, jnp.uint32), jnp.int32)


@dataclass(frozen=True)
class DequantisedSpec(ParamSpec):
    """A plain array made of quantised modules.

    base:  the array as the family has it
    forms: of the modules, in their order; None for one with plain weights
    """

    base: ParamSpec = field(default=cast(ParamSpec, None))
    forms: tuple[Form | None, ...] = ()

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for each in self._stored() for name, shape in each.items()}

    def _stored(self) -> list[dict[str, tuple[int, ...]]]:
        """Return names and shapes of each module's tensors."""
        found: list[dict[str, tuple[int, ...]]] = []
        for (module, size), form in zip(modules_of(self.base).items(), self.forms, strict=True):
            if form is None:
                found.append({f"{module}{SUFFIX}": size})
                continue
            parts = [files.tensors(form, part, module, size) for part in files.parts_of(form)]
            found.append({name: shape for part in parts for name, shape in part.items()})
        return found

    def parts_along(self, dim: int) -> list[tuple[int, str | None]]:
        return self.base.parts_along(dim)

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        left, made = list(arrays), []
        for (module, size), form in zip(modules_of(self.base).items(), self.forms, strict=True):
            if form is None:
                made.append(left.pop(0))
                continue
            parts: dict[Part, np.ndarray] = {}
            for part in files.parts_of(form):
                count = len(files.tensors(form, part, module, size))
                parts[part] = files.read(form, part, module, size, left[:count])
                del left[:count]
            files.check_zero_scales(form, module, parts)
            made.append(files.dequantise(parts))
        return self.base.assemble(made)

    def draw(self, key: jax.Array, dtype: DTypeLike, scale: float | None) -> jax.Array:
        return self.base.draw(key, dtype, scale)


@dataclass(frozen=True)
class ScaleSpec(ParamSpec):
    """The scale of a layer's fp8 keys or of its values, or one for each KV head."""

    def assemble(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return files.positive(arrays[0], self.name)


def stored(table: Params, quantization: Quantization | None, *, num_kv_heads: int) -> Params:
    """Return a family's table as that of a checkpoint with this quantisation.

    num_kv_heads: of each layer, which may have a scale for each of its fp8 keys' heads

    ConfigError for a module whose shape its form does not take, and for projections of one input
    that differ in form.
    """
    if quantization is None:
        return table

    quantization = _with_fitting_groups(quantization, table)

    def entry(each: Any) -> Any:
        if isinstance(each, Weight):
            return _weight(each, quantization)
        return _plain(each, quantization)

    kv = partial(_with_kv_scales, quantization=quantization, num_kv_heads=num_kv_heads)
    table = jax.tree.map(kv, table, is_leaf=lambda x: _is_attention(x) or is_spec(x))
    made = jax.tree.map(entry, table, is_leaf=lambda x: isinstance(x, Weight) or is_spec(x))
    return jax.tree.map(_share_input, made, is_leaf=lambda x: _is_mlp(x) or is_spec(x))


def _with_fitting_groups(quantization: Quantization, table: Params) -> Quantization:
    """Return the quantisation with the largest groups that all matrices of a table fill.

    Those of a checkpoint stay as they are.
    """
    if not any(isinstance(f, Int4Form) and f.source == "floats" for f in quantization.forms):
        return quantization
    entries = jax.tree.leaves(table, is_leaf=lambda x: isinstance(x, Weight) or is_spec(x))
    specs = [entry.spec for entry in entries if isinstance(entry, Weight)]
    depths = [
        spec.shape[-2]
        for spec in filter(_reads_codes, specs)
        if not (is_experts(spec) and spec.shape[-2] % DEPTHS)
        if any(map(quantization.form_of, modules_of(spec)))
    ]
    fitting = [size for size in GROUPS if not any(depth % size for depth in depths)]

    def fit(form: Form | None) -> Form | None:
        if not isinstance(form, Int4Form) or form.source != "floats" or not fitting:
            return form
        return replace(form, group_size=fitting[-1])

    return replace(quantization, rules=tuple((p, fit(form)) for p, form in quantization.rules))


def _reads_codes(spec: ParamSpec) -> bool:
    """Return whether a product reads a matrix as codes: no head that drafts share."""
    return (len(spec.shape) == 2 and "vocab" not in spec.axes) or is_experts(spec)


def is_experts(spec: ParamSpec) -> bool:
    """Return whether an array has a matrix [in, out] of each expert."""
    return len(spec.shape) == 3 and spec.axes[0] == "experts"


def experts_fit(form: Form, spec: ParamSpec) -> bool:
    """Return whether experts of a form are kept in codes.

    One scale of an expert's activations is not supported. Nor are blocks that reach from gate into
    up, and shapes that the order of 4-bit codes does not take. We make no blocks of fewer columns,
    which other readers refuse.
    """
    depth, width = spec.shape[-2], spec.shape[-1] // spec.side_by_side
    if isinstance(form, Fp8Form):
        if form.scales != "block":
            return form.activation != "static"
        whole = form.source != "floats" or depth % BLOCK == 0
        return whole and (spec.side_by_side == 1 or width % BLOCK == 0)
    return depth % max(DEPTHS, form.group_size) == 0 and width % COLUMNS == 0


def _experts_stay(spec: ParamSpec, forms: Sequence[Form | None]) -> bool:
    """Return whether experts stay plain: of several forms, or of one that does not fit them."""
    form = forms[0]
    return form is None or len(set(forms)) > 1 or not experts_fit(form, spec)


def _is_attention(entry: Any) -> bool:
    return isinstance(entry, dict) and "qkv_proj" in entry


def _with_kv_scales(entry: Any, *, quantization: Quantization, num_kv_heads: int) -> Any:
    """Return an attention layer with the scales of its fp8 keys and values.

    They are float32 [1], or [num_kv_heads].
    """
    names, per_head = quantization.kv_scales, quantization.kv_scales_per_head
    if not names or not _is_attention(entry):
        return entry
    shape, axes = ((num_kv_heads,), ("kv_heads",)) if per_head else ((1,), (None,))
    prefix = next(iter(modules_of(entry["qkv_proj"].values))).rpartition(".")[0]
    scales = {
        key: ScaleSpec(f"{prefix}.{name}", shape, axes, dtype="float32")
        for key, name in zip(("k_scale", "v_scale"), names, strict=True)
    }
    return {**entry, **scales}


def _is_mlp(entry: Any) -> bool:
    """Return whether gate and up of an entry multiply rows that are quantised once."""
    return isinstance(entry, dict) and "gate_proj" in entry and "up_proj" in entry


def _share_input(entry: Any) -> Any:
    """Return an MLP whose gate and up read both scales of their input, which have to be equal.

    ConfigError for gate and up of different forms, which no product reads together.
    """
    if not _is_mlp(entry):
        return entry
    both = [entry[name] for name in ("gate_proj", "up_proj")]
    gate, up = (jax.tree.leaves(weight, is_leaf=is_spec)[0] for weight in both)
    name = gate.name.replace("gate_proj", "{gate,up}_proj")
    _check_one_form(name, [getattr(spec, "form", None) for spec in (gate, up)])
    if not all(isinstance(w, Fp8Weight) and w.activation_scale is not None for w in both):
        return entry
    gate, up = (weight.activation_scale for weight in both)
    scale = replace(gate, name=name, base=joined(name, (gate.base, up.base)))
    gate, up = (replace(weight, activation_scale=scale) for weight in both)
    return {**entry, "gate_proj": gate, "up_proj": up}


def _check_one_form(name: str, forms: Sequence[Form | None]) -> None:
    """Raise ConfigError for projections of one input that differ in form."""
    found = list(dict.fromkeys(forms))
    if len(found) > 1:
        raise ConfigError(
            f"quantization_config: expected one form for {name}, the projections of one "
            f"input, got {' and '.join('plain weights' if f is None else str(f) for f in found)}"
        )


def modules_of(spec: ParamSpec) -> dict[str, Shape]:
    """Return name and shape [out, in] of each linear module that an array is made of."""
    return {
        name.removesuffix(SUFFIX): (shape[0], shape[1])
        for name, shape in spec.tensors.items()
        if _is_linear(name, shape) and spec.axes != ("vocab", "embed")  # an embedding is a table
    }


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(SUFFIX) and len(shape) == 2


def _of_modules(
    form: Form, part: Part, base: ParamSpec, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    left, made = list(arrays), []
    for module, size in modules_of(base).items():
        count = len(files.tensors(form, part, module, size))
        made.append(files.read(form, part, module, size, left[:count]))
        del left[:count]
    return made


def _plain(spec: ParamSpec, quantization: Quantization) -> ParamSpec:
    """Return the spec of a plain array, dequantised if its modules are stored as codes."""
    forms = tuple(map(quantization.form_of, modules_of(spec)))
    if not any(form is not None and form.source != "floats" for form in forms):
        return spec
    return DequantisedSpec(
        spec.name,
        spec.shape,
        spec.axes,
        dtype=spec.dtype,
        side_by_side=spec.side_by_side,
        base=spec,
        forms=forms,
    )


def _weight(entry: Weight, quantization: Quantization) -> Any:
    """Return the entry of a matrix: plain, dequantised, or of codes."""
    spec = entry.spec
    forms = [quantization.form_of(module) for module in modules_of(spec)]
    if not any(forms):
        return entry
    if not _reads_codes(spec) or (is_experts(spec) and _experts_stay(spec, forms)):
        return weight(_plain(spec, quantization))
    _check_one_form(spec.name, forms)
    form = forms[0]
    assert form is not None
    if isinstance(form, Fp8Form):
        parts = spec.parts if isinstance(spec, JoinedSpec) else (spec,)
        if form.scales == "block" and any(part.shape[1] % BLOCK for part in parts[:-1]):
            return tuple(_fp8(part, form) for part in parts)
        return _fp8(spec, form)
    return _int4(spec, form)


def _part(
    base: ParamSpec,
    form: Fp8Form | Int4Form,
    part: Part,
    shape: tuple[int, ...],
    axes: Any,
    along: Any,
    dtype: str,
) -> Any:
    """Return the spec of one array of a quantised matrix.

    shape, axes, along: of the matrix's two dimensions; an axis of experts comes before them
    """
    num_lead = len(base.shape) - 2
    return QuantizedSpec(
        base.name,
        (*base.shape[:num_lead], *shape),
        (*base.axes[:num_lead], *axes),
        dtype=dtype,
        base=base,
        form=form,
        part=part,
        along=(*((i, i, 1) for i in range(num_lead)), *along),
    )


def _fp8(base: ParamSpec, form: Fp8Form) -> Fp8Weight:
    *lead, depth, width = base.shape
    *_, of_depth, of_width = base.axes
    n = len(lead)  # 1 of experts, else 0
    spec = partial(_part, base, form)
    both = (of_width, of_depth)
    by_one = ((n, n + 1, 1), (n + 1, n, 1))
    codes = spec("codes", (width, depth), both, by_one, "float8_e4m3fn")
    if form.scales == "block":
        shape = (-(-width // BLOCK), -(-depth // BLOCK))
        by_block = ((n, n + 1, BLOCK), (n + 1, n, BLOCK))
        scales = spec("scales", shape, both, by_block, "float32")
    else:
        scales = spec("scales", (width,), (of_width,), ((n, n + 1, 1),), "float32")
    given = None
    if form.activation == "static":
        assert not lead, base.name  # _experts_stay
        given = spec("activation_scale", (), (), (), "float32")
    return Fp8Weight(codes, scales, given, activation=form.activation)


def check_int4_shape(name: str, depth: int, *widths: int) -> None:
    """Raise ConfigError unless matrices [in, out] have whole units of 4-bit codes."""
    if depth % DEPTHS or any(width % COLUMNS for width in widths):
        raise ConfigError(
            f"{name}: expected columns in {DEPTHS}s and rows in {COLUMNS}s for 4-bit weights, "
            f"got {depth} columns and {', '.join(map(str, widths))} rows"
        )


def _int4(base: ParamSpec, form: Int4Form) -> Int4Weight:
    *lead, depth, width = base.shape
    *_, of_depth, of_width = base.axes
    n = len(lead)  # 1 of experts, else 0
    parts = base.parts if isinstance(base, JoinedSpec) else (base,)
    check_int4_shape(base.name, depth, *(part.shape[-1] for part in parts))

    spec = partial(_part, base, form)
    words = spec(
        "codes",
        (width // COLUMNS, depth // DEPTHS, UNIT),
        (of_width, of_depth, None),
        ((n, n + 1, COLUMNS), (n + 1, n, DEPTHS)),
        "int32",
    )
    grouped = partial(
        spec,
        shape=(depth // form.group_size, width),
        axes=(of_depth, of_width),
        along=((n, n, form.group_size), (n + 1, n + 1, 1)),
    )
    scales = grouped("scales", dtype=form.scale_dtype)
    zeros = grouped("zeros", dtype="uint8") if form.has_zeros else None
    return Int4Weight(words, scales, zeros)
