"""Chats on disk: written by the target into a folder, read from several to train on them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.loading.checkpoint import read_json
from jaxspec.loading.new_file import write_text
from jaxspec.tools.prompts import read_prompts
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.data import Chats, OverlapFilter, merge
from jaxspec.training.generation import GenerationConfig, GenerationReport, generate_chats
from jaxspec.training.openings import all_openings

CHATS, REPORT = "chats.npz", "generation.json"


def write_chats(
    cfg: GenerationConfig,
    target: ChatTarget,
    folder: Path,
    *,
    prompt_sets: Sequence[str],
    shard: tuple[int, int],
    overlap: OverlapFilter,
    minutes: float,
    max_chats: int,
    show: int,
    log: Callable[[str], None],
) -> None:
    """Write chats for some minutes, and a report beside them.

    An error or Ctrl-C loses none that are finished. Beside the chats of an earlier run they are
    chats.cut1.npz, or the next number that is free. ConfigError if no chat is finished in time.

    prompt_sets:  files or ids on the hub, whose prompts are answered
    shard (i, n): of these prompts, every n-th from the i-th on
    show:         number of examples that are logged
    """
    prompts = file_prompts(cfg, target, prompt_sets, shard, overlap)
    log(
        f"generate: {len(prompts)} prompts from files, {overlap.removed} removed that overlap "
        "prompts which are kept out"
    )

    def save(chats: Chats, report: GenerationReport, names: tuple[str, str]) -> None:
        written = full_report(cfg, chats, report, overlap)
        log(f"generate: {json.dumps(written)}")
        folder.mkdir(parents=True, exist_ok=True)
        chats.save(folder / names[0])
        write_text(folder / names[1], json.dumps(written, indent=1) + "\n")
        log(f"generate: {len(chats)} chats are in {folder / names[0]}")

    def keep(chats: Chats, report: GenerationReport) -> None:
        names = [(CHATS, REPORT)]
        while (folder / names[-1][0]).exists():
            names.append((f"chats.cut{len(names)}.npz", f"generation.cut{len(names)}.json"))
        save(chats, report, names[-1])

    chats, report = generate_chats(
        cfg,
        target,
        deadline=time.monotonic() + 60 * minutes,
        max_chats=max_chats,
        prompts=prompts,
        openings=[target.words.encode(text) for text in all_openings()],
        overlap=overlap,
        log=log,
        keep=keep,
    )
    if not len(chats):
        raise ConfigError(f"generate: expected a finished chat in {minutes:g} minutes, got none")
    save(chats, report, (CHATS, REPORT))
    for i in range(min(show, len(chats))):
        log(f"generate: example: {target.words.decode(chats.sequence(i))!r}")


def file_prompts(
    cfg: GenerationConfig,
    target: ChatTarget,
    prompt_sets: Sequence[str],
    shard: tuple[int, int],
    overlap: OverlapFilter,
) -> list[np.ndarray]:
    """Return the prompts of data sets as token ids int32 [n], shuffled.

    Prompts that the overlap filter refuses are left out, and those that leave an answer neither
    half of max_len nor max_answer_tokens.
    """
    most = max(cfg.max_len // 2, cfg.max_len - cfg.max_answer_tokens)
    found = (prompt for name in prompt_sets for prompt in read_prompts(name, "--prompts"))
    texts = [prompt for prompt in found if overlap.admits(prompt)]
    mine, of = shard
    encoded = [
        ids for text in texts[mine::of] if len(ids := target.words.encode_chat(text)) <= most
    ]
    np.random.default_rng(cfg.seed).shuffle(encoded)
    return encoded


def full_report(
    cfg: GenerationConfig, chats: Chats, report: GenerationReport, overlap: OverlapFilter
) -> dict[str, Any]:
    """Return the report for generation.json, and from there for the head's card."""
    return dataclasses.asdict(report) | {
        "tokens_per_second": report.tokens_per_second,
        "removed_by_overlap": overlap.removed,
        "kept_out": list(overlap.sources),
        "mean_length": float(chats.lengths.mean()) if len(chats) else 0.0,
        "device": jax.devices()[0].device_kind,
        "config": dataclasses.asdict(cfg),
    }


def read_chats(paths: Sequence[Path], vocab: int) -> tuple[Chats, dict[str, Any]]:
    """Return the chats of all files, merged, and their reports and counts for the run's record.

    vocab: size of the target's vocabulary
    """
    reports = [path.with_name(REPORT) for path in paths]
    generation = [read_json(path) for path in reports if path.is_file()]
    chats = merge([Chats.load(path, vocab) for path in paths])
    counts = {
        "files": len(paths),
        "chats": len(chats),
        "tokens": int(chats.lengths.sum()),
        "answer_tokens": chats.num_answer_tokens,
        "greedy_share": float(np.mean(chats.temperature == 0)),
    }
    return chats, {"generation": generation, "chats": counts}
