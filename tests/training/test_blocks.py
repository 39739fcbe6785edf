"""Training on blocks against propose, which it has to predict, and against its definition."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax

from jaxspec import models
from jaxspec.config import REFERENCE_OPS, ConfigError, RoundConfig
from jaxspec.drafts import families
from jaxspec.drafts.block import BlockDrafter
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.drafter import DraftContext, PromptChunk
from jaxspec.drafts.dspark import DSparkConfig, confidence
from jaxspec.layers.params import Params, init_random, join, separate
from jaxspec.loading.binding import bind_draft
from jaxspec.models import TargetOutput
from jaxspec.sampling.state import SamplingState
from jaxspec.training.anchors import with_anchors
from jaxspec.training.block_objective import (
    block_counts,
    block_logits,
    block_loss,
    drafted_rows,
    observe_blocks,
)
from jaxspec.training.blocks import BLOCKS_PER_TILE, Blocks, forward_blocks
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Batch, pack, packed_batch
from jaxspec.training.documents import document_starts
from jaxspec.training.feature_scale import (
    compute_weights,
    feature_scale,
    scaled_params,
    unscaled_params,
)
from jaxspec.training.heads import HeadConfig, block_config, continued_params, initial_params
from jaxspec.training.loop import (
    Budget,
    TrainState,
    data_mesh,
    init_train_state,
    place,
    prepare,
    replicate,
    train,
    train_step,
)
from jaxspec.training.objective import TrainingPair, shared_weights
from jaxspec.training.target import target_states
from jaxspec.training.trained import trained_specs
from tests.support.slow import slow_unless
from tests.training.conftest import DRAFT_ATTENTION, DRAFT_VOCAB, VOCAB, Pair

TOLERANCE = 2e-5  # float32: another order of the same sums
MASK, BLOCK = 7, 4
AUX = (1, 2, 4)
SHAPE: dict[str, Any] = dict(
    target_hidden_size=32,
    hidden_size=32,
    intermediate_size=40,
    attention=dataclasses.replace(DRAFT_ATTENTION, qk_norm=True),
    rms_norm_eps=1e-5,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    aux_layers=AUX,
    draft_block_size=BLOCK,
    mask_token_id=MASK,
    windows=(None, None),
    causal=(False, False),
    own_lm_head=True,
)
DSPARK: dict[str, Any] = SHAPE | dict(
    sample_from_anchor=True, markov_rank=6, has_confidence=True, confidence_reads_token=True
)
WHOLE: dict[str, Any] = DSPARK | dict(draft_vocab_size=VOCAB, own_lm_head=False, tied_lm_head=True)
CONFIGS: dict[str, DFlashConfig] = {
    "dflash": DFlashConfig(**SHAPE, sample_from_anchor=False),
    "vanilla": DSparkConfig(**DSPARK),
    "whole": DSparkConfig(**WHOLE),
    "gated": DSparkConfig(**DSPARK, markov_kind="gated"),
    "rnn": DSparkConfig(**DSPARK, markov_kind="rnn"),
    "window": dataclasses.replace(DSparkConfig(**DSPARK), windows=(3, None)),
    "causal-window": dataclasses.replace(
        DFlashConfig(**SHAPE, sample_from_anchor=True),
        windows=(3, None),
        causal=(True, False),
        windows_from_anchor=False,
    ),
}


class Head(NamedTuple):
    """A random block head.

    params: its own weights, as they are trained. bound: as propose reads them.
    """

    cfg: DFlashConfig
    params: Params
    bound: Params


def make_head(cfg: DFlashConfig, pair: Pair, seed: int = 0) -> Head:
    specs = families.block_family(cfg).param_specs(cfg)
    params = init_random(specs, jax.random.key(seed), jnp.dtype(jnp.float32))
    own = {name: params[name] for name in trained_specs(cfg)}
    apart = separate(specs, params)
    layers = [layer["self_attn"]["qkv_proj"].values for layer in apart["layers"]]
    k_and_v = tuple(part for _, k, v in layers for part in (k, v))
    apart["context_kv"] = dataclasses.replace(apart["context_kv"], values=k_and_v)
    whole = join(specs, apart)
    return Head(cfg, own, bind_draft(cfg, whole, pair.target, ids_of(cfg, pair)))


def ids_of(cfg: DFlashConfig, pair: Pair) -> np.ndarray:
    """Return the target id of each draft id."""
    return pair.draft_ids if cfg.maps_vocabulary else np.arange(VOCAB)


def training_pair(head: Head, pair: Pair) -> TrainingPair:
    ids = jnp.asarray(ids_of(head.cfg, pair), jnp.int32)
    return TrainingPair(head.cfg, pair.target_cfg, pair.target, ids)


def two_documents(seed: int = 0) -> Batch[np.ndarray]:
    """Two rows of two documents; the answers of the first are tokens 2.. and 4.. of each."""
    rng = np.random.default_rng(seed)
    lengths = (9, 12, 14, 5)
    chats = pack([rng.integers(8, VOCAB, n) for n in lengths], [2, 4, 5, 2], np.zeros(4), np.int32)
    return packed_batch(chats, [[0, 1], [2, 3]], 24)


def on_device(batch: Batch[np.ndarray]) -> Batch[jax.Array]:
    return Batch(*map(jnp.asarray, batch))


def proposed(head: Head, pair: Pair, tokens: np.ndarray, aux: np.ndarray) -> Any:
    """What a round proposes after a context: aux [n, W] of tokens [n], then tokens[n]."""
    cfg, n, K = head.cfg, len(aux), head.cfg.block_capacity
    round_cfg = RoundConfig.for_models(
        pair.target_cfg,
        cfg,
        block_size=4,
        max_model_len=32,
        num_speculative_tokens=K,
        ops=REFERENCE_OPS,
        rule="probabilistic",
    )
    drafter, groups = BlockDrafter(), len(round_cfg.draft_groups)
    table = jnp.asarray([[3, 1, 5, 0, 2, 4, 7, 6]], jnp.int32)
    f32 = jnp.float32
    state = drafter.init(
        round_cfg, 1, (8,) * len(round_cfg.cache_groups), dtype=f32, cache_dtype=f32
    )
    chunk = PromptChunk(
        jnp.asarray(tokens[None, :n]), *(jnp.asarray([x], jnp.int32) for x in (0, n, -1))
    )
    seen = TargetOutput(jnp.zeros((1, n, 32)), jnp.asarray(aux[None]), ())
    tables = (table,) * groups
    state = drafter.prefill(
        round_cfg, head.bound, state, tables, chunk, jnp.zeros(1, jnp.int32), seen
    )
    context = DraftContext(
        jnp.asarray([n], jnp.int32),
        jnp.asarray(tokens[n : n + 1]),
        jnp.ones(1, bool),
        tables,
        SamplingState(jnp.full((1, 2), 7, jnp.uint32), jnp.ones(1)),
    )
    return drafter.propose(round_cfg, head.bound, state, context)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_block_logits_equal_those_that_propose_writes(pair: Pair, name: str) -> None:
    """The document is the second of its row. Propose sees it alone, from position 0 on."""
    head = make_head(CONFIGS[name], pair, 3)
    cfg, K = head.cfg, head.cfg.block_capacity
    batch = two_documents()
    aux = np.random.default_rng(1).normal(size=(2, 24, 96)).astype(np.float32)
    begin, anchor = 9, 15  # the document's first row, and an anchor with 6 tokens before it
    document, of_document = batch.tokens[0, begin:], aux[0, begin:anchor]
    proposal = jax.jit(lambda: proposed(head, pair, document, of_document))()
    drafts = np.asarray(proposal.draft_tokens[0])

    # A second block, of the other row, and an unused one share the pass.
    anchors = jnp.asarray([[2, anchor], [3, 0]], jnp.int32)
    starts = jnp.asarray([[0, begin], [0, 0]], jnp.int32)
    previous = np.full((2, 2, K), 11, np.int32)
    previous[0, 1] = [batch.tokens[0, anchor], *drafts[:-1]]

    @jax.jit
    def ours() -> jax.Array:
        hidden = forward_blocks(
            head.bound, cfg, jnp.asarray(batch.tokens), jnp.asarray(aux), Blocks(anchors, starts)
        )
        return block_logits(head.bound, cfg, hidden, jnp.asarray(previous))

    np.testing.assert_allclose(
        ours()[0, 1], proposal.draft_logits[0], atol=TOLERANCE, rtol=TOLERANCE
    )
    assert len(set(drafts.tolist())) > 1  # equal drafts could hide a wrong shift


def test_a_deeper_head_with_gates_begins_as_the_head_that_it_continues(pair: Pair) -> None:
    old = make_head(CONFIGS["vanilla"], pair)
    cfg = dataclasses.replace(CONFIGS["gated"], windows=(None,) * 4, causal=(False,) * 4)
    ids = ids_of(cfg, pair)
    fresh = init_random(trained_specs(cfg), jax.random.key(7), jnp.dtype(jnp.float32))
    params = continued_params(cfg, fresh, ids, old.cfg, old.params, ids)
    batch = two_documents()
    aux = jax.random.normal(jax.random.key(2), (2, 24, 96))
    blocks = Blocks(jnp.asarray([[3, 15], [6, 17]]), jnp.asarray([[0, 9], [0, 14]]))
    previous = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 2, BLOCK)))

    def logits(cfg: DFlashConfig, params: Params) -> jax.Array:
        weights = {**old.bound, **params}
        hidden = forward_blocks(weights, cfg, jnp.asarray(batch.tokens), aux, blocks)
        return block_logits(weights, cfg, hidden, previous)

    np.testing.assert_allclose(
        logits(cfg, params), logits(old.cfg, old.params), atol=TOLERANCE, rtol=TOLERANCE
    )
    drawn = {**params, "layers": fresh["layers"]}
    assert np.abs(logits(cfg, drawn) - logits(old.cfg, old.params)).max() > 0.1

    with pytest.raises(ConfigError, match="num_layers: expected at least the 4"):
        continued_params(old.cfg, old.params, ids, cfg, params, ids)
    rnn = CONFIGS["rnn"]
    fresh = init_random(trained_specs(rnn), jax.random.key(7), jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match="markov_bias: expected it in the head"):
        continued_params(rnn, fresh, ids, old.cfg, old.params, ids)


def test_more_aux_layers_and_a_larger_rank_begin_as_the_head_that_they_continue(
    pair: Pair,
) -> None:
    """The new aux layers lie before, between and behind those of the old head."""
    old = make_head(CONFIGS["vanilla"], pair)
    size = 32
    cfg = dataclasses.replace(CONFIGS["vanilla"], aux_layers=(0, 1, 2, 3, 4, 5), markov_rank=9)
    ids = ids_of(cfg, pair)
    fresh = init_random(trained_specs(cfg), jax.random.key(7), jnp.dtype(jnp.float32))
    params = continued_params(cfg, fresh, ids, old.cfg, old.params, ids)
    batch, rng = two_documents(), np.random.default_rng(0)
    aux = jax.random.normal(jax.random.key(2), (2, 24, 6 * size))
    of_old = jnp.concatenate([aux[..., i * size : (i + 1) * size] for i in AUX], axis=-1)
    blocks = Blocks(jnp.asarray([[3, 15], [6, 17]]), jnp.asarray([[0, 9], [0, 14]]))
    previous = jnp.asarray(rng.integers(0, VOCAB, (2, 2, BLOCK)))

    def found(cfg: DFlashConfig, params: Params, aux: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert isinstance(cfg, DSparkConfig)
        weights = {**old.bound, **params}
        hidden = forward_blocks(weights, cfg, jnp.asarray(batch.tokens), aux, blocks)
        chance = confidence(weights, cfg, hidden[:, 0, 1], previous[:, 0, 1])
        return block_logits(weights, cfg, hidden, previous), chance

    for new, had in zip(found(cfg, params, aux), found(old.cfg, old.params, of_old), strict=True):
        np.testing.assert_allclose(new, had, atol=TOLERANCE, rtol=TOLERANCE)
    # What the new columns hold can be trained: W1's are not zero.
    assert np.abs(params["markov_w1"][:, 6:]).min() > 0

    smaller = dataclasses.replace(cfg, markov_rank=4)
    fresh = init_random(trained_specs(smaller), jax.random.key(7), jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match="markov_rank: expected at least the 6 of the head"):
        continued_params(smaller, fresh, ids, old.cfg, old.params, ids)
    gated = dataclasses.replace(CONFIGS["gated"], markov_rank=9)
    fresh = init_random(trained_specs(gated), jax.random.key(7), jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match="markov_rank: expected the 6 .* in a gated Markov head"):
        continued_params(gated, fresh, ids, old.cfg, old.params, ids)
    other = dataclasses.replace(CONFIGS["vanilla"], aux_layers=(1, 3, 4))
    fresh = init_random(trained_specs(other), jax.random.key(7), jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match="aux_layers: expected 1, 2, 4 of .* got none of 2"):
        continued_params(other, fresh, ids, old.cfg, old.params, ids)


def test_tiles_change_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(CONFIGS["vanilla"], pair)
    batch = on_device(with_anchors(two_documents(), 4, np.random.default_rng(0)))
    assert batch.anchors.shape[1] < BLOCKS_PER_TILE
    aux = jax.random.normal(jax.random.key(2), (2, 24, 96))
    anchors = jnp.maximum(batch.anchors, 0)
    starts = jnp.take_along_axis(document_starts(batch.documents), anchors, axis=1)

    def gradient(tile: int) -> Params:
        monkeypatch.setattr("jaxspec.training.blocks.BLOCKS_PER_TILE", tile)

        def loss(params: Params) -> jax.Array:
            weights = {**head.bound, **params}
            blocks = Blocks(anchors, starts)
            return jnp.sum(forward_blocks(weights, head.cfg, batch.tokens, aux, blocks) ** 2)

        return jax.jit(jax.grad(loss))(head.params)

    whole, tiled = gradient(64), gradient(4)  # 6 blocks: a tile of 4, and one of 2 and padding
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), whole, tiled)


def test_anchors_are_tokens_of_answers_that_another_token_follows() -> None:
    batch = two_documents()
    batch.answers[0, 9:13] = True  # a document that begins with its answer
    allowed = [{*range(2, 8), *range(9, 20)}, {*range(5, 13), *range(16, 18)}]
    all_of_them = with_anchors(batch, 1, np.random.default_rng(0)).anchors
    assert all_of_them.shape == (2, 24)
    for row, expected in zip(all_of_them, allowed, strict=True):
        real = [int(a) for a in row if a >= 0]
        assert set(real) == expected and len(real) == len(expected)
        assert (row[len(real) :] == -1).all()
    few = [with_anchors(batch, 6, np.random.default_rng(seed)).anchors for seed in (0, 0, 1)]
    assert few[0].shape == (2, 4) and (few[0] >= 0).all()
    assert (few[0] == few[1]).all() and not (few[0] == few[2]).all()


@pytest.mark.parametrize(
    ("name", "argmax_weight"),
    slow_unless(
        [("vanilla", 0.25), ("whole", 0.0), ("dflash", 0.25)],
        itertools.product(["vanilla", "whole", "dflash"], [0.0, 0.25]),
    ),
)
def test_loss_equals_its_definition_block_by_block(
    pair: Pair, name: str, argmax_weight: float
) -> None:
    head, batch = make_head(CONFIGS[name], pair), two_documents(4)
    # The last anchors of a document have room for a part of a block.
    batch = batch._replace(anchors=np.asarray([[2, 7, 13, 19], [5, 12, 17, -1]], np.int32))
    cfg = TrainConfig(argmax_weight=argmax_weight, overlap_weight=0.9, decay=0.8)
    learned, K = training_pair(head, pair), head.cfg.block_capacity
    ids = ids_of(head.cfg, pair)
    device = on_device(batch)
    counts = block_counts(head.cfg, device)
    weights = {**head.params, **shared_weights(head.cfg, pair.target)}

    @jax.jit
    def ours() -> Any:
        return block_loss(cfg, learned, weights, observe_blocks(cfg, learned, device), counts)

    loss, sums = ours()

    terms: list[list[float]] = [[] for _ in range(K)]
    overlaps: list[list[float]] = [[] for _ in range(K)]
    hits: list[list[bool]] = [[] for _ in range(K)]
    chances: list[list[float]] = [[] for _ in range(K)]
    followed, accepted = 0, np.zeros(K)
    family = models.family(pair.target_cfg)

    @jax.jit  # a document by itself
    def of_document(tokens: jax.Array, length: jax.Array) -> Any:
        hidden, aux = target_states(pair.target, pair.target_cfg, tokens, length, AUX)
        return family.logits(pair.target, pair.target_cfg, hidden, REFERENCE_OPS), aux

    @jax.jit
    def of_block(tokens: jax.Array, aux: jax.Array, anchor: jax.Array, previous: jax.Array) -> Any:
        blocks = Blocks(anchor[None, None], jnp.zeros((1, 1), jnp.int32))
        hidden = forward_blocks(head.bound, head.cfg, tokens, aux, blocks)
        logits = block_logits(head.bound, head.cfg, hidden, previous[None, None])
        if isinstance(head.cfg, DSparkConfig):
            return logits[0, 0], confidence(head.bound, head.cfg, hidden[0, 0], previous)
        return logits[0, 0], jnp.zeros(K)

    for b in range(2):
        for anchor in batch.anchors[b]:
            if anchor < 0:
                continue
            inside = np.flatnonzero(batch.documents[b] == batch.documents[b, anchor])
            first, length = inside[0], len(inside)
            text = np.zeros((1, 24), np.int32)
            text[0, :length] = batch.tokens[b, inside]
            target_logits, aux = of_document(text, jnp.asarray([length], jnp.int32))
            target_logits = np.asarray(target_logits[0])
            at = anchor - first
            previous = text[0, np.minimum(at + np.arange(K), 23)]
            q_logits, chance = of_block(text, aux, jnp.int32(at), previous)
            q_logits, chance = np.asarray(q_logits), np.asarray(chance)
            right, is_greedy = True, True
            all_hits = []
            for k in range(K):
                if at + k + 1 >= length:
                    break
                p_all = softmax(target_logits[at + k])
                p_all = (1 - argmax_weight) * p_all
                p_all[target_logits[at + k].argmax()] += argmax_weight
                p, q = p_all[ids], softmax(q_logits[k])
                overlap = np.minimum(p, q).sum()
                cross_entropy = -(p * log_softmax(q_logits[k])).sum()
                term = 0.1 * cross_entropy + 0.9 * (1 - overlap)
                if isinstance(head.cfg, DSparkConfig):
                    term += -(overlap * np.log(chance[k]) + (1 - overlap) * np.log(1 - chance[k]))
                terms[k].append(term)
                overlaps[k].append(overlap)
                chances[k].append(chance[k])
                choice = target_logits[at + k].argmax()
                hits[k].append(bool(ids[q.argmax()] == choice))
                all_hits.append(hits[k][-1])
                if k < K - 1:
                    is_greedy = is_greedy and text[0, at + k + 1] == choice
            if len(all_hits) == K and is_greedy:
                followed += 1
                for k in range(K):
                    right = right and all_hits[k]
                    accepted[k] += right
    assert counts.tolist() == [len(of_draft) for of_draft in terms]
    assert len(terms[0]) == 7 and len(terms[K - 1]) < 7
    np.testing.assert_allclose(sums.overlap, [sum(o) for o in overlaps], rtol=1e-4)
    assert sums.matches.tolist() == [sum(h) for h in hits]
    assert int(sums.followed) == followed and sums.accepted.tolist() == accepted.tolist()
    expected = sum(0.8**k * float(np.mean(of_draft)) for k, of_draft in enumerate(terms))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_the_drafts_after_a_greedy_text_are_what_a_round_would_accept(pair: Pair) -> None:
    """With the target's own greedy text every whole block is followed."""
    head = make_head(CONFIGS["vanilla"], pair)
    family = models.family(pair.target_cfg)

    @jax.jit
    def next_tokens(tokens: jax.Array) -> jax.Array:
        lengths = jnp.full(1, 20, jnp.int32)
        hidden, _ = target_states(pair.target, pair.target_cfg, tokens, lengths, ())
        logits = family.logits(pair.target, pair.target_cfg, hidden, REFERENCE_OPS)
        return jnp.argmax(logits, axis=-1)

    text = np.full((1, 20), 9, np.int32)
    for p in range(3, 19):
        text[0, p + 1] = next_tokens(text)[0, p]
    batch = packed_batch(pack([text[0]], [4], [0.0], np.int32), [[0]], 20)
    batch = on_device(batch._replace(anchors=np.asarray([[4, 9, 15, 17]], np.int32)))
    learned, cfg = training_pair(head, pair), TrainConfig()
    weights = {**head.params, **shared_weights(head.cfg, pair.target)}
    side = jax.jit(lambda: observe_blocks(cfg, learned, batch))()
    counts = block_counts(head.cfg, batch)
    _, sums = jax.jit(lambda: block_loss(cfg, learned, weights, side, counts))()
    assert float(sums.followed) == 3  # the block after row 17 has no room for its last drafts
    assert counts.tolist() == [4, 4, 3, 3]


def some_chats(count: int = 24) -> Any:
    rng = np.random.default_rng(0)
    return pack(
        [rng.integers(8, VOCAB, n) for n in rng.integers(10, 25, count)],
        np.full(count, 3),
        np.zeros(count),
        np.uint16,
    )


CFG = TrainConfig(
    learning_rate=3e-3,
    warmup_steps=5,
    buckets=(48,),
    tokens_per_batch=96,
    tokens_per_block=4,
    pack=True,
    log_every=10,
)


@pytest.mark.usefixtures("standard_promotion")
def test_a_block_head_learns_on_packed_rows_and_its_confidence_too(pair: Pair) -> None:
    cfg = CONFIGS["vanilla"]
    params = initial_params(cfg, pair.target_cfg, pair.target, pair.draft_ids, 0)
    assert set(params) == set(trained_specs(cfg)) and "context_kv" not in params
    assert not np.any(params["markov_w2"].values) and not np.any(params["confidence"].values)
    before = jax.tree.map(np.array, params)
    learned = training_pair(Head(cfg, params, {}), pair)
    trained, history = train(
        CFG,
        learned,
        init_train_state(CFG, cfg, params),
        some_chats(),
        some_chats(),
        mesh=data_mesh(1),
        budget=Budget(60, time.monotonic() + 1e6),
        save=lambda state, step: {},
        log=lambda line: None,
    )
    steps = [record for record in history if "loss" in record]
    overlaps = [record["overlap"] for record in steps]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1, [record["loss"] for record in steps]
    # The draft's tokens have 0.41 of the target's probability.
    assert overlaps[-1][0] > overlaps[0][0] + 0.05, overlaps
    # One half, where it starts, costs log 2 = 0.693; the entropy of 0.41 is 0.677.
    assert steps[-1]["confidence"][0] < 0.68
    assert history[-1]["held_out_overlap"][0] > steps[0]["overlap"][0]
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, trained.params)
    assert min(jax.tree.leaves(moved)) > 0  # every weight learns


def test_the_saved_fc_reads_features_as_they_are(pair: Pair) -> None:
    """Training reads features divided by their scale; the saved weights do it themselves."""
    cfg = CONFIGS["vanilla"]
    head = make_head(cfg, pair)
    learned = training_pair(head, pair)
    scale = feature_scale(learned, some_chats())
    assert scale.shape == (96,) and bool(jnp.all(scale > 0))
    learned = dataclasses.replace(learned, feature_scale=scale)
    trained = scaled_params(learned, head.params)
    np.testing.assert_allclose(
        trained["fc"].values, head.params["fc"].values * np.asarray(scale)[:, None], rtol=1e-6
    )
    saved = unscaled_params(learned, trained)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), saved, head.params
    )
    batch = on_device(packed_batch(some_chats(), [[0], [1]], 24))
    lengths = jnp.sum((batch.documents >= 0).astype(jnp.int32), axis=1)
    _, aux = target_states(pair.target, pair.target_cfg, batch.tokens, lengths, AUX)
    assert aux is not None
    real = np.asarray(aux)[np.asarray(batch.documents) >= 0]
    spread = np.median(np.abs(real / np.asarray(scale)), axis=0)
    assert spread.min() > 0.2 and spread.max() < 2.0  # 0.67 of a normal one
    weights = compute_weights(learned, trained, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(weights["fc"].values, head.params["fc"].values, rtol=1e-5, atol=1e-7)
    plain = dataclasses.replace(learned, feature_scale=None)
    as_they_are = compute_weights(plain, trained, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(as_they_are["fc"].values, trained["fc"].values)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_micro_batches_of_blocks_equal_one_batch(pair: Pair) -> None:
    draft, mesh = CONFIGS["rnn"], data_mesh(1)
    params = initial_params(draft, pair.target_cfg, pair.target, pair.draft_ids, 0)
    batch = prepare(CFG, draft, packed_batch(some_chats(), [[0, 1], [2], [3], [4, 5]], 48), 0)
    results = []
    for parts in (1, 4):
        cfg = dataclasses.replace(CFG, accumulation=parts)
        learned = training_pair(Head(draft, params, {}), pair)
        state: TrainState = init_train_state(cfg, draft, params)
        state, learned = replicate(mesh, (state, learned))
        results.append(train_step(cfg, mesh, state, learned, place(mesh, batch), np.float32(0.0)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        results[0][0],
        results[1][0],
    )


def test_a_new_head_has_the_shape_that_its_settings_name(pair: Pair) -> None:
    from jaxspec.training.dry_run import dry_target

    target, counts = dry_target("float32"), np.arange(128)
    head = HeadConfig("dspark", draft_vocab_size=40, aux_layers=(1, 2, 3), block_drafts=5, window=9)
    cfg = block_config(head, target, counts)
    assert isinstance(cfg, DSparkConfig) and cfg.method == "dspark" and cfg.sample_from_anchor
    assert cfg.block_capacity == cfg.draft_block_size == 5 and cfg.windows == (9, 9)
    assert cfg.mask_token_id == 0 and cfg.own_lm_head  # the special token that chats lack
    flash = block_config(dataclasses.replace(head, method="dflash"), target, counts)
    assert not isinstance(flash, DSparkConfig) and flash.block_capacity == 5
    assert flash.draft_block_size == 6 and not flash.sample_from_anchor
    whole = block_config(dataclasses.replace(head, draft_vocab_size=128), target, counts)
    assert whole.tied_lm_head and not whole.own_lm_head and not whole.maps_vocabulary


def test_expit_of_the_logit_is_the_confidence() -> None:
    """The binary cross entropy takes the logit, so that a sure head keeps its gradient."""
    from jaxspec.training.losses import binary_cross_entropy

    logit, chance = np.float32(1.5), np.float32(0.25)
    expected = -(chance * np.log(expit(logit)) + (1 - chance) * np.log(1 - expit(logit)))
    found = binary_cross_entropy(jnp.float32(logit), jnp.float32(chance))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_draft_past_its_document_does_not_count() -> None:
    batch = two_documents()._replace(anchors=np.asarray([[7, 20], [13, 18]], np.int32))
    row, counted = drafted_rows(CONFIGS["vanilla"], on_device(batch))
    assert counted.tolist() == [
        [[True, False, False, False], [False] * 4],
        [[False] * 4, [False] * 4],
    ]
    assert row[0, 0].tolist() == [7, 8, 9, 10]
