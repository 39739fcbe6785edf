"""The header of a GGUF file: metadata, and the place of each tensor, checked against the file.

The gguf library's reader believes every length and offset: damage there costs it gigabytes, or
makes it return other bytes as a weight. So the header is read here, and the library undoes the
quantisation. The format is ggml's, and the order of tensors is checked as llama.cpp's
gguf_init_from_file does.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from jaxspec.config import ConfigError
from jaxspec.loading.gguf_metadata import Metadata, Value

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Far above any model's; they bound the memory that a damaged count can ask for.
MOST_ENTRIES, MOST_STRINGS, MOST_DIMS = 1 << 16, 1 << 22, 4
SCALARS: dict[GGUFValueType, str] = {  # numpy's names; the bytes of a GGUF are little-endian
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "<u1",
}
FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# Types that llama.cpp has for other purposes than weights.
NO_WEIGHTS = (
    GGMLQuantizationType.I8,
    GGMLQuantizationType.I16,
    GGMLQuantizationType.I32,
    GGMLQuantizationType.I64,
    GGMLQuantizationType.F64,
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a GGUF file.

    shape: as numpy counts, rows first.
    type:  how its numbers are stored.
    data:  uint8 [..., bytes of a row], a view of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file, and its tensors as views.

    source: the file, for messages.
    """

    metadata: Metadata
    tensors: Mapping[str, StoredTensor]
    source: str


@dataclass(frozen=True)
class _Place:
    """An entry of the header for one tensor; offset counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        numbers, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // numbers * size

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


def read_header(path: Path) -> GGUFHeader:
    """Read a file's header and map its tensors; ConfigError says what is damaged."""
    source = str(path)
    try:
        with path.open("rb") as f:
            size = f.seek(0, 2)
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as e:
        raise ConfigError(f"{source}: expected a GGUF file, got {e.strerror or e}") from e
    cursor = _Cursor(data, source)
    if cursor.bytes(4, "its magic") != MAGIC:
        raise ConfigError(f"{source}: expected a whole GGUF file, got one without GGUF's magic")
    version = int(cursor.scalar("<u4", "its version"))
    if version not in VERSIONS:
        kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise ConfigError(f"{source}: expected a little-endian GGUF of version 2 or 3, got {kind}")
    num_tensors = cursor.count("the number of tensors", MOST_ENTRIES)
    num_values = cursor.count("the number of values", MOST_ENTRIES)
    values: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.text("the key of a value")
        if key in values:
            raise ConfigError(f"{source}: expected one value of {key}, got a second one")
        values[key] = cursor.value(key)
    metadata = Metadata(values, source)
    places = [_read_place(cursor) for _ in range(num_tensors)]
    return GGUFHeader(metadata, _map_tensors(cursor, places, _alignment(metadata)), source)


def _alignment(metadata: Metadata) -> int:
    alignment = metadata.count("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise metadata.wrong("general.alignment", "a power of two")
    return alignment


def _read_place(cursor: _Cursor) -> _Place:
    name = cursor.text("the name of a tensor")
    num_dims = int(cursor.scalar("<u4", f"the dimensions of {name}"))
    if not 1 <= num_dims <= MOST_DIMS:
        raise ConfigError(
            f"{cursor.source}: expected 1 to {MOST_DIMS} dimensions of {name}, got {num_dims}"
        )
    dims = [int(cursor.scalar("<u8", f"the dimensions of {name}")) for _ in range(num_dims)]
    number = int(cursor.scalar("<u4", f"the type of {name}"))
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ConfigError(
            f"{cursor.source}: expected a tensor type that the gguf library knows, "
            f"got {number} for {name}"
        ) from None
    offset = int(cursor.scalar("<u8", f"the offset of {name}"))
    if kind in NO_WEIGHTS or (len(dims) == 1 and kind not in FLOATS):
        wanted = ", ".join(t.name for t in FLOATS) + (" or blocks" if len(dims) > 1 else "")
        raise ConfigError(f"{cursor.source}: expected {name} in {wanted}, got {kind.name}")
    if min(dims) < 1 or dims[0] % GGML_QUANT_SIZES[kind][0]:
        raise ConfigError(
            f"{cursor.source}: expected rows of {name} in blocks of {GGML_QUANT_SIZES[kind][0]} "
            f"({kind.name}), got dimensions {dims}"
        )
    return _Place(name, tuple(reversed(dims)), kind, offset)


def _map_tensors(cursor: _Cursor, places: list[_Place], alignment: int) -> dict[str, StoredTensor]:
    """Return the tensors, which lie one after the other, each at a multiple of the alignment.

    llama.cpp refuses any other order too, so an offset that is wrong cannot be believed.
    """
    begin = _aligned(cursor.at, alignment)
    end = expected = 0
    tensors: dict[str, StoredTensor] = {}
    for place in places:
        if place.offset != expected:
            raise ConfigError(
                f"{cursor.source}: expected {place.name} at offset {expected}, after the tensor "
                f"before it, got {place.offset}"
            )
        end = place.offset + place.num_bytes
        expected = _aligned(end, alignment)
        if begin + end > cursor.size:
            raise ConfigError(
                f"{cursor.source}: expected a whole GGUF file, got {cursor.size} bytes, "
                f"where {place.name} ends at {begin + end}"
            )
        if place.name in tensors:
            raise ConfigError(
                f"{cursor.source}: expected one tensor {place.name}, got a second one"
            )
        raw = np.frombuffer(cursor.data, np.uint8, place.num_bytes, begin + place.offset)
        raw = raw.reshape(*place.shape[:-1], place.row_bytes)
        tensors[place.name] = StoredTensor(place.name, place.shape, place.type, raw)
    if cursor.size > begin + expected:
        raise ConfigError(
            f"{cursor.source}: expected {begin + expected} bytes by its header, got {cursor.size}"
        )
    return tensors


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class _Cursor:
    """A place in the header; each read moves it, and stays inside the file."""

    def __init__(self, data: mmap.mmap | bytes, source: str) -> None:
        self.data, self.source = data, source
        self.at, self.size = 0, len(data)

    def bytes(self, count: int, what: str) -> bytes:
        begin = self._move(count, what)
        return self.data[begin : self.at]

    def scalar(self, dtype: str, what: str) -> np.generic:
        begin = self._move(np.dtype(dtype).itemsize, what)
        return np.frombuffer(self.data, dtype, 1, begin)[0]

    def count(self, what: str, most: int) -> int:
        value = int(self.scalar("<u8", what))
        if value > most:
            raise ConfigError(f"{self.source}: expected {what} to be at most {most}, got {value}")
        return value

    def text(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self.bytes(8, f"the length of {what}"))
        raw = self.bytes(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise ConfigError(f"{self.source}: expected {what} in UTF-8, got {e}") from None

    def value(self, key: str) -> Value:
        kind = self._type(key)
        if kind == GGUFValueType.STRING:
            return self.text(key)
        if kind != GGUFValueType.ARRAY:
            return self._checked(kind, self._numbers(kind, 1, key), key)[0].item()
        element = self._type(f"the elements of {key}")
        if element == GGUFValueType.STRING:
            count = self.count(f"the number of {key}", MOST_STRINGS)
            return [self.text(key) for _ in range(count)]
        if element == GGUFValueType.ARRAY:
            raise ConfigError(f"{self.source}: expected {key} without arrays of arrays, got one")
        count = int(self.scalar("<u8", f"the number of {key}"))
        return self._checked(element, self._numbers(element, count, key), key)

    def _type(self, what: str) -> GGUFValueType:
        number = int(self.scalar("<u4", f"the type of {what}"))
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ConfigError(
                f"{self.source}: expected one of GGUF's value types for {what}, got {number}"
            ) from None

    def _numbers(self, kind: GGUFValueType, count: int, what: str) -> np.ndarray:
        dtype = np.dtype(SCALARS[kind])
        begin = self._move(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, begin)

    def _checked(self, kind: GGUFValueType, numbers: np.ndarray, key: str) -> np.ndarray:
        if kind != GGUFValueType.BOOL:
            return numbers
        if numbers.size and numbers.max() > 1:
            raise ConfigError(f"{self.source}: expected {key} as 0 or 1, got {numbers.max()}")
        return numbers.astype(np.bool_)

    def _move(self, count: int, what: str) -> int:
        begin, self.at = self.at, self.at + count
        if self.at > self.size:
            raise ConfigError(
                f"{self.source}: expected a whole GGUF file, got {self.size} bytes, "
                f"where {what} ends at {self.at}"
            )
        return begin
