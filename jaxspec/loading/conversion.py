"""A checkpoint of plain weights -> a quantised one in the compressed-tensors format.

It quantises the matrices of the layers' products, experts among them. The head and routers keep
their weights; the new config names them as ignored. So do experts whose shape the format, or a
product that reads it, does not take.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec import models
from jaxspec.config import ConfigError
from jaxspec.config.quantization import (
    BLOCK,
    FROM_FLOATS,
    GROUPS,
    Form,
    Int4Form,
    Quantize,
    form_of_floats,
    scale_dtype_of,
)
from jaxspec.config.quantization.forms import SCALE_DTYPES
from jaxspec.layers.params import Weight, is_spec
from jaxspec.layers.quantized import files, rounding
from jaxspec.layers.quantized.files import Shape
from jaxspec.layers.quantized.table import (
    check_int4_shape,
    experts_fit,
    is_experts,
    modules_of,
)
from jaxspec.loading.cache import MARKER
from jaxspec.loading.checkpoint import INDEX, SINGLE, Checkpoint, open_checkpoint
from jaxspec.loading.model import check_counts
from jaxspec.loading.new_folder import new_folder
from jaxspec.loading.shards import write_json, write_shards
from jaxspec.loading.weight_checks import check_finite
from jaxspec.loading.weights import check_shapes

# Files beside the weights that the new folder has too.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
OWN = ("config.json", INDEX, SINGLE)
EXPERT = re.compile(r"(?P<layer>.*)\.experts\.\d+\.(?P<projection>[^.]+)\Z")


def convert_checkpoint(
    source: Path, out: Path, format: Quantize, *, group_size: int | None = None
) -> Path:
    """Write the target in `source`, quantised, into `out`, which must not exist.

    The folder appears whole or not at all.

    format:     the form of its products' matrices, a key of FROM_FLOATS
    group_size: weights that share a scale, for int4 alone; None: 128

    ConfigError for a source that is quantised already, whose tensors are not those of its config or
    not finite, and for shapes that the format does not take.
    """
    if format not in FROM_FLOATS:
        raise ConfigError(f"format: expected one of {', '.join(FROM_FLOATS)}, got {format!r}")
    if group_size is not None and (format != "int4" or group_size not in GROUPS):
        raise ConfigError(
            f"group_size: expected one of {', '.join(map(str, GROUPS))} with format 'int4', got "
            f"{group_size!r} with {format!r}"
        )
    checkpoint = open_plain(source)
    # Scales of 4 bits have the dtype of the weights, as llm-compressor's.
    form = form_of_floats(format, scale_dtype_of(checkpoint.config))
    if isinstance(form, Int4Form) and group_size is not None:
        form = replace(form, group_size=group_size)
    modules, wanted = product_modules(checkpoint, form)
    check_modules(modules, form, source)
    ignored = _ignored(checkpoint, modules)
    write_converted(
        checkpoint,
        out,
        compressed_tensors_config(form, ignored),
        _tensors(checkpoint, modules, wanted, form),
    )
    return out


def open_plain(source: Path) -> Checkpoint:
    """Open a checkpoint; ConfigError if it is quantised already."""
    checkpoint = open_checkpoint(source)
    if checkpoint.config.get("quantization_config"):
        raise ConfigError(f"{source}: expected plain weights, got a quantised checkpoint")
    return checkpoint


def write_converted(
    checkpoint: Checkpoint,
    out: Path,
    quantization: Mapping[str, Any] | None,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    copies: bool = True,
) -> None:
    """Write tensors with a checkpoint's other files and its config, into `out`.

    The folder appears whole or not at all. ConfigError if it exists or cannot be written.

    quantization: the quantization_config of the new config; None for plain weights
    copies:       whether the other files come too
    """
    with new_folder(out, "the weights") as folder:
        if copies:
            _copy_files(checkpoint.path, folder)
        config = dict(checkpoint.config)
        config.pop("quantization_config", None)
        if quantization is not None:
            config["quantization_config"] = quantization
        write_json(folder / "config.json", config)
        write_shards(folder, tensors)


def product_modules(checkpoint: Checkpoint, form: Form) -> tuple[dict[str, Shape], Container[str]]:
    """Return the linear modules of the layers, and the names of all tensors that a target reads.

    form: the modules of experts that it does not take are left out

    modules: by name, with their shapes [out, in]

    ConfigError unless the checkpoint has the tensors that its config says.
    """
    check_counts(checkpoint.config, len(checkpoint.tensors), str(checkpoint.path))
    cfg = models.config_from_hf(checkpoint.config)
    family = models.family(cfg)
    table: Any = family.param_specs(cfg)
    if not hasattr(cfg, "quantization"):
        raise ConfigError(
            f"{checkpoint.path}: expected a model whose products read quantised weights, got "
            f"model_type {cfg.model_type!r}"
        )
    ignore = lambda name: family.ignored_tensor(cfg, name)  # noqa: E731
    check_shapes(table, checkpoint.shapes, ignore=ignore, source=str(checkpoint.path))
    specs = jax.tree.leaves(table, is_leaf=is_spec)
    wanted = {name for spec in specs for name in spec.tensors}
    entries: list[Any] = jax.tree.leaves(
        table["layers"], is_leaf=lambda entry: isinstance(entry, Weight)
    )
    matrices = [entry.spec for entry in entries if isinstance(entry, Weight)]
    modules = {
        module: shape
        for spec in matrices
        if (experts_fit(form, spec) if is_experts(spec) else len(spec.shape) == 2)
        for module, shape in modules_of(spec).items()
    }
    return modules, wanted


def check_modules(modules: Mapping[str, Shape], form: Form, source: Path) -> None:
    """Raise ConfigError for a module that other readers of the format do not take."""
    is_int4 = isinstance(form, Int4Form)
    unit = form.group_size if is_int4 else BLOCK
    grouped = is_int4 or form.scales == "block"
    for module, (rows, columns) in modules.items():
        if is_int4:
            check_int4_shape(f"{source} {module}", columns, rows)
        if grouped and columns % unit:
            smaller = [str(g) for g in GROUPS if columns % g == 0 and is_int4]
            hint = f"; a group_size of {smaller[-1]} fits" if smaller else ""
            raise ConfigError(
                f"{source} {module}: expected columns in multiples of {unit}, got {columns}{hint}"
            )


def compressed_tensors_config(form: Form, ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config of all linear modules but those that are ignored."""
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    inputs: dict[str, Any] | None = None
    if isinstance(form, Int4Form):
        weights |= {"num_bits": 4, "type": "int", "strategy": "group"}
        weights |= {"group_size": form.group_size}
        name = "pack-quantized"
    else:
        name = "float-quantized"
        weights |= {"num_bits": 8, "type": "float", "strategy": form.scales}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
        if form.scales == "block":
            weights |= {"block_structure": [BLOCK, BLOCK]}
            inputs |= {"strategy": "group", "group_size": BLOCK}
        else:
            inputs |= {"strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None, "format": name}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _ignored(checkpoint: Checkpoint, modules: Mapping[str, Shape]) -> list[str]:
    """Return the names, or patterns, of all linear modules that stay as they are.

    Experts of one projection have one pattern, or one a layer where other layers' get codes.
    """
    names: dict[str, None] = {"lm_head": None}
    in_codes = {found["projection"] for module in modules if (found := EXPERT.match(module))}
    for tensor, shape in checkpoint.shapes.items():
        module = tensor.removesuffix(".weight")
        if module == tensor or len(shape) != 2 or module in modules:
            continue
        if found := EXPERT.match(module):
            layer, projection = map(re.escape, found.groups())
            if found["projection"] not in in_codes:
                layer = ".*"
            names[rf"re:{layer}\.experts\.\d+\.{projection}$"] = None
        elif not module.endswith("embed_tokens"):
            names[module] = None
    return list(names)


def _tensors(
    checkpoint: Checkpoint, modules: Mapping[str, Shape], wanted: Container[str], form: Form
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor of the new checkpoint; ConfigError for a weight that no model can have."""
    for name, tensor in checkpoint.tensors.items():
        array = tensor.read()
        if name in wanted:
            where = f"{checkpoint.path}: {name}"
            if array.dtype.name not in SCALE_DTYPES:
                raise ConfigError(f"{where}: expected floating-point numbers, got {array.dtype}")
            check_finite(array, where)
        module = name.removesuffix(".weight")
        if module == name or module not in modules:
            yield name, array
        else:
            yield from _module(module, array, form)


def _module(module: str, weight: np.ndarray, form: Form) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(form, Int4Form):
        scales = rounding.int4_scales(weight, form.group_size, rounding.dtype_of(form.scale_dtype))
        # float16 may be too small for them.
        files.check_scales(scales, f"{module}.weight_scale", signed=False)
        yield f"{module}.weight_packed", files.packed(rounding.int4_codes(weight, scales))
        yield f"{module}.weight_scale", scales
        yield f"{module}.weight_shape", np.array(weight.shape, np.int64)
        return
    scales = (
        rounding.fp8_block_scales(weight) if form.scales == "block" else rounding.fp8_scales(weight)
    )
    yield f"{module}.weight", rounding.fp8_codes(weight, scales)
    yield f"{module}.weight_scale", scales


def _copy_files(source: Path, out: Path) -> None:
    """Copy the tokenizer's and other files beside the weights."""
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.name not in (*OWN, MARKER) and file.is_file():
                shutil.copyfile(file, out / file.name)
