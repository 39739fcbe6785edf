"""Plan the memory of a target and a draft on a GPU, from their config.json alone.

The tables list weights, keys and values and draft buffers; the last line says what fits.

jaxspec plan --target openai/gpt-oss-20b --gpu h200
jaxspec plan --target ~/models/glm-4.7-flash --method mtp --max-model-len 32768
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxspec import models
from jaxspec.cache.arrays import own_cache_dtype
from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.config.quantization import with_form
from jaxspec.drafts import (
    MODEL_FREE,
    DraftModelConfig,
    canonical_shapes,
    check_method,
    family_of_checkpoint,
)
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.default_target import NAME, is_default_target
from jaxspec.loading.model import expert_storage, has_experts, with_expert_storage
from jaxspec.loading.pair import with_draft_quantize, with_k
from jaxspec.loading.resolve import as_path, own_drafts, read_config
from jaxspec.tools.cli import command, option
from jaxspec.tools.flags import Flag, Given, flags_of, given_of
from jaxspec.tools.known_models import known_config
from jaxspec.tools.memory_plan import GIB, GPUS, MemoryPlan, memory_plan, planned_placement

HOST_SIZES = (1, 2, 4, 8)  # GPUs of one host


def main(
    speculative: Annotated[
        SpeculativeConfig,
        flags_of(
            SpeculativeConfig,
            "method",
            "num_speculative_tokens",
            "draft_quantize",
            "draft_kv_cache_dtype",
            model=Flag(
                help="The same, or a name under checkpoints/; with --method mtp the target's own.",
                names=("--draft",),
            ),
        ),
    ],
    engine: Annotated[
        Given,
        given_of(
            EngineConfig,
            "block_size",
            "kv_cache_dtype",
            "quantize",
            "tensor_parallel_size",
            "enable_expert_parallel",
            max_model_len=Flag(
                help="Tokens a request may hold. "
                "[default: 8192, or the target's limit if that is less]"
            ),
            max_num_seqs=Flag(16),
            gpu_memory_utilization=Flag(0.9, names=("--utilization",)),
        ),
    ],
    target: Annotated[str, option("Folder, config.json or hub id; no weights are read.")],
    gpu: Annotated[str, option(f"One of {', '.join(GPUS)}, or its memory in GB.")] = "h200",
    dtype: Annotated[str, option("bfloat16 or float32.")] = "bfloat16",
    dequantised: Annotated[bool, option("Dequantise MXFP4 experts.")] = False,
) -> None:
    """Print the memory that a target and a draft take."""
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype: expected bfloat16 or float32, got {dtype!r}")
    own = config_of(target)
    target_cfg: Any = models.config_from_hf(own)
    limit = target_cfg.max_position_embeddings
    config = EngineConfig(**{"max_model_len": min(8192, limit), **engine})
    if config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len: expected at most the target's max_position_embeddings {limit}, "
            f"got {config.max_model_len}"
        )
    target_cfg = with_form(target_cfg, config.quantize, own)
    kv_cache_dtype = own_cache_dtype(config.kv_cache_dtype, target_cfg)
    config = replace(config, kv_cache_dtype=kv_cache_dtype)
    if dequantised and expert_storage(target_cfg) is None:
        raise ConfigError("--dequantised: expected a target with MXFP4 weights, got one without")
    check_method(speculative.method)
    draft_cfg, proposals = None, {}
    if speculative.method in MODEL_FREE:
        draft_cfg = MODEL_FREE[speculative.method].config(target_cfg, speculative)
    elif speculative.model is not None or speculative.method == "mtp":
        draft_cfg = read_draft(speculative.model or target, target_cfg, speculative)
        proposals = config_of(speculative.model or target)
    if draft_cfg is not None:
        speculative = with_k(speculative, draft_cfg, proposals)

    def plan_on(config: EngineConfig) -> MemoryPlan:
        placement, draft = planned_placement(config), draft_cfg
        layout = placement.target(target_cfg)
        if isinstance(draft, DraftModelConfig):
            stored = with_expert_storage(draft.model, "auto", placement.draft(draft))
            draft = replace(draft, model=stored)
        return memory_plan(
            with_expert_storage(target_cfg, "dequantised" if dequantised else "auto", layout),
            draft,
            config,
            memory=gpu_memory(gpu),
            dtype=dtype,
            num_speculative_tokens=speculative.max_k,
            draft_kv_cache_dtype=speculative.draft_kv_cache_dtype,
        )

    plan, console = plan_on(config), Console()
    show_tables(plan, console)
    specs = models.family(target_cfg).param_specs(target_cfg)
    ways = (config.enable_expert_parallel, *([True] if has_experts(specs) else []))
    console.print(gpus_line(plan_on, config, gpu, ways), soft_wrap=True)
    show_fit(plan, console)


def config_of(name: str) -> dict[str, Any]:
    """Return a target's config.json; of the common models without a hub.

    A .gguf file has its own in its header.
    """
    path = as_path(name, "model")
    if path.suffix == ".gguf" and path.is_file():
        from jaxspec.loading.gguf_file import config_of_gguf  # imports the package gguf

        return config_of_gguf(path)
    if path.exists():
        return read_config(name)
    return known_config(NAME if is_default_target(name) else name) or read_config(name)


def gpus_line(
    plan_on: Callable[[EngineConfig], MemoryPlan],
    config: EngineConfig,
    gpu: str,
    ways: Sequence[bool],
) -> str:
    """Return a sentence with the number of GPUs of one host that hold a request of full length.

    ways: the values of enable_expert_parallel to try on each number
    """
    for size, experts in product(HOST_SIZES, ways):
        on_devices = replace(
            config, tensor_parallel_size=size, enable_expert_parallel=experts and size > 1
        )
        try:
            plan = plan_on(on_devices)
        except ConfigError:  # so many devices cannot share these arrays
            continue
        if plan.cache_bytes > 0 and plan.num_requests > 0:
            flags = f"--tensor-parallel-size {size}"
            flags += " --enable-expert-parallel" if experts else ""
            needs = "1 GPU" if size == 1 else f"{size} GPUs ({flags})"
            return (
                f"needs {needs} of {gpu}: {plan.num_requests} requests of {plan.max_model_len} "
                "tokens"
            )
    return f"needs more than the {HOST_SIZES[-1]} GPUs of one host, of {gpu}"


def gpu_memory(name: str) -> float:
    """Return the bytes of a GPU in the table, or of so many GB."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    try:
        size = float(name)
    except ValueError:
        size = 0.0
    if not (size > 0 and math.isfinite(size)):
        raise ConfigError(
            f"--gpu: expected one of {', '.join(GPUS)} or a number of GB, got {name!r}"
        )
    return size * 1e9


def read_draft(name: str, target: Any, speculative: SpeculativeConfig) -> Any:
    """Return a draft's config, by its tensors' shapes where its files are at hand."""
    folder = own_drafts().get(name) or as_path(name, "draft")
    config = config_of(name)
    speculative = with_draft_quantize(speculative, config)
    held: dict[str, tuple[int, ...]] = {}
    if folder.is_dir() and list(folder.glob("*.safetensors")):
        held = open_checkpoint(folder).shapes
    family = family_of_checkpoint(speculative.method, config, held)
    if held:
        shapes = canonical_shapes(family, held)
    elif speculative.method == "mtp":
        shapes = {
            f"{prefix}.": ()
            for prefix in (f"model.layers.{target.num_layers}", "model.mtp_layers.0")
        }
    else:
        shapes = {"d2t": (), "lm_head.weight": ()}
    cfg = family.config_from_checkpoint(config, shapes, target, speculative)
    form, key = speculative.draft_quantize, "draft_quantize"
    if isinstance(cfg, DraftModelConfig):
        return replace(cfg, model=with_form(cfg.model, form, config, key=key))
    return with_form(cfg, form, config, key=key)


def show_tables(plan: MemoryPlan, console: Console) -> None:
    """Print a table of the memory of a GPU, and one of the KV-cache groups."""
    table = Table("", "GiB", title="memory")
    table.columns[1].justify = "right"
    rows = (
        ("target weights", plan.target_weights),
        ("draft weights (what it shares with the target not counted)", plan.draft_weights),
        ("draft buffers", plan.draft_buffers),
        ("logits", plan.logits),
        ("left for keys and values", plan.cache_bytes),
        ("of which the pools of windows", plan.window_bytes),
        ("usable", plan.usable),
    )
    for name, size in rows:
        table.add_row(name, f"{size / GIB:.3f}")
    console.print(table)
    groups = Table(
        "KV-cache group",
        "layers",
        "KiB a token",
        "tokens a request holds",
        "MiB a request",
        title="keys and values",
    )
    for column in groups.columns[1:]:
        column.justify = "right"
    for group in plan.groups:
        kib, mib = group.token_bytes / 1024, group.token_bytes * group.held / (1 << 20)
        groups.add_row(
            group.name, str(group.num_layers), f"{kib:.2f}", str(group.held), f"{mib:.1f}"
        )
    console.print(groups)


def show_fit(plan: MemoryPlan, console: Console) -> None:
    """Print a line that says what fits on the GPUs that were named; exit code 1 if nothing does."""
    tokens = f"{plan.cache_tokens} tokens in blocks of {plan.block_size}"
    length = plan.max_model_len
    if plan.cache_bytes <= 0:
        console.print(
            "does not fit: weights, draft buffers and logits alone take more than is usable"
        )
        raise typer.Exit(1)
    if plan.num_requests == 0:
        console.print(f"does not fit: {tokens} are left, no request of {length}")
        raise typer.Exit(1)
    console.print(f"fits: {tokens}, that is {plan.num_requests} requests of {length} tokens")


app = command(main)
