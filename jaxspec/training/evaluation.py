"""Acceptance of a target and draft pair, as the engine decodes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec import models
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.drafts import DraftConfig
from jaxspec.llm import LLM
from jaxspec.metrics import SpecDecodeMetrics
from jaxspec.params import Params
from jaxspec.sampling_params import SamplingParams


def evaluate_acceptance(
    target: models.TargetConfig,
    target_params: Params,
    draft: DraftConfig,
    draft_params: Params,
    prompts: Sequence[np.ndarray],
    *,
    stop_token_ids: Sequence[int],
    num_speculative_tokens: int = 3,
    max_tokens: int = 256,
    dtype: Any,
) -> tuple[SpecDecodeMetrics, list[np.ndarray]]:
    """Greedy speculative decoding of all prompts (token ids) in one batch: the counts, and each answer's token ids.

    draft_params as loading.load_draft or bind_draft returns them. The engine counts, so these are the figures that LLM.generate reports;
    the same programs serve every evaluation of a training run.
    """
    block, batch = EngineConfig.block_size, len(prompts)
    pages = -(-(max(len(p) for p in prompts) + max_tokens + 2 * (num_speculative_tokens + 1)) // block)
    config = EngineConfig(
        max_model_len=min(pages * block, target.max_position_embeddings),
        max_num_seqs=batch,
        batch_buckets=(batch,),
        num_gpu_blocks_override=batch * (pages + 1),  # not what a GPU has free: training holds the rest
        enable_prefix_caching=False,
    )
    speculative = SpeculativeConfig("in memory", draft.method, num_speculative_tokens, draft_sample_method="greedy")
    llm = LLM((target, target_params), (draft, draft_params), speculative, eos_token_ids=stop_token_ids, config=config, dtype=dtype)
    outputs = llm.generate([prompt.tolist() for prompt in prompts], SamplingParams(temperature=0, max_tokens=max_tokens))
    return llm.metrics, [np.asarray(output.token_ids) for output in outputs]
