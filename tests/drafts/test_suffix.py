"""Suffix matching: votes equal plain Python's, and text is plain decoding's under every rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.drafts import MODEL_FREE
from jaxspec.drafts.suffix import SuffixConfig, longest_match, vote
from tests.drafts import test_ngram as ngram
from tests.support.slow import slow
from tests.support.statistics import within_limit
from tests.support.tiny import VOCAB, agreeing_model, random_prompts

pytestmark = pytest.mark.once

MODEL = agreeing_model("eagle")  # its target alone


def config(vocab: int = 8, **changes: Any) -> SuffixConfig:
    values: dict[str, Any] = dict(
        lookup_max=24, lookup_min=1, max_tree_depth=99, min_token_prob=0.0
    )
    return SuffixConfig(vocab, **{**values, **changes})


def reference(text: list[int], K: int, cfg: SuffixConfig) -> list[int]:
    """The drafts that follow a text, -1 for none, from the docstrings."""

    def matched(end: int) -> int:
        run = 0
        while run < min(end, cfg.lookup_max) and text[end - 1 - run] == text[-1 - run]:
            run += 1
        return run

    runs = {end: matched(end) for end in range(1, len(text))}
    longest = max(runs.values(), default=0)
    voters = [end for end, run in runs.items() if run == longest and longest >= cfg.lookup_min]
    drafts: list[int] = []
    chance = 1.0
    most = min(int(cfg.max_spec_factor * longest), cfg.max_tree_depth - longest)
    while len(drafts) < min(K, most):
        step = len(drafts)
        votes = Counter(text[end + step] for end in voters if end + step < len(text))
        if not votes:
            break
        token = min(votes, key=lambda t: (-votes[t], t))
        chance *= votes[token] / votes.total()
        if chance < cfg.min_token_prob:
            break
        drafts.append(token)
        voters = [e for e in voters if e + step < len(text) and text[e + step] == token]
    return drafts + [-1] * (K - len(drafts))


@pytest.mark.parametrize(
    ("alphabet", "changes"),
    [
        (2, {}),
        (3, dict(lookup_max=3, max_spec_factor=2.0)),
        (2, dict(min_token_prob=0.4, max_spec_factor=8.0)),
        (4, dict(lookup_max=2, lookup_min=2)),
        (2, dict(lookup_max=6, max_tree_depth=7)),
    ],
)
def test_votes_equal_plain_python(alphabet: int, changes: dict[str, Any]) -> None:
    """Texts of every length; tokens past a text's end do not count."""
    rng, cfg = np.random.default_rng(alphabet), config(**changes)
    texts = rng.integers(0, alphabet, (200, 24)).astype(np.int32)
    lengths = rng.integers(0, 25, 200).astype(np.int32)
    lengths[:4] = (0, 1, 2, 24)
    found = vote(jnp.asarray(texts), jnp.asarray(lengths), 5, cfg).tolist()
    expected = [
        reference(text[:n], 5, cfg)
        for text, n in zip(texts.tolist(), lengths.tolist(), strict=True)
    ]
    assert found == expected
    assert len({sum(t >= 0 for t in row) for row in expected}) > 2


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        (
            [1, 2, 5, 1, 2, 6, 1, 2, 6, 7, 1, 2],
            [6, -1, -1],
        ),  # two against one; half of them went on
        ([3, 1, 2, 4, 1, 2, 5, 1, 2, 5, 3, 1, 2], [4, 1, 2]),  # a longer match outvotes
        ([5, 6, 7], [-1, -1, -1]),
    ],
)
def test_votes_worked_out_by_hand(text: list[int], drafts: list[int]) -> None:
    padded = jnp.asarray([text + [0] * (16 - len(text))], jnp.int32)
    cfg = config(min_token_prob=0.4)
    assert vote(padded, jnp.asarray([len(text)], jnp.int32), 3, cfg).tolist() == [drafts]


def engine(**spec: Any) -> LLM:
    speculative = SpeculativeConfig(method="suffix", num_speculative_tokens=4, **spec)
    target = (MODEL.target, MODEL.params["target"])
    settings = EngineConfig(
        max_model_len=96,
        max_num_seqs=4,
        block_size=4,
        batch_buckets=(4,),
        max_num_batched_tokens=32,
        num_gpu_blocks_override=36,  # requests are preempted
    )
    draft = MODEL_FREE["suffix"].config(MODEL.target, speculative)
    return LLM(target, (draft, {}), speculative, config=settings)


@pytest.mark.parametrize("rule", ["strict", slow("probabilistic"), slow("block")])
def test_text_is_plain_decodings(rule: str) -> None:
    """Of greedy requests; and of sampled ones under the strict rule."""
    prompts = [*ngram.repeated((5, 9, 3, 6)), *random_prompts((1, 17), seed=5)]
    params = [
        SamplingParams(0.0 if rule != "strict" else t, seed=i, max_tokens=24)
        for i, t in enumerate((0.0, 0.6, 1.0, 0.0, 0.6, 0.0))
    ]
    llm = engine(rejection_sample_method=rule)
    outputs = llm.generate(prompts, params)
    plain = ngram.ngram_llm(plain=True).generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.metrics.num_accepted_tokens > 10


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(
    ("rule", "chain", "temperature"),
    [("probabilistic", "independent", 0.4), slow("block", "alike", 1.0)],
)
def test_sampled_text_follows_the_target(
    rule: str, chain: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompt lookup's text does, over two rounds."""
    cfg = config(ngram.CHAIN_VOCAB, lookup_max=2, max_spec_factor=4.0)
    monkeypatch.setattr(ngram, "NgramConfig", lambda *args, **limits: cfg)
    trials = ngram.play(rule, chain, temperature, rounds=2)
    assert min(trials.acceptance[:2]) > 0.02
    assert not ngram.biased_steps(trials, chain, temperature)
    assert within_limit(*ngram.joint_statistic(trials, chain, temperature))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tree_depth": 0}, "max_tree_depth: expected an integer of at least 1, got 0"),
        ({"max_spec_factor": 0}, "max_spec_factor: expected a number above 0, got 0"),
        ({"min_token_prob": 1.5}, "min_token_prob: expected a number from 0 to 1, got 1.5"),
    ],
)
def test_limits_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig(
            method="suffix", **{f"suffix_decoding_{name}": x for name, x in values.items()}
        )
    assert str(error.value) == f"suffix_decoding_{message}"


def test_the_limits_are_those_of_the_speculative_config() -> None:
    speculative = SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=9)
    assert MODEL_FREE["suffix"].config(MODEL.target, speculative) == SuffixConfig(
        VOCAB, lookup_max=6, lookup_min=1, max_tree_depth=9
    )


@pytest.mark.parametrize(
    ("K", "depth", "factor", "longest"),
    [
        (3, 24, 1.0, 21),  # the defaults
        (24, 24, 1.0, 12),  # K as vLLM's default: half is matched, half is drafted
        (30, 24, 2.0, 8),
        (30, 24, 100.0, 1),
        (3, 2, 1.0, 1),
        (9, 10**9, 1e308, 10**9 - 9),
        (3, 1, 1.0, 0),  # no room for a match and a draft
    ],
)
def test_a_match_leaves_room_for_drafts(K: int, depth: int, factor: float, longest: int) -> None:
    """Match and drafts together have max_tree_depth tokens at most, as in vLLM."""
    assert longest_match(K, depth, factor) == longest
