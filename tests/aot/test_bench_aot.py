"""What scripts/bench.py times, compiled for an H200: forcing acceptance takes no kernel away,
chained calls are all there."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config import Ops, RoundConfig
from jaxspec.decode.verify import verify_rows
from jaxspec.drafts.autoregressive import Proposal
from jaxspec.drafts.families import layered
from jaxspec.sampling.state import SamplingState
from jaxspec.tools.benchmark import timing, workload
from jaxspec.tools.benchmark.cases import Case
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BATCH, K = 16, 3
REFERENCE = asdict(Ops())


def configured(rule: str, temperature: float) -> RoundConfig:
    case = Case(
        "llama-3-8b", batch=BATCH, num_speculative_tokens=K, rule=rule, temperature=temperature
    )
    return workload.configure(case, "bfloat16", REFERENCE, workload.Effort())[0]


def judged(cfg: RoundConfig, calls: int = 1, *, chained: bool = False) -> int:
    """Kernels of judging `calls` proposals."""
    struct = jax.ShapeDtypeStruct
    vocab, draft_vocab = cfg.target.vocab_size, layered(cfg.draft).draft_vocab_size
    floats = lambda *shape: struct(shape, jnp.float32)  # noqa: E731
    ints = lambda *shape: struct(shape, jnp.int32)  # noqa: E731
    sampling = SamplingState(struct((BATCH, 2), jnp.uint32), floats(BATCH))  # type: ignore[arg-type]
    arrays = {
        "target_logits": floats(BATCH, K + 1, vocab),
        "seq_lens": ints(BATCH),
        "draft_tokens": ints(BATCH, K),
    }
    if cfg.keeps_draft_logits:
        arrays["draft_logits"] = floats(BATCH, K, draft_vocab)

    def function(
        copies: Any,
        sampling: SamplingState,
        active: jax.Array,
        to_draft: jax.Array,
        zero: jax.Array,
    ) -> Any:
        def op(
            target_logits: jax.Array,
            seq_lens: jax.Array,
            draft_tokens: jax.Array,
            draft_logits: jax.Array | None = None,
        ) -> Any:
            found = verify_rows(
                cfg,
                target_logits,
                Proposal(draft_tokens, draft_logits),
                to_draft,
                sampling,
                seq_lens,
                active,
            )
            return found.output_tokens, found.num_sampled

        return timing.chain(op)(copies, zero) if chained else op(**copies[0])

    compiled = h200.compile_for_h200(
        function, [arrays] * calls, sampling, struct((BATCH,), jnp.bool_), ints(vocab), ints()
    )
    entry = compiled.as_text().split("ENTRY", 1)[1]
    return len(re.findall(r" (?:fusion|custom-call)\(", entry))


@pytest.mark.parametrize("rule", ["probabilistic", "strict", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forcing_acceptance_takes_no_kernel_away(rule: str, temperature: float) -> None:
    forced = configured(rule, temperature)
    assert judged(forced) >= judged(replace(forced, acceptance_rates=None)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_call_of_a_chain_has_its_kernels(temperature: float) -> None:
    cfg = configured("probabilistic", temperature)
    one, four = judged(cfg, chained=True), judged(cfg, 4, chained=True)
    assert four > 3.5 * one, (one, four)  # what depends on the seeds alone is shared
