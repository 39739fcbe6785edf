"""Load the target in a folder on one device and on two, and compare the arrays' pieces."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.loading.model import load_target
from jaxspec.parallel.mesh import DeviceMesh

folder, devices = Path(sys.argv[1]), jax.devices()
assert len(devices) == 2
cfg, whole = load_target(folder, jnp.float32)
_, cut = load_target(folder, jnp.float32, DeviceMesh(tuple(devices)))

heads, kv_heads = (
    n * cfg.attention.head_dim for n in (cfg.attention.num_heads, cfg.attention.num_kv_heads)
)
for layer, pieces in zip(whole["layers"], cut["layers"], strict=True):
    qkv = np.asarray(layer["self_attn"]["qkv_proj"].values)
    parts = [np.split(part, 2, axis=1) for part in np.split(qkv, [heads, heads + kv_heads], axis=1)]
    for i, shard in enumerate(pieces["self_attn"]["qkv_proj"].values.addressable_shards):
        own = np.concatenate([part[i] for part in parts], axis=1)
        np.testing.assert_array_equal(shard.data, own)
    for name, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 0)):
        expected = np.split(np.asarray(layer[name].values), 2, axis=axis)
        for i, shard in enumerate(pieces[name].values.addressable_shards):
            np.testing.assert_array_equal(shard.data, expected[i])
    for shard in pieces["input_layernorm"].addressable_shards:
        np.testing.assert_array_equal(shard.data, layer["input_layernorm"])
for i, shard in enumerate(cut["embed_tokens"].addressable_shards):
    np.testing.assert_array_equal(shard.data, np.split(np.asarray(whole["embed_tokens"]), 2)[i])
print("equal")
