"""Acceptance of a target and draft pair, as the engine decodes with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxspec import models
from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.config.settings import setting
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.layers.params import Params
from jaxspec.llm import LLM
from jaxspec.loading.pair import with_k
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools.acceptance.lengths import by_range
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.config import TrainableDraft
from jaxspec.training.heads import load_head
from jaxspec.training.run_record import RunRecord


@dataclass(frozen=True)
class EvaluationConfig:
    """prompts: texts, decoded greedily up to max_tokens; without any nothing is evaluated.

    prompts_from: the name of the prompts' file or data set, for the record; None for no such name
    max_num_seqs: prompts that decode together; more make the caches of long prompts larger
    """

    prompts: tuple[str, ...] = ()
    prompts_from: str | None = None
    num_speculative_tokens: int | None = setting(
        None, "K, the draft tokens a round. [default: a block head's block, else 3]"
    )
    max_tokens: int = setting(256, "Tokens of an answer, at most.")
    max_num_seqs: int = setting(128, "Evaluation prompts that decode together, at most.")

    def __post_init__(self) -> None:
        SpeculativeConfig(num_speculative_tokens=self.num_speculative_tokens)
        for name in ("max_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"evaluation: expected {name} of at least 1, got {getattr(self, name)}"
                )


def evaluated_drafts(cfg: EvaluationConfig, draft: TrainableDraft) -> int:
    """Return K of an evaluation; ConfigError if a block of the head does not hold so many."""
    given = SpeculativeConfig(num_speculative_tokens=cfg.num_speculative_tokens)
    return with_k(given, draft, {}).max_k


def evaluate_head(
    cfg: EvaluationConfig,
    target: ChatTarget,
    folder: Path,
    method: str,
    record: RunRecord,
    *,
    log: Callable[[str], None],
    show: int = 0,
) -> dict[str, Any]:
    """Measure a saved head's acceptance in the engine and put it on record.

    Returns the counts, empty without prompts. show: number of answers that are logged.
    """
    draft, params = load_head(folder, method, target, target.dtype)
    if not cfg.prompts:
        log("evaluate: no --eval-prompts, nothing evaluated")
        return {}
    prompts = [target.words.encode_chat(prompt) for prompt in cfg.prompts]
    K = evaluated_drafts(cfg, draft)
    begin = time.monotonic()
    metrics, by_length, answers = evaluate_acceptance(
        target.cfg,
        target.params,
        draft,
        params,
        prompts,
        stop_token_ids=target.chat.stop_token_ids,
        num_speculative_tokens=K,
        max_tokens=cfg.max_tokens,
        max_num_seqs=cfg.max_num_seqs,
        dtype=target.dtype,
    )
    counts = {
        "prompts": len(prompts),
        "prompts_from": cfg.prompts_from,
        "max_tokens": cfg.max_tokens,
        "output_tokens": int(sum(map(len, answers))),
        "dtype": str(target.dtype),
        "by_prompt_length": {name: found.to_dict() for name, found in by_length.items()},
    }
    record.entries["evaluation"] = found = metrics.to_dict() | counts
    record.write()
    positions = " / ".join(f"{x:.3f}" for x in metrics.per_position_acceptance)
    log(
        f"evaluate: {len(prompts)} prompts, K={K}, T=0, {target.dtype}, "
        f"{time.monotonic() - begin:.1f} s: mean acceptance length "
        f"{metrics.mean_acceptance_length:.3f}, per position {positions}, "
        f"{metrics.num_drafts} drafts"
    )
    if len(by_length) > 1:
        parts = ", ".join(f"{name} {m.mean_acceptance_length:.3f}" for name, m in by_length.items())
        log(f"evaluate: mean acceptance length by tokens of the prompt: {parts}")
    for answer in answers[:show]:
        log(f"evaluate: example: {target.words.decode(answer)!r}")
    return found


def evaluate_acceptance(
    target: models.TargetConfig,
    target_params: Params,
    draft: TrainableDraft,
    draft_params: Params,
    prompts: Sequence[np.ndarray],
    *,
    stop_token_ids: Sequence[int],
    num_speculative_tokens: int = 3,
    max_tokens: int = 256,
    max_num_seqs: int = 128,
    dtype: DTypeLike,
) -> tuple[SpecDecodeMetrics, dict[str, SpecDecodeMetrics], list[np.ndarray]]:
    """Decode all prompts (token ids) greedily, max_num_seqs together.

    Returns the counts, those of each range of prompt lengths, and each answer's tokens.

    draft_params: as loading.load_draft or bind_draft returns them. The engine counts, so these are
    the figures that LLM.generate reports. The same programs serve every evaluation of a training
    run.
    """
    block, batch = EngineConfig.block_size, min(len(prompts), max_num_seqs)
    pages = -(
        -(max(len(p) for p in prompts) + max_tokens + 2 * (num_speculative_tokens + 1)) // block
    )
    config = EngineConfig(
        max_model_len=min(pages * block, target.max_position_embeddings),
        max_num_seqs=batch,
        batch_buckets=(batch,),
        num_gpu_blocks_override=batch
        * (pages + 1),  # not what a GPU has free: training holds the rest
        enable_prefix_caching=False,
    )
    speculative = SpeculativeConfig(
        "in memory", draft.method, num_speculative_tokens, draft_sample_method="greedy"
    )
    llm = LLM(
        (target, target_params),
        (draft, draft_params),
        speculative,
        eos_token_ids=stop_token_ids,
        config=config,
        dtype=dtype,
    )
    outputs = llm.generate(
        [prompt.tolist() for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=max_tokens),
    )
    by_length: dict[str, SpecDecodeMetrics] = {}
    for name, indices in by_range(map(len, prompts)).items():
        by_length[name] = SpecDecodeMetrics(num_speculative_tokens)
        for i in indices:
            by_length[name].add(outputs[i].metrics)
    return llm.metrics, by_length, [np.asarray(output.token_ids) for output in outputs]
