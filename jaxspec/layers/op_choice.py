"""The choice of each op's implementation.

It is made once, when an engine is built or a training step is traced, from the device, the dtypes
and the models' shapes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.config import (
    AttentionConfig,
    CompressedAttentionConfig,
    ConfigError,
    DraftConfig,
    MLAConfig,
    Ops,
    TargetConfig,
)
from jaxspec.config.quantization import Fp8Form, Quantization
from jaxspec.layers.moe import moe_of
from jaxspec.layers.params import Params
from jaxspec.parallel.gpus import gpu_names
from jaxspec.parallel.layout import bytes_on_device
from jaxspec.parallel.mesh import Device
from pallas_kernels import (
    all_reduce,
    attention,
    gumbel_sample,
    hopper,
    latent_attention,
    latent_cache,
    matmul,
    moe,
    rejection_sampling,
    rms_norm,
    rope_cache,
    step_metadata,
)
from pallas_kernels.int4_matmul import Int4Weight
from pallas_kernels.peers import mailbox

logger = logging.getLogger(__name__)

CHOICES = ("auto", "reference", "mosaic_gpu")
FEW_ROWS = 8
IN_ORDER_BELOW_BYTES = 1 << 30  # see docs/notes/prefill-products.md


def parse(text: str, *, flag: str = "kernels") -> dict[str, str]:
    """Return the requested implementation name of every op.

    text: one name for all ops, or "attention=reference,matmul=mosaic_gpu" (auto for the others).
    Later parts win.
    """
    ops = list(Ops().names())
    named = dict.fromkeys(ops, "auto")
    for part in text.split(","):
        op, equals, name = part.strip().rpartition("=")
        if (equals and op not in ops) or not name:
            raise ConfigError(
                f"{flag}: expected auto, a name, or op=name with op among {', '.join(ops)}, "
                f"got {part!r}"
            )
        named |= dict.fromkeys([op] if equals else ops, name)
    return named


def choose(
    requested: str,
    target: TargetConfig,
    draft: DraftConfig | None,
    *,
    block_size: int,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    draft_cache_dtype: DTypeLike | None = None,
    devices: Sequence[Device] = (),
) -> Ops:
    """Return the Ops of an engine.

    requested, for all ops or for single ones, as parse reads it:
    "reference": plain jnp.
    "mosaic_gpu": the kernel; ConfigError with the reason if it does not support this case.
    "auto": the kernel if it supports this device, these dtypes and models, else the reference. The
    reason is logged: as a WARNING with the remedy where a GPU is present.

    target, draft: as one device sees them (Layout.on_device)
    dtype, cache_dtype: of the weights and activations, and of keys and values in the cache
    draft_cache_dtype: of the draft's keys and values; None: cache_dtype
    devices: those that share the models; none for one
    """
    wanted = parse(requested)
    if unknown := [name for name in wanted.values() if name not in CHOICES]:
        raise ConfigError(f"kernels: expected one of {', '.join(CHOICES)}, got {unknown[0]!r}")
    backend = jax.default_backend()
    plain = Ops(
        rows_alike=backend == "cpu" and _rounds_to_fp8(target, cache_dtype),
        full_float32=backend == "gpu" and jnp.dtype(dtype) == jnp.float32,
    )
    if set(wanted.values()) == {"reference"}:
        return plain
    chosen, missed = {}, {}
    dtypes = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    cache_dtypes = dtypes[1], jnp.dtype(draft_cache_dtype or cache_dtype)
    for op, reason in _reasons(target, draft, block_size, dtypes[0], cache_dtypes, devices).items():
        if reason is not None and wanted[op] == "mosaic_gpu":
            raise ConfigError(f"kernels 'mosaic_gpu': {op}: {reason}")
        if reason is not None and wanted[op] == "auto":
            logger.info("%s: reference (the kernel %s)", op, reason)
            missed.setdefault(reason, []).append(op)
        chosen[op] = "mosaic_gpu" if reason is None and wanted[op] != "reference" else "reference"
    if missed:
        _warn_on_a_gpu(missed, *dtypes)
    if set(chosen.values()) == {"reference"}:
        return plain
    return Ops(full_float32=plain.full_float32, **chosen)


def for_whole_sequences(target: TargetConfig, rows: int, dtype: DTypeLike) -> Ops:
    """Return the Ops of a pass over sequences of so many rows, with a block for each (training).

    The reference of attention stores the scores of each row with every other one, so the kernel
    runs where it can. The other kernels are made for the few rows of a round.
    """
    cfg, of = target.attention, jnp.dtype(dtype)
    if not isinstance(cfg, AttentionConfig) or _attention(cfg, rows, of, of):
        return Ops()
    return Ops(attention="mosaic_gpu")


def with_prefill_order(ops: Ops, wanted: bool | None, target: Params) -> Ops:
    """Return ops that sum the products of prompts in one order for all sizes of prefill calls.

    wanted: EngineConfig.prefill_in_order
    target: its weights. None means small targets, whose texts then depend on no neighbour, and
            those with products in int4: only narrow products of few prompts take longer in order
    """
    if ops.matmul == "reference":
        if wanted and jax.default_backend() == "gpu":
            logger.warning(
                "prefill_in_order: expected the kernel of matmul, got plain JAX, whose products "
                "have an order for each size of a prefill call"
            )
        return ops
    if wanted is None:
        wanted = bytes_on_device(target) < IN_ORDER_BELOW_BYTES or _multiplies_int4(target)
    return replace(ops, prefill_in_order=wanted)


def _multiplies_int4(target: Params) -> bool:
    """Return whether layers have int4 outside of their experts, which have kernels of their own."""

    def is_int4(leaf: object) -> bool:
        return isinstance(leaf, Int4Weight)

    layers: Any = target.get("layers", ())
    products = [{name: layer[name] for name in layer if name != "experts"} for layer in layers]
    return any(map(is_int4, jax.tree.leaves(products, is_leaf=is_int4)))


def _rounds_to_fp8(target: TargetConfig, cache_dtype: DTypeLike) -> bool:
    """Return whether the target's activations, or its keys and values, are rounded to fp8."""
    quantization: Quantization | None = getattr(target, "quantization", None)
    forms = () if quantization is None else quantization.forms
    return jnp.dtype(cache_dtype).itemsize == 1 or any(isinstance(f, Fp8Form) for f in forms)


def _warn_on_a_gpu(
    missed: Mapping[str, Sequence[str]], dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> None:
    """Log a WARNING for kernels that are not used although this machine has a GPU.

    missed: ops by the reason. A caller who chose JAX_PLATFORMS=cpu gets none.
    """
    if jax.default_backend() != "gpu":
        names = [] if os.environ.get("JAX_PLATFORMS") else gpu_names()
        if names:
            logger.warning(
                "%s is present, but jax computes on %s, without kernels: "
                "install jaxspec[cuda] (or jaxspec[cuda12] for a driver older than 580)",
                names[0],
                jax.default_backend(),
            )
        return
    for reason, ops in missed.items():
        logger.warning(
            "no kernel for %s: %s; %s", ", ".join(ops), reason, _remedy(dtype, cache_dtype)
        )


def _remedy(dtype: jnp.dtype, cache_dtype: jnp.dtype) -> str:
    """Return what a user can do about a kernel that is not used."""
    if hopper.too_old() is not None:
        return "use Python 3.12 or later with jax 0.11 or later"
    if hopper.missing() is not None:
        return "kernels run on Hopper GPUs (H100, H200); plain JAX runs on this one"
    if dtype != jnp.bfloat16:
        return "dtype='bfloat16' has kernels"
    if cache_dtype != jnp.bfloat16:
        return "kv_cache_dtype='bfloat16' has kernels"
    return "plain JAX runs this part of the model"


def _reasons(
    target: TargetConfig,
    draft: DraftConfig | None,
    block_size: int,
    dtype: jnp.dtype,
    cache_dtypes: tuple[jnp.dtype, jnp.dtype],
    devices: Sequence[Device],
) -> dict[str, str | None]:
    """Return for each op the reason that its kernel cannot serve these models, None if it can.

    cache_dtypes: of the target's keys and values, and of the draft's
    """
    device = hopper.missing()
    # A draft without layers runs no op but rejection sampling. An independent draft is a model.
    layered: Any = draft if hasattr(draft, "hidden_size") else None
    models: list[Any] = [target]
    if layered is not None:
        models.append(getattr(layered, "model", layered))
    cached: list[tuple[AttentionConfig | MLAConfig, jnp.dtype]] = [
        (m.attention, of) for m, of in zip(models, cache_dtypes, strict=False)
    ]

    compressed = (
        "has no attention over compressed entries"
        if any(isinstance(a, CompressedAttentionConfig) for a, _ in cached)
        else None
    )

    pieces = max(1, len(devices))  # of the vocabulary

    def first(reasons: Any) -> str | None:
        return device or next((r for r in reasons if r), None)

    return {
        "attention": compressed or first(_attention(a, block_size, dtype, of) for a, of in cached),
        "rms_norm": first(rms_norm.unsupported(m.hidden_size, dtype) for m in models),
        "rope_cache": compressed or first(_rope_cache(a, dtype, of) for a, of in cached),
        "step_metadata": first(_step_metadata(m) for m in models),
        "matmul": first(
            matmul.unsupported(
                matmul.Product(
                    jax.ShapeDtypeStruct((FEW_ROWS, depth), dtype),
                    (jax.ShapeDtypeStruct((depth, width), dtype),),
                )
            )
            for m in models
            for depth, width in (
                (m.hidden_size, m.intermediate_size),
                (m.intermediate_size, m.hidden_size),
            )
        ),
        "rejection_sampling": first([_rejection_sampling(target, layered, pieces)]),
        "gumbel_sample": first(
            gumbel_sample.unsupported(vocab) for vocab in _vocabularies(target, layered, pieces)
        ),
        "moe": first(_moe(m, dtype) for m in models),
        "all_reduce": first(_all_reduce(devices, m.hidden_size) for m in models),
    }


def _attention(
    cfg: AttentionConfig | MLAConfig, block_size: int, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> str | None:
    """Return why the kernel cannot attend over latents, or over keys and values; None if it can.

    pallas_kernels.latent_attention serves latents.
    """
    common: dict[str, Any] = {
        "block_size": block_size,
        "q_dtype": dtype,
        "cache_dtype": cache_dtype,
    }
    if isinstance(cfg, MLAConfig):
        latents = latent_attention.Latents(
            query_rows=FEW_ROWS * cfg.num_heads,
            kv_lora_rank=cfg.kv_lora_rank,
            rope_head_dim=cfg.rope_head_dim,
            **common,
        )
        return latent_attention.unsupported(latents)
    heads = attention.Heads(
        rows=FEW_ROWS,
        num_heads=cfg.num_heads,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        **common,
    )
    return attention.unsupported(heads)


def _rope_cache(
    cfg: AttentionConfig | MLAConfig, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> str | None:
    """Return why the kernel cannot write latents, or keys and values by head; None if it can.

    pallas_kernels.latent_cache norms and writes latents.
    """
    if isinstance(cfg, MLAConfig):
        return latent_cache.unsupported(
            cfg.q_lora_rank or 0, cfg.kv_lora_rank, cfg.rope_head_dim, dtype, cache_dtype
        )
    return rope_cache.unsupported(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, dtype, cache_dtype)


def _step_metadata(model: Any) -> str | None:
    """Return why the kernel cannot make a model's metadata, None if it can.

    Models of latents do not use it.
    """
    cfg = model.attention
    if not isinstance(cfg, AttentionConfig):
        return None
    return step_metadata.unsupported(1, cfg.num_heads // cfg.num_kv_heads, cfg.rope_dim)


def _moe(model: Any, dtype: DTypeLike) -> str | None:
    cfg = moe_of(model)
    if cfg is None:
        return None
    depth = model.hidden_size
    # Packed experts have the limits of plain ones.
    gate_up = jax.ShapeDtypeStruct((cfg.num_experts, depth, 2 * cfg.intermediate_size), dtype)
    down = jax.ShapeDtypeStruct((cfg.num_experts, cfg.intermediate_size, depth), dtype)
    return moe.unsupported(FEW_ROWS, cfg.top_k, gate_up, down, dtype)


def _all_reduce(devices: Sequence[Device], width: int) -> str | None:
    if len(devices) < 2:
        return None  # it does not run
    return mailbox.unreachable(devices) or all_reduce.unsupported(
        FEW_ROWS, width, jnp.float32, len(devices)
    )


def _rejection_sampling(target: Any, draft: Any, pieces: int) -> str | None:
    logits: Any = jax.ShapeDtypeStruct((1, 2, target.vocab_size // pieces), jnp.float32)
    draft_logits: Any = None
    if draft is not None:
        size = draft.draft_vocab_size // pieces
        draft_logits = jax.ShapeDtypeStruct((1, 1, size), jnp.float32)
    return rejection_sampling.unsupported(logits, draft_logits)


def _vocabularies(target: Any, draft: Any, pieces: int) -> tuple[int, ...]:
    models = (target.vocab_size,) if draft is None else (target.vocab_size, draft.draft_vocab_size)
    return tuple(vocab // pieces for vocab in models)
