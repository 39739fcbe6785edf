"""DeepSeek-V4 against transformers: however rows arrive and are rejected, its windows, compressors
and indexer hold what one pass over the whole text gives; and its module of multi-token prediction
against DeepSeek's own formula."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.cache import arrays as kv_cache
from jaxspec.config import ConfigError, RopeConfig
from jaxspec.drafts import mtp_deepseek_v4
from jaxspec.layers import compressed_attention
from jaxspec.layers.params import Params, Weight, is_spec
from jaxspec.loading.model import load_target
from jaxspec.loading.resolve import resolve
from jaxspec.models import config_from_hf, deepseek_v4
from tests.parity import test_rounds
from tests.parity.deepseek_v4 import CONFIG, YARN, save_module, save_target, streams
from tests.parity.oracles import TOLERANCE, DraftOracle, edit_tensors, hf_outputs
from tests.parity.ours import PagedDraft, PagedTarget, by_position, load
from tests.parity.test_targets import AUX, run_all, sequences

pytestmark = pytest.mark.oracle("transformers")

LENGTH = 61  # twenty windows of the sparse layers, eight of the heavy one
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "yarn": dict(rope_parameters=YARN),
    "one_token_window": dict(
        sliding_window=1,
        compress_rates={"compressed_sparse_attention": 1, "heavily_compressed_attention": 20},
    ),
    "every_expert_by_token": dict(num_hash_layers=3, index_topk=1),
}
Rows = list[tuple[int, list[int]]]  # position of the first row, tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "block_size"), [("usual", 1), ("usual", 16), ("yarn", 4), ("one_token_window", 4)]
)
def test_logits_and_hidden_states_equal_transformers(
    case: str, block_size: int, tmp_path: Path
) -> None:
    model = save_target(tmp_path, **CASES[case])
    cfg, params = load_target(tmp_path, jnp.float32)
    tokens = sequences(cfg.vocab_size)
    target = run_all(cfg, params, tokens, block_size)
    for i, sequence in enumerate(tokens):
        expected = hf_outputs(model, np.array(sequence))
        np.testing.assert_allclose(by_position(target.logits[i]), expected.logits, **TOLERANCE)
        np.testing.assert_allclose(by_position(target.hidden[i]), expected.hidden, **TOLERANCE)
        aux = np.split(by_position(target.aux[i]), len(AUX), axis=-1)
        for layer, ours in zip(AUX, aux, strict=True):
            np.testing.assert_allclose(
                ours,
                expected.boundary[layer].reshape(ours.shape),
                **TOLERANCE,
                err_msg=f"boundary {layer}",
            )


def rounds_with_rejections(tokens: list[int], K: int, seed: int) -> Rows:
    """A prompt of 5 tokens in chunks of 3, then rounds of K+1 rows of which the last are wrong
    tokens, as many as chance has it."""
    rng = np.random.default_rng(seed)
    rows: Rows = [(0, tokens[:3]), (3, tokens[3:5])]
    start = 5
    while start < len(tokens):
        kept = min(int(rng.integers(1, K + 2)), len(tokens) - start)
        rejected = rng.integers(0, 160, K + 1 - kept).tolist()
        rows.append((start, [*tokens[start : start + kept], *rejected]))
        start += kept
    return rows


def run(target: PagedTarget, rows: list[Rows], width: int) -> None:
    """The passes of each request side by side; one that has ended idles."""
    for step in range(max(map(len, rows))):
        passes = [r[step] if step < len(r) else (0, []) for r in rows]
        target.feed(width, [start for start, _ in passes], [t for _, t in passes])


@pytest.fixture(
    scope="module", params=["usual", pytest.param("every_expert_by_token", marks=pytest.mark.slow)]
)
def long_text(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Params, list[list[int]], list[Any]]:
    """A target, two texts, and transformers' logits of each in one pass."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_target(folder, **CASES[request.param])
    cfg, params = load_target(folder, jnp.float32)
    texts = [t.tolist() for t in np.random.default_rng(1).integers(0, cfg.vocab_size, (2, LENGTH))]
    return cfg, params, texts, [hf_outputs(model, np.array(t)).logits for t in texts]


@pytest.mark.parametrize(
    "K", [pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 5]
)
def test_rejected_rows_leave_nothing_in_a_compressor(K: int, long_text: Any) -> None:
    """Rejections at every place of a window: rows that close one are rejected, and rows of one that
    was closed already."""
    cfg, params, texts, expected = long_text
    target = PagedTarget(cfg, params, len(texts), block_size=4)
    rows = [rounds_with_rejections(text, K, seed) for seed, text in enumerate(texts)]
    ends = {(start + len(t)) % cfg.attention.sparse_rate for start, t in rows[0]}
    assert len(ends) == cfg.attention.sparse_rate
    run(target, rows, K + 1)
    for i, logits in enumerate(expected):
        np.testing.assert_allclose(by_position(target.logits[i])[:LENGTH], logits, **TOLERANCE)


@pytest.mark.parametrize("chunk", [pytest.param(2, marks=pytest.mark.slow), 29])
def test_prefill_in_chunks_equals_one_pass(chunk: int, long_text: Any) -> None:
    cfg, params, texts, expected = long_text
    target = PagedTarget(cfg, params, len(texts), block_size=4)
    target.prefill(texts, chunk)
    for i, logits in enumerate(expected):
        np.testing.assert_allclose(by_position(target.logits[i]), logits, **TOLERANCE)


def test_slots_that_nobody_wrote_are_not_read(long_text: Any) -> None:
    cfg, params, texts, expected = long_text
    target = PagedTarget(cfg, params, len(texts), block_size=4)
    target.caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), target.caches)
    run(target, [rounds_with_rejections(text, 3, seed) for seed, text in enumerate(texts)], 4)
    np.testing.assert_allclose(by_position(target.logits[0])[:LENGTH], expected[0], **TOLERANCE)


def _keeps_what_is_there(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """A state that is not rolled back: what a rejected row has left stays."""
    held = pool.reshape(-1, *pool.shape[2:])[jnp.minimum(slots, pool.shape[0] * pool.shape[1] - 1)]
    return kv_cache.write_rows(
        pool, jnp.where((held != 0).any(-1, keepdims=True), held, rows), slots
    )


def _shifted(metadata: Any) -> Any:
    return replace(metadata, positions=metadata.positions + 1)


ours = compressed_attention
MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "state_not_rolled_back": ("write_rows", _keeps_what_is_there),
    "window_not_moved": (
        "window_keys",
        lambda pool, m, window, f=ours.window_keys: f(pool, m, window + 1),
    ),
    "compressed_window_starts_one_off": (
        "compress",
        lambda p, r, n, x, m, *rest, f=ours.compress: f(p, r, n, x, _shifted(m), *rest),
    ),
    "entry_seen_by_the_row_before": (
        "entry_slots",
        lambda m, *rest, f=ours.entry_slots: f(_shifted(m), *rest),
    ),
    "no_overlap_of_windows": (
        "_of_series",
        lambda part, rate, f=ours._of_series: f(part, rate).at[:, :, :-rate].set(-1e9),
    ),
    "indexer_takes_the_lowest": ("choose", lambda scores, *rest, f=ours.choose: f(-scores, *rest)),
}


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(m, marks=pytest.mark.slow if i else ()) for i, m in enumerate(MISTAKES)],
)
def test_the_comparison_sees_a_mistake(
    mistake: str, long_text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, params, texts, expected = long_text
    name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(compressed_attention, name, wrong)
    another_program = replace(cfg, max_position_embeddings=1000 + list(MISTAKES).index(mistake))
    target = PagedTarget(another_program, params, 1, block_size=4)
    run(target, [rounds_with_rejections(texts[0], 5, seed=0)], 6)
    assert (
        np.abs(by_position(target.logits[0])[:LENGTH] - expected[0]).max() > 10 * TOLERANCE["atol"]
    )


ORIGINAL = {  # what DeepSeek's own config.json has of what transformers writes in another way
    **{
        k: v
        for k, v in CONFIG.items()
        if k not in ("layer_types", "compress_rates", "intermediate_size", "head_dim")
    },
    "vocab_size": 160,
    "hidden_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": dict(
        type="yarn", factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1
    ),
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}


def test_the_original_config_is_read() -> None:
    cfg: Any = config_from_hf(ORIGINAL)
    sliding, sparse, heavy = deepseek_v4.KINDS
    assert cfg.attention.layer_types == (sliding, sparse, heavy, sparse)
    assert (cfg.attention.rate(sliding), cfg.attention.rate(sparse), cfg.attention.rate(heavy)) == (
        None,
        4,
        128,
    )
    assert cfg.attention.rope == RopeConfig(10000.0)
    rope = cfg.attention.compressed_rope
    assert (rope.rope_type, rope.theta, rope.factor, rope.attention_factor) == (
        "yarn",
        160000.0,
        16.0,
        1.0,
    )
    assert cfg.hash_layers == (True, False, False, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected None"),
        ({"compress_ratios": [0, 4, 128, 5, 0]}, "layer_types: expected 4 of"),
        ({"compress_ratios": [0, 4, 128, 4, 4]}, "an MTP module compresses nothing"),
        ({"compress_ratios": None}, "layer_types: expected 4 of"),
        ({"scoring_func": "sigmoid"}, "scoring_func: expected 'sqrtsoftplus'"),
        ({"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, "mlp_layer_types: expected 4 of"),
        ({"o_groups": 3}, "o_groups: expected a divisor of num_attention_heads 4, got 3"),
        (
            {"qk_rope_head_dim": 14},
            "qk_rope_head_dim: expected an even number of at most head_dim 16 and index_head_dim "
            "12, got 14",
        ),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**ORIGINAL, **changes})


# --- multi-token prediction
# --------------------------------------------------------------------------------------------------

K = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a module in it, the transformers model, and the module's oracle."""
    folder = tmp_path_factory.mktemp("mtp")
    model = save_target(folder)
    return folder, model, save_module(folder, model)


def test_every_draft_equals_the_oracle(checkpoint: Any) -> None:
    """One module, K times, across blocks and its window, with one to K+1 pending rows; the compiled
    loop and eager steps."""
    folder, model, oracle = checkpoint
    target, params = load_target(folder, jnp.float32)
    cfg, draft_params = load(folder, "mtp", shared=params, target=target)
    texts = [np.random.default_rng(5).integers(0, 160, n + 1) for n in (1, 7, 83)]
    hidden, tokens = [streams(model, t[:-1]) for t in texts], [t[1:] for t in texts]
    draft = PagedDraft(cfg, draft_params, hidden, tokens, num_pending=(1, 3, 6), K=K, target=target)
    drafted = np.asarray(draft.propose().draft_tokens)
    expected = np.stack(
        [
            oracle.chain(h, t, K, forced=f)[1]
            for h, t, f in zip(hidden, tokens, drafted, strict=True)
        ]
    )
    np.testing.assert_array_equal(drafted, expected.argmax(-1))
    np.testing.assert_allclose(draft.steps(forced=drafted)[1], expected, **TOLERANCE)


@pytest.mark.slow
def test_proposals_after_many_rounds_equal_the_oracle_on_the_whole_text(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through prefill in chunks, accepted and rejected drafts: target and draft both are what they
    are for the text alone."""
    folder, model, oracle = checkpoint
    target, params = load_target(folder, jnp.float32)
    params = {
        **params,
        "lm_head": Weight(0.3 * params["lm_head"].values),
    }  # flat distributions overlap: some drafts are accepted
    draft = load(folder, "mtp", shared=params, target=target)
    flat = DraftOracle(oracle.module, oracle.to_target, lambda *args: _scaled(oracle._run(*args)))
    monkeypatch.setattr(
        test_rounds,
        "target_rows",
        lambda model, aux_layers, tokens: streams(model, np.array(tokens)),
    )
    test_rounds.assert_proposals_equal((target, params), draft, model, flat)


def _scaled(output: tuple[Any, Any]) -> tuple[Any, Any]:
    return 0.3 * output[0], output[1]


@pytest.mark.slow
def test_the_targets_folder_alone_is_enough(checkpoint: Any) -> None:
    """The engine: chunks of prefill, blocks shared by prompts that start alike, three drafts a
    round."""
    prompt = np.random.default_rng(2).integers(0, 160, 40).tolist()
    prompts, sampling = [prompt, [*prompt[:35], 1, 2]], SamplingParams(temperature=0, max_tokens=20)
    texts = []
    for speculative in (None, {"method": "mtp", "num_speculative_tokens": 3}):
        llm = LLM.from_pretrained(
            str(checkpoint[0]),
            dtype="float32",
            max_model_len=96,
            max_num_seqs=2,
            block_size=8,
            max_num_batched_tokens=32,
            speculative=speculative,
        )
        texts.append([llm.generate([p], sampling)[0].token_ids for p in prompts])
    assert texts[0] == texts[1]


def test_the_modules_tensors_are_those_of_the_original_files() -> None:
    """DeepSeek-V4-Flash's files hold 1,575 tensors of mtp.0, of which 778 are the scales of
    matrices in float8 and float4."""
    flash = {**ORIGINAL, "n_routed_experts": 256, "num_experts_per_tok": 6}
    target: Any = config_from_hf(flash)
    specs = mtp_deepseek_v4.param_specs(mtp_deepseek_v4.DeepseekV4MtpConfig(target))
    names = [name for spec in jax.tree.leaves(specs, is_leaf=is_spec) for name in spec.tensors]
    assert len(names) == len(set(names)) == 1575 - 778 and all(
        name.startswith("mtp.0.") for name in names
    )


REFUSED: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "none": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")],
        r"expected tensors mtp\.0\.\* in the checkpoint, got none",
    ),
    "missing": (lambda t: t.pop("mtp.0.enorm.weight"), r"missing: mtp\.0\.enorm\.weight"),
    "compressor": (
        lambda t: t.update({"mtp.0.attn.compressor.ape": np.zeros((4, 16), np.float32)}),
        r"unexpected: mtp\.0\.attn\.compressor\.ape",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_module_that_does_not_fit_is_refused(case: str, checkpoint: Any, tmp_path: Path) -> None:
    damage, message = REFUSED[case]
    folder = Path(shutil.copytree(checkpoint[0], tmp_path / "copy"))
    target, params = load_target(folder, jnp.float32)
    edit_tensors(folder, damage)
    with pytest.raises(ConfigError, match=message):
        load(folder, "mtp", shared=params, target=target)


def test_a_head_of_eagle3_is_refused(checkpoint: Any) -> None:
    target, params = load_target(checkpoint[0], jnp.float32)
    head = resolve("smollm2-135m-instruct-eagle3", kind="draft")
    with pytest.raises(
        ConfigError,
        match=(
            "expected a target with one residual stream, got model_type 'deepseek_v4', which has 3"
        ),
    ):
        load(head, "eagle3", shared=params, target=target)
