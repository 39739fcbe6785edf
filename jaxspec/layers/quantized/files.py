"""The tensors of one quantised linear module in a checkpoint, and what they hold.

A module of `out` rows and `in` columns has parts: "codes", "scales", "zeros" and
"activation_scale". `tensors` names those of a part; `read` returns its values in one layout,
whatever the format:

codes:            [out, in], float8_e4m3fn or uint8 (0 .. 15)
scales:           [out, 1], or [out, columns of blocks] with the rows of blocks repeated;
                  4 bits: [out, in / group_size]
zeros:            uint8 [out, in / group_size]
activation_scale: float32 []
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.quantization import BLOCK, Form, Fp8Form, Int4Form
from jaxspec.config.quantization.forms import SCALE_DTYPES
from jaxspec.layers.quantized import rounding
from pallas_kernels.int4_matmul.weight import ZERO

Part = Literal["codes", "scales", "zeros", "activation_scale"]
Shape = tuple[int, int]  # [out, in]

NIBBLES = 8  # codes in an int32
NUM_CODES = np.uint8(16)  # of four bits
# Dtypes of a tensor, by the end of its name.
DTYPES: dict[str, tuple[str, ...]] = {
    "weight": ("float8_e4m3fn",),
    **dict.fromkeys(("weight_scale", "weight_scale_inv", "input_scale", "scales"), SCALE_DTYPES),
    **dict.fromkeys(("weight_packed", "weight_zero_point", "qweight", "qzeros"), ("int32",)),
    **dict.fromkeys(("weight_shape", "g_idx"), ("int32", "int64")),
}
# Ends of the names of 4-bit codes; codes in float8 have the weight's own name and shape.
CODES = ("weight_packed", "qweight")
# The position of each column of 8 in AWQ's words.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def parts_of(form: Form) -> tuple[Part, ...]:
    """Return the parts that a module of this form has."""
    if isinstance(form, Fp8Form):
        return (
            ("codes", "scales", "activation_scale")
            if form.activation == "static"
            else ("codes", "scales")
        )
    return ("codes", "scales", "zeros") if form.has_zeros else ("codes", "scales")


def tensors(form: Form, part: Part, module: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of a part.

    ConfigError for a module whose columns do not fill whole groups.
    """
    if form.source == "floats":
        return {f"{module}.weight": shape}
    if isinstance(form, Fp8Form):
        return _fp8_tensors(form, part, module, shape)
    return _int4_tensors(form, part, module, shape)


def read(
    form: Form, part: Part, module: str, shape: Shape, arrays: Sequence[np.ndarray]
) -> np.ndarray:
    """Return a part of a module; arrays: those of `tensors`, in their order.

    ConfigError for dtypes and values that the format does not have.
    """
    if form.source == "floats":
        if arrays[0].dtype.name not in SCALE_DTYPES:
            raise ConfigError(
                f"{module}.weight: expected plain weights ({' or '.join(SCALE_DTYPES)}) to "
                f"quantise, got {arrays[0].dtype}"
            )
        return _rounded(form, part, arrays[0])
    for name, array in zip(tensors(form, part, module, shape), arrays, strict=True):
        kinds = DTYPES[name.rpartition(".")[2]]
        if array.dtype.name not in kinds:
            raise ConfigError(
                f"{name}: expected {' or '.join(kinds)} by quantization_config, got {array.dtype}"
            )
    if part == "scales":
        check_scales(arrays[0], f"{module}.{scales_of(form)}", signed=isinstance(form, Int4Form))
    if isinstance(form, Fp8Form):
        return _fp8_part(part, module, shape, arrays[0])
    return _int4_part(form, part, module, shape, arrays)


def dequantise(parts: Mapping[Part, np.ndarray]) -> np.ndarray:
    """Return the weight float32 [out, in] of a module's parts."""
    codes, scales = parts["codes"], parts["scales"].astype(np.float32)
    values = codes.astype(np.float32)
    if codes.dtype == np.uint8:
        zeros = parts.get("zeros")
        repeats = codes.shape[1] // scales.shape[1]
        values -= ZERO if zeros is None else np.repeat(zeros.astype(np.float32), repeats, axis=1)
        return values * np.repeat(scales, repeats, axis=1)
    if scales.shape[1] > 1:
        scales = np.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]]
    return values * scales


def weight_name(name: str) -> str:
    """Return the name of a tensor, or that of the weight whose 4-bit codes it holds."""
    module, _, end = name.rpartition(".")
    return f"{module}.weight" if end in CODES else name


def weight_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a checkpoint's tensors, with weights in place of 4-bit codes."""

    def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        module, _, end = name.rpartition(".")
        if end not in CODES or len(shape) != 2:
            return shape
        if end == "weight_packed":
            return shape[0], shape[1] * NIBBLES
        if f"{module}.g_idx" in shapes:  # GPTQ's
            return shape[1], shape[0] * NIBBLES
        return shape[1] * NIBBLES, shape[0]

    return {weight_name(name): shape_of(name, shape) for name, shape in shapes.items()}


def scales_of(form: Form) -> str:
    """Return the name of the scales' tensor, after that of its module."""
    if isinstance(form, Int4Form):
        return "weight_scale" if form.source == "compressed-tensors" else "scales"
    in_blocks = form.source == "fp8" and form.scales == "block"
    return "weight_scale_inv" if in_blocks else "weight_scale"


def check_scales(scales: np.ndarray, name: str, *, signed: bool) -> None:
    """Raise ConfigError unless the scales of weights are finite and, unless signed, at least 0.

    AutoRound's scales of 4 bits are negative in groups whose largest weight is positive, so that
    this weight gets -8, a code without a counterpart.
    """
    values = scales.astype(np.float32)
    wrong = ~np.isfinite(values)
    if not signed:
        wrong |= values < 0
    if wrong.any():
        kind = "finite" if signed else "positive, finite"
        raise ConfigError(f"{name}: expected {kind} scales, got {values[wrong][0]}")


def check_zero_scales(form: Form, module: str, parts: Mapping[Part, np.ndarray]) -> None:
    """Raise ConfigError where a scale is 0 and weights that share it have other codes than 0.

    Most writers give weights of 0 alone the scale 1 or an epsilon. GPTQ rounds the scales of tiny
    weights to 0 in float16, whatever the codes.
    """
    scales = parts["scales"]
    if scales.all() or (scales.dtype == np.float16 and scales.any()):
        return
    if dequantise({**parts, "scales": (scales == 0).astype(np.float32)}).any():
        raise zero_scale(f"{module}.{scales_of(form)}")


def zero_scale(name: str) -> ConfigError:
    """Return the error for a scale of 0 that hides weights."""
    return ConfigError(f"{name}: expected positive scales of weights other than 0, got 0.0")


def _fp8_tensors(
    form: Fp8Form, part: Part, module: str, shape: Shape
) -> dict[str, tuple[int, ...]]:
    if part == "codes":
        return {f"{module}.weight": shape}
    if part == "activation_scale":
        return {f"{module}.input_scale": (1,)}
    of_blocks = -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (1,),
        "channel": (shape[0],) if form.source == "modelopt" else (shape[0], 1),
        "block": of_blocks,
    }
    return {f"{module}.{scales_of(form)}": shapes[form.scales]}


def _fp8_part(part: Part, module: str, shape: Shape, array: np.ndarray) -> np.ndarray:
    if part == "codes":
        return array
    array = array.astype(np.float32)
    if part == "activation_scale":
        return positive(array, f"{module}.input_scale").reshape(())
    if array.ndim == 1:  # one scale, or one for each row
        return np.broadcast_to(array[:, None], (shape[0], 1))
    if array.shape == (shape[0], 1):
        return array
    return np.repeat(array, BLOCK, axis=0)[: shape[0]]


def _int4_tensors(
    form: Int4Form, part: Part, module: str, shape: Shape
) -> dict[str, tuple[int, ...]]:
    rows, columns = shape
    if columns % form.group_size or columns % NIBBLES or rows % NIBBLES:
        raise ConfigError(
            f"{module}: expected columns in whole groups of {form.group_size} and rows in eights, "
            f"got {columns} columns and {rows} rows"
        )
    groups = columns // form.group_size
    if form.source == "compressed-tensors":
        named: dict[Part, dict[str, tuple[int, ...]]] = {
            "codes": {"weight_packed": (rows, columns // NIBBLES), "weight_shape": (2,)},
            "scales": {scales_of(form): (rows, groups)},
            "zeros": {"weight_zero_point": (rows // NIBBLES, groups)},
        }
    else:
        zeros: dict[str, tuple[int, ...]] = {"qzeros": (groups, rows // NIBBLES)}
        packed = (columns // NIBBLES, rows) if form.source == "gptq" else (columns, rows // NIBBLES)
        codes: dict[str, tuple[int, ...]] = {"qweight": packed}
        if form.source == "gptq":
            codes |= {"g_idx": (columns,)}
        if not form.has_zeros:  # the file has them all the same
            codes |= zeros
        named = {"codes": codes, "scales": {scales_of(form): (groups, rows)}, "zeros": zeros}
    return {f"{module}.{name}": each for name, each in named[part].items()}


def _int4_part(
    form: Int4Form, part: Part, module: str, shape: Shape, arrays: Sequence[np.ndarray]
) -> np.ndarray:
    transposed = form.source != "compressed-tensors"
    if part == "scales":
        return _exact(arrays[0].T if transposed else arrays[0], form.scale_dtype, module)
    if part == "zeros":
        return _zeros(form, arrays[0])
    if transposed:
        if form.source == "gptq":
            _check_order(form, module, arrays[1])
        if not form.has_zeros:
            _check_middle(form, module, _zeros(form, arrays[-1]))
    elif arrays[1].tolist() != list(shape):
        raise ConfigError(
            f"{module}.weight_shape: expected {list(shape)}, got {arrays[1].tolist()}"
        )
    if form.source == "gptq":
        return unpacked(arrays[0], axis=0).T
    if form.source == "awq":
        return in_awq_order(unpacked(arrays[0], axis=1)).T
    return unpacked(arrays[0], axis=1)


def unpacked(words: np.ndarray, *, axis: int) -> np.ndarray:
    """Return the 8 codes of each int32, the lowest four bits first, along this axis as uint8."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    moved = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = (moved[..., None] >> shifts & 15).astype(np.uint8)
    return np.moveaxis(codes.reshape(*moved.shape[:-1], -1), -1, axis)


def packed(codes: np.ndarray) -> np.ndarray:
    """Return uint8 codes [rows, columns] as int32 [rows, columns / 8], the lowest bits first."""
    eights = codes.reshape(codes.shape[0], -1, NIBBLES).astype(np.uint32)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for i in range(NIBBLES):
        words |= eights[..., i] << np.uint32(4 * i)
    return words.view(np.int32)


def in_awq_order(codes: np.ndarray) -> np.ndarray:
    """Return the columns of codes in their own order; AWQ's words hold 0, 2, 4, 6, 1, 3, 5, 7."""
    eights = codes.reshape(*codes.shape[:-1], -1, NIBBLES)
    return eights[..., AWQ_ORDER].reshape(codes.shape)


def _zeros(form: Int4Form, array: np.ndarray) -> np.ndarray:
    """Return zeros uint8 [out, groups] of the format's own tensor."""
    if form.source == "compressed-tensors":
        return unpacked(array, axis=0)
    codes = unpacked(array, axis=1)
    if form.source == "awq":
        return in_awq_order(codes).T
    # A zero of 0, less one, is stored as 15.
    return ((codes + np.uint8(form.zeros_from)) % NUM_CODES).T


def _check_order(form: Int4Form, module: str, group_of: np.ndarray) -> None:
    if not np.array_equal(group_of, np.arange(len(group_of)) // form.group_size):
        raise ConfigError(
            f"{module}.g_idx: expected groups of {form.group_size} neighbours, "
            "got another order (desc_act)"
        )


def _check_middle(form: Int4Form, module: str, zeros: np.ndarray) -> None:
    if (zeros != ZERO).any():
        raise ConfigError(
            f"{module}.qzeros: expected zeros of {ZERO} in a symmetric checkpoint, "
            f"got {int(zeros[zeros != ZERO][0])}"
        )


def positive(scale: np.ndarray, name: str) -> np.ndarray:
    """Return a scale of activations, or several; ConfigError unless positive and finite."""
    values = scale.astype(np.float32).reshape(-1)
    wrong = values[~((values > 0) & (values < np.inf))]
    if wrong.size:
        raise ConfigError(f"{name}: expected a positive, finite scale, got {wrong[0]}")
    return scale


def _exact(scales: np.ndarray, dtype: str, module: str) -> np.ndarray:
    """Return scales in the checkpoint's dtype; ConfigError where that changes one."""
    wanted = rounding.dtype_of(dtype)
    with np.errstate(over="ignore"):
        cast = scales.astype(wanted)
    if not np.array_equal(cast.astype(np.float32), scales.astype(np.float32), equal_nan=True):
        raise ConfigError(
            f"{module}: expected scales in config.json's dtype {dtype}, got {scales.dtype}"
        )
    return cast


def _rounded(form: Form, part: Part, weight: np.ndarray) -> np.ndarray:
    """Return a part of a plain weight that is quantised while it loads."""
    if isinstance(form, Int4Form):
        dtype = rounding.dtype_of(form.scale_dtype)
        scales = rounding.int4_scales(weight, form.group_size, dtype)
        return scales if part == "scales" else rounding.int4_codes(weight, scales)
    if form.scales == "block":
        scales = rounding.fp8_block_scales(weight)
        if part == "scales":
            return np.repeat(scales, BLOCK, axis=0)[: weight.shape[0]]
    else:
        scales = rounding.fp8_scales(weight)
        if part == "scales":
            return scales
    return rounding.fp8_codes(weight, scales)
