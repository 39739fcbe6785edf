"""Score a prompt in bfloat16, in a call of its own and beside other prompts, on two devices.

Prints the largest difference between the log-probabilities of the two calls.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, EngineConfig, SamplingParams
from tests.support.tiny import random_prompts, tiny_model

PROMPTS = random_prompts((20, 30, 28, 26, 31))  # a tile each: 32 rows, and 160
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)


def scores(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Return those of the first prompt and of its next token."""
    [text] = (output := llm.generate(prompts, SCORED)[0]).outputs
    assert output.prompt_logprobs is not None and text.logprobs is not None
    rows = [row for row in (*output.prompt_logprobs, *text.logprobs) if row]
    return [row[token].logprob for row in rows for token in sorted(row)]


def main() -> None:
    model = tiny_model("eagle3", dtype=jnp.bfloat16)
    config = EngineConfig(
        max_model_len=64,
        max_num_seqs=len(PROMPTS),
        batch_buckets=(len(PROMPTS),),
        num_gpu_blocks_override=len(PROMPTS),
        enable_prefix_caching=False,
        tensor_parallel_size=2,
    )
    llm = LLM((model.target, model.params["target"]), config=config)
    alone, beside = scores(llm, PROMPTS[:1]), scores(llm, PROMPTS)
    print(float(np.abs(np.subtract(alone, beside)).max()))


if __name__ == "__main__":
    main()
