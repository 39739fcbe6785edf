"""Load quantised checkpoints onto two devices: the pieces are those of the whole arrays, and
speculative text is plain text but for ties. Keys in fp8 have a scale for each head. MXFP4 experts
stay packed, whole or in pieces, and give the text of one device.

    python -m tests.parallel.quantized_on_devices PART FOLDER...

PART: "usual" has each form's pieces, and a text of each kind of product: of fp8 with speculation,
of int4 and MXFP4 beside one device's. "rest" has the other texts, and fp8-block without experts,
whose other products are that form's too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, EngineConfig, RequestOutput, SamplingParams
from jaxspec.loading.model import load_target
from jaxspec.loading.placement import choose_placement, place_models

jax.config.update("jax_default_matmul_precision", "highest")

PLACEMENTS = [
    choose_placement(EngineConfig(tensor_parallel_size=2, enable_expert_parallel=whole))
    for whole in (False, True)
]
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
PROMPTS = [[3, 5, 7, 3, 5], [90, 4, 4]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def texts(folder: Path, size: int, drafts: Any = None, **config: Any) -> list[RequestOutput]:
    return engine(folder, size, drafts, **config).generate(PROMPTS, params)


def engine(folder: Path, size: int, drafts: Any, **config: Any) -> LLM:
    return LLM(
        str(folder),
        speculative_config=drafts,
        dtype="float32",
        max_model_len=32,
        max_num_seqs=2,
        tensor_parallel_size=size,
        num_gpu_blocks_override=4,
        kv_cache_dtype="fp8" if folder.name == "fp8" else "auto",
        **config,
    )


def check_packed(folder: Path) -> None:
    """Compare packed experts on one device with whole ones and with pieces on two."""
    expected = [o.token_ids for o in texts(folder, 1)]
    for whole in (True, False):
        many = engine(folder, 2, NGRAM | {"adaptive": True}, enable_expert_parallel=whole)
        (units,) = jax.tree.leaves(many.params["target"]["layers"][0]["experts"]["down"])
        # [experts, out / 16, in / 32, 68]; zeros make the pieces of 32 as deep as 64
        shape = (4, 4, 2, 68) if whole else (8, 4, 2, 68)
        assert units.dtype == jnp.int32 and {p.data.shape for p in units.addressable_shards} == {
            shape
        }
        assert [o.token_ids for o in many.generate(PROMPTS, params)] == expected


def check_pieces(folder: Path) -> None:
    """Compare the pieces that are read with those of whole arrays."""
    cfg, whole = load_target(folder, jnp.float32)
    experts = "experts" in folder.name
    for placement in PLACEMENTS if experts else PLACEMENTS[:1]:
        _, read = load_target(folder, jnp.float32, placement)
        placed, _ = place_models(placement, (cfg, whole), None)
        for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(placed), strict=True):
            assert one.sharding == other.sharding
            for piece, same in zip(one.addressable_shards, other.addressable_shards, strict=True):
                np.testing.assert_array_equal(piece.data, same.data)
        cut = [a for a in jax.tree.leaves(read["layers"]) if not a.sharding.is_fully_replicated]
        # Codes of qkv, o, gate, up, down; codes and scales of qkv, o, gate_up, down.
        assert len(cut) >= (8 if experts else 5) * cfg.num_layers
        if experts:  # a device has half of each expert, or half of the experts
            shape = (2, 512, 128) if placement.expert_parallel else (4, 256, 128)
            codes = read["layers"][0]["experts"]["gate_up"].codes
            assert {piece.data.shape for piece in codes.addressable_shards} == {shape}
        if folder.name == "fp8":
            (scale,) = {layer["self_attn"]["k_scale"].shape for layer in read["layers"]}
            pieces = read["layers"][0]["self_attn"]["k_scale"].addressable_shards
            assert scale == (2,) and [piece.data.tolist() for piece in pieces] == [[0.25], [0.5]]


part, *names = sys.argv[1:]
usual = part == "usual"
for folder in map(Path, names):
    form = folder.name
    if form == "mxfp4":
        if usual:
            check_packed(folder)
        continue
    if usual == (form != "fp8-block"):
        check_pieces(folder)
    if (form == "fp8") == usual:
        plain, drafted = texts(folder, 2), texts(folder, 2, NGRAM)
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    if usual and form == "int4":  # activations are plain: one device has other last bits alone
        one, two = (texts(folder, size) for size in (1, 2))
        assert [o.token_ids for o in one] == [o.token_ids for o in two]
print("equal")
