"""The header against the gguf library's reader, and damage that is named before a byte is used."""

from __future__ import annotations

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.loading.gguf_file import convert_gguf
from jaxspec.loading.gguf_header import read_header

EXTRA = {"general.u": 7, "general.f": 0.25, "general.s": "é", "general.b": True}


def test_a_whole_file_reads_as_the_gguf_library_reads_it(write_gguf):
    path = write_gguf(kv=EXTRA, tied=False)
    header, theirs = read_header(path), gguf.GGUFReader(path)
    values = {
        name: field.contents() for name, field in theirs.fields.items() if "GGUF." not in name
    }
    assert set(header.metadata.values) == set(values)
    for name, value in header.metadata.values.items():
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == values[name] and type(value) is type(values[name]), name
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.data.tobytes() == tensor.data.tobytes()


def spot(path, name):
    """The place in a file where a key or the name of a tensor ends."""
    content = path.read_bytes()
    return content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def overwrite(path, at, replacement):
    content = bytearray(path.read_bytes())
    content[at : at + len(replacement)] = replacement
    path.write_bytes(content)


NORM, QUERY = "output_norm.weight", "blk.0.attn_q.weight"  # 1 dimension, 2 dimensions
U32, U64 = "<I", "<Q"
DAMAGE = {  # name: (key or tensor, bytes after its name, what is written there, the sentence)
    "count": ("tokenizer.ggml.tokens", 8, struct.pack(U64, 1 << 62), "at most 4194304, got 46"),
    "bool": ("tokenizer.ggml.add_bos_token", 4, b"\x02", "add_bos_token as 0 or 1, got 2"),
    "kind": ("llama.block_count", 0, struct.pack(U32, 77), "llama.block_count, got 77"),
    "array": ("tokenizer.ggml.token_type", 4, struct.pack(U32, 9), "without arrays of arrays"),
    "numbers": ("tokenizer.ggml.token_type", 8, struct.pack(U64, 1 << 60), "a whole GGUF file"),
    "string": ("general.name", 4, struct.pack(U64, 1 << 63), "expected a whole GGUF file"),
    "utf8": ("general.name", 12, b"\xff\xfe", "general.name in UTF-8"),
    "float": ("llama.block_count", 0, struct.pack(U32, 6), "block_count to be an integer, got 2.8"),
    "zero": ("llama.block_count", 4, struct.pack(U32, 0), "an integer from 1 to 2147483647, got 0"),
    "layers": ("llama.block_count", 4, struct.pack(U32, 10**7), "blocks 0 to 9999999"),
    "id": ("tokenizer.ggml.bos_token_id", 4, struct.pack(U32, 270), "an id below 270, got 270"),
    "offset": (NORM, 16, struct.pack(U64, 64), "output_norm.weight at offset 18368.*got 64"),
    "type": (NORM, 12, struct.pack(U32, 26), "output_norm.weight in F32, F16, BF16, got I32"),
    "integers": (QUERY, 20, struct.pack(U32, 26), "in F32, F16, BF16 or blocks, got I32"),
    "blocks": (QUERY, 20, struct.pack(U32, 10), "in blocks of 256"),
    "unknown": (QUERY, 20, struct.pack(U32, 1234), "a tensor type that the gguf library knows"),
    "narrow": (QUERY, 20, struct.pack(U32, 2), "blk.0.attn_k.weight at offset"),
    "dims": (QUERY, 0, struct.pack(U32, 9), "expected 1 to 4 dimensions .* got 9"),
    "huge": (QUERY, 12, struct.pack(U64, 1 << 62), "expected a whole GGUF file"),
    "empty": (QUERY, 12, struct.pack(U64, 0), r"got dimensions \[64, 0\]"),
    "swapped": (QUERY, 4, struct.pack("<QQ", 128, 64), "1 misshapen: .*q_proj"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_sentence_that_names_the_place(write_gguf, tmp_path, case):
    name, after, replacement, message = DAMAGE[case]
    path = write_gguf()
    overwrite(path, spot(path, name) + after, replacement)
    with pytest.raises(ConfigError, match=message) as caught:
        convert_gguf(path, tmp_path / "out")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_two_equal_tensors_cannot_change_places(write_gguf, tmp_path):
    """Both have the right size and lie inside the file: only their order is wrong."""
    path = write_gguf()
    first, second = (spot(path, f"blk.{i}.ffn_norm.weight") + 16 for i in range(2))
    content = path.read_bytes()
    offsets = content[first : first + 8], content[second : second + 8]
    overwrite(path, first, offsets[1])
    overwrite(path, second, offsets[0])
    with pytest.raises(ConfigError, match="blk.0.ffn_norm.weight at offset"):
        read_header(path)


def test_overlapping_tensors_and_bytes_behind_the_last_are_refused(write_gguf):
    path = write_gguf()
    content = path.read_bytes()
    path.write_bytes(content + bytes(64))
    with pytest.raises(ConfigError, match=f"expected {len(content)} bytes by its header"):
        read_header(path)
    at = content.index(b"token_embd.weight") + len("token_embd.weight")
    path.write_bytes(content[: at + 12] + struct.pack(U64, 271) + content[at + 20 :])  # a row more
    with pytest.raises(ConfigError, match="output_norm.weight at offset 184"):
        read_header(path)


def test_a_wrong_element_type_costs_neither_memory_nor_time(tmp_path):
    """Strings read as bytes: the gguf library makes an array object for each of them."""
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.padding", "x" * (32 << 20))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    at = spot(path, "general.padding")
    overwrite(path, at, struct.pack("<IIQ", 9, 0, (32 << 20) - 8))  # an array of uint8
    start = time.process_time()
    tracemalloc.start()
    try:
        values = read_header(path).metadata.values
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(values["general.padding"]) == (32 << 20) - 8
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("field", [4, 8, 16], ids=["version", "tensors", "values"])
def test_absurd_counts_and_versions_are_named(write_gguf, field):
    path = write_gguf()
    overwrite(path, field, struct.pack(U32, 0x0300_0000))
    with pytest.raises(ConfigError, match="big-endian|at most 65536, got 50331648"):
        read_header(path)


def test_a_vocabulary_that_is_none_is_refused(write_gguf, tmp_path):
    for options, message in (
        ({"tokens": ["in"]}, "tokenizer.ggml.tokens to differ, got 'in' twice"),
        ({"pieces": [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", np.nan, 3)]}, "3 finite numbers"),
        ({"pieces": [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 9)]}, "types from 0 to 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert_gguf(write_gguf(**options), tmp_path / "out")


def test_a_full_disk_is_one_sentence(write_gguf, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxspec.loading.shards.save_file", full)
    with pytest.raises(ConfigError, match="expected room to write 0.0 GB .* got No space left"):
        convert_gguf(write_gguf(), tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []
