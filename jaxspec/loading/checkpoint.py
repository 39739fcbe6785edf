"""An opened Hugging Face checkpoint folder: config.json and tensors that are read one at a time."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.config import ConfigError, is_int, shown
from jaxspec.loading.fp8 import ScaledTensor
from jaxspec.loading.quantized_tensors import Ones, Reshaped

SAFE_TORCH = (2, 6)  # before, torch.load could run code with weights_only too
MODELOPT = "hf_quant_config.json"
SINGLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
# Importing ml_dtypes adds bfloat16 to numpy, and so to safetensors.
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "BOOL": np.bool_,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class SafetensorsTensor:
    """One tensor of a safetensors file; nothing of it is in memory until ``read``.

    begin: of its bytes in the file
    """

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int

    def read(self) -> np.ndarray:
        # safe_open would parse the file's header again, for each tensor.
        size = math.prod(self.shape) * self.dtype.itemsize
        read = np.fromfile(self.file, np.uint8, size, offset=self.begin)
        if read.size != size:
            raise ConfigError(
                f"{self.file}: expected {size} bytes of a tensor at {self.begin}, got {read.size}"
            )
        return read.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class PickledTensor:
    """One torch tensor of a pickle, mapped from the file where its format allows."""

    tensor: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(str(self.tensor.dtype).removeprefix("torch."))

    def read(self) -> np.ndarray:
        t = self.tensor.detach()
        # torch cannot hand these to numpy: view the bits
        bits = {"bfloat16": "int16", "float8_e4m3fn": "uint8"}.get(self.dtype.name)
        if bits is not None:
            return t.view(getattr(_import_torch(""), bits)).numpy().view(self.dtype)
        return t.numpy()


LazyTensor = SafetensorsTensor | PickledTensor | ScaledTensor | Reshaped | Ones


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder.

    path: the folder.
    config: config.json as it is.
    tensors: name -> tensor with ``shape`` and ``read()``.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, LazyTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a folder of safetensors (one file or shards) or EAGLE-1's pickle, as it is stored.

    ConfigError names a file that is missing or wrong.
    """
    folder = Path(folder)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise ConfigError(f"{folder}: expected a checkpoint folder, got {got}")
    config = read_model_config(folder)
    for name in (SINGLE, INDEX, PICKLE):  # the first one is read
        if (folder / name).is_file():
            break
        if os.path.lexists(folder / name):
            exists = (folder / name).exists()
            got = "something else" if exists else "a link that leads nowhere"
            raise ConfigError(f"{folder / name}: expected a file, got {got}")
    if (folder / SINGLE).is_file():
        tensors: Mapping[str, LazyTensor] = _open_safetensors(folder / SINGLE)
    elif (folder / INDEX).is_file():
        tensors = _open_shards(folder / INDEX)
    elif (folder / PICKLE).is_file():
        tensors = _open_pickle(folder / PICKLE)
    else:
        found = sorted(p.name for p in folder.iterdir())[:8]
        raise ConfigError(f"{folder}: expected {SINGLE}, {INDEX} or {PICKLE}, got {found}")
    return Checkpoint(folder, config, tensors)


def read_model_config(path: Path) -> dict[str, Any]:
    """Return a folder's config.json, with the quantisation that ModelOpt writes beside it.

    Until 2024 compressed-tensors wrote quantization_config as compression_config.

    path: the folder, or the file itself, whatever its name
    """
    file = path if path.is_file() else path / "config.json"
    config = read_json(file)
    if config.get("compression_config") and not config.get("quantization_config"):
        config["quantization_config"] = config.pop("compression_config")
    beside = file.with_name(MODELOPT)
    if config.get("quantization_config") or not beside.is_file():
        return config
    quantization = read_json(beside).get("quantization")
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"{beside}: expected an object 'quantization', got {shown(quantization)}")
    return config | {"quantization_config": {"quant_method": "modelopt", **quantization}}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; ConfigError if it holds none."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            got = "a folder" if path.is_dir() else "something else"
            raise ConfigError(f"{path}: expected a JSON file, got {got}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: expected a JSON file, got {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: expected valid JSON, got {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    begins = _begins(path)
    try:
        with safe_open(path, framework="numpy") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
            infos = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{path}: expected a safetensors file, got {e}") from e
    unknown = {name: dtype for name, (_, dtype) in infos.items() if dtype not in DTYPES}
    if unknown:
        name, dtype = next(iter(unknown.items()))
        raise ConfigError(
            f"{path}: expected tensors of {', '.join(DTYPES)}, got {dtype} for {name}"
        )
    return {
        name: SafetensorsTensor(path, shape, np.dtype(DTYPES[dtype]), begins[name])
        for name, (shape, dtype) in infos.items()
    }


def _begins(path: Path) -> dict[str, int]:
    """Return where each tensor's bytes begin in the file.

    ConfigError unless the file's size is that of its header: a truncated download differs from
    other damage.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise ConfigError(
                f"{path}: expected a safetensors file with a whole header, "
                f"got {size} bytes (truncated or not safetensors)"
            )
        try:
            header = json.loads(f.read(length))
            offsets = {
                name: (info["data_offsets"][0], info["data_offsets"][1])
                for name, info in header.items()
                if name != "__metadata__"
            }
            for both in offsets.values():
                if wrong := [offset for offset in both if not is_int(offset)]:
                    raise TypeError(f"a data offset of {shown(wrong[0])}")
            last = max((end for _, end in offsets.values()), default=0)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as e:
            raise ConfigError(
                f"{path}: expected a safetensors header, got {type(e).__name__}: {e}"
            ) from e
    if 8 + length + last != size:
        raise ConfigError(
            f"{path}: expected {8 + length + last} bytes by its header, "
            f"got {size} (truncated or damaged)"
        )
    return {name: 8 + length + begin for name, (begin, _) in offsets.items()}


def _open_shards(index: Path) -> dict[str, LazyTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"{index}: expected an object 'weight_map' of tensor to file, got {weight_map!r}"
        )
    tensors: dict[str, LazyTensor] = {}
    # Compared with names that there are: a name of the index may be no path at all.
    beside = {file.name for file in index.parent.iterdir() if file.is_file()}
    for shard in sorted({str(s) for s in weight_map.values()}):
        path = index.parent / shard
        if shard not in beside:
            raise ConfigError(
                f"{index}: expected the shard {shard:.200} beside it, got no such file"
            )
        held = _open_safetensors(path)
        listed = {name for name, file in weight_map.items() if file == shard}
        if set(held) != listed:
            differ = sorted(listed ^ set(held))
            raise ConfigError(
                f"{path}: expected the {len(listed)} tensors that {INDEX} lists, "
                f"got {len(held)} (differing: {differ[:5]})"
            )
        tensors |= held
    return tensors


def _import_torch(path: Path | str) -> ModuleType:
    try:
        import torch

        version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
        if version < SAFE_TORCH:
            raise ConfigError(
                f"{path}: expected torch {SAFE_TORCH[0]}.{SAFE_TORCH[1]} or newer to read a "
                "pickle, whose weights_only lets no code run (CVE-2025-32434), "
                f"got {torch.__version__}"
            )
    except ImportError as e:
        raise ConfigError(
            f"{path}: expected safetensors, got a pickle, which is read only with torch installed; "
            "where torch is, convert it with safetensors.torch.save_file("
            "torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
        ) from e
    return torch


def _open_pickle(path: Path) -> dict[str, LazyTensor]:
    """Open a pickle of tensors.

    A pickle can run code when it is loaded; weights_only admits tensors and plain containers only.
    """
    torch = _import_torch(path)
    try:
        state = torch.load(
            path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path)
        )
    except Exception as e:  # a hostile or damaged pickle may raise anything
        reason = str(e).splitlines()[0] if str(e) else ""
        raise ConfigError(
            f"{path}: expected a pickle of tensors only, got {type(e).__name__}: {reason}"
        ) from e
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ConfigError(
            f"{path}: expected a dictionary of tensors, "
            f"got {type(state).__name__} with other values"
        )
    names = [np.dtype(dtype).name for dtype in DTYPES.values()]
    for name, tensor in state.items():
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        if str(kind).removeprefix("torch.") not in names:
            raise ConfigError(
                f"{path}: expected tensors of {', '.join(names)}, got {kind} for {name}"
            )
    return {name: PickledTensor(tensor, tuple(tensor.shape)) for name, tensor in state.items()}
