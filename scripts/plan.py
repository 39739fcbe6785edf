"""What a target and a draft take of a GPU, from their config.json alone: weights, keys and values, draft buffers, and what fits.

python scripts/plan.py --target openai/gpt-oss-20b --gpu h200
python scripts/plan.py --target ~/models/glm-4.7-flash --method mtp --num-speculative-tokens 3 --max-model-len 32768
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxspec import models
from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.drafts import family_of_checkpoint
from jaxspec.loading.checkpoint import open_checkpoint, read_json
from jaxspec.loading.resolve import own_drafts
from jaxspec.tools.cli import errors_as_sentences, run_program
from jaxspec.tools.memory_plan import GIB, GPUS, MemoryPlan, memory_plan


def main(
    target: Annotated[
        str, typer.Option(help="Folder, config.json or hub id; no weights are read.")
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="The same, or a name under checkpoints/; with --method mtp the target's own."
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="eagle, eagle3 or mtp.")] = "eagle3",
    num_speculative_tokens: Annotated[int, typer.Option(help="K.", min=1)] = 3,
    gpu: Annotated[
        str, typer.Option(help=f"One of {', '.join(GPUS)}, or its memory in GB.")
    ] = "h200",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    packed: Annotated[bool, typer.Option(help="Keep MXFP4 experts packed.")] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens a request may hold. [default: 8192, or what the target allows if that is less]",
            min=1,
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run together.", min=1)] = 16,
    block_size: Annotated[int, typer.Option(help="Tokens a block.", min=1)] = 64,
    utilization: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
) -> None:
    """Print the memory that a target and a draft take."""
    with errors_as_sentences():
        if dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype: expected bfloat16 or float32, got {dtype!r}")
        config = read_config(target)
        target_cfg: Any = models.config_from_hf(config)
        speculative = SpeculativeConfig(
            method=method, num_speculative_tokens=num_speculative_tokens
        )
        limit = target_cfg.max_position_embeddings
        max_model_len = max_model_len or min(8192, limit)
        if max_model_len > limit:
            raise ConfigError(
                f"--max-model-len: expected at most the target's max_position_embeddings {limit}, got {max_model_len}"
            )
        if packed:
            if getattr(target_cfg, "mxfp4", None) is None:
                raise ConfigError("--packed: expected a target with MXFP4 weights, got one without")
            target_cfg = replace(target_cfg, mxfp4="packed")
        draft_cfg = None
        if draft is not None or method == "mtp":
            draft_cfg = read_draft(draft or target, target_cfg, speculative)
        plan = memory_plan(
            target_cfg,
            draft_cfg,
            memory=gpu_memory(gpu),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
            block_size=block_size,
            utilization=utilization,
        )
        show(plan, Console())


def gpu_memory(name: str) -> float:
    """Bytes of a GPU in the table, or of so many GB."""
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


def read_config(name: str) -> dict[str, Any]:
    """The config.json of a folder, of a file, of a draft under checkpoints/, or of a hub id."""
    path = Path(name).expanduser()
    if path.is_file():
        return read_json(path)
    folder = own_drafts().get(name, path)
    if folder.is_dir():
        return read_json(folder / "config.json")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return read_json(Path(hf_hub_download(name, "config.json")))
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError) as e:
        raise ConfigError(
            f"{name}: expected a folder, a config.json or a hub id, got none that can be read ({e})"
        ) from e


def read_draft(name: str, target: Any, speculative: SpeculativeConfig) -> Any:
    """A draft's config. Its tensors' shapes, where its files are at hand; else what its config implies."""
    folder = own_drafts().get(name, Path(name).expanduser())
    config = read_config(name)
    family = family_of_checkpoint(speculative.method, config)
    if folder.is_dir() and list(folder.glob("*.safetensors")):
        shapes = {
            family.canonical_name(n): shape for n, shape in open_checkpoint(folder).shapes.items()
        }
    elif speculative.method == "mtp":
        shapes = {
            f"{prefix}.": ()
            for prefix in (f"model.layers.{target.num_layers}", "model.mtp_layers.0")
        }
    else:
        shapes = {"d2t": (), "lm_head.weight": ()}
    return family.config_from_checkpoint(config, shapes, target, speculative)


def show(plan: MemoryPlan, console: Console) -> None:
    """A table of what takes memory and one of the KV-cache groups, and a line that says what fits."""
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
    held, length = plan.cache_tokens, plan.max_model_len
    if plan.cache_bytes <= 0:
        console.print(
            "does not fit: weights, draft buffers and logits alone take more than is usable"
        )
        raise typer.Exit(1)
    if plan.num_requests == 0:
        console.print(
            f"does not fit: {held} tokens in blocks of {plan.block_size} are left, no request of {length}"
        )
        raise typer.Exit(1)
    console.print(
        f"fits: {held} tokens in blocks of {plan.block_size}, that is {plan.num_requests} requests of {length} tokens"
    )


if __name__ == "__main__":
    run_program(main)
