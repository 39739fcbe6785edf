"""Propose: the compiled loop equals an eager, step-by-step draft written here with dense
bookkeeping, in every column."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import PAD_SLOT, FullCache
from jaxspec.cache.metadata import AttentionMetadata, rebuild_draft_metadata
from jaxspec.config import REFERENCE_OPS, Ops, RoundConfig
from jaxspec.drafts import autoregressive as propose_module
from jaxspec.drafts.autoregressive import (
    DraftInputs,
    Proposal,
    draft_step,
    first_step,
    next_step,
    propose,
)
from jaxspec.drafts.families import layered, step_family
from jaxspec.layers.context import Pass
from jaxspec.sampling.state import gumbel_noise
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.support.slow import slow_unless
from tests.support.tiny import (
    ATTENTION,
    HIDDEN,
    METHODS,
    VOCAB,
    Model,
    block_tables,
    sampling_state,
    tiny_model,
)
from tests.support.toys import ToyDraft, toy_config

LIMIT, BATCH, IDLE = 24, 5, 3
TEMPERATURES = (0.0, 1.0, 0.6, 1.0, 1.0)
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}  # float32, sums in another order


def config(model: Model, K: int, rule: str = "probabilistic", **changes: Any) -> RoundConfig:
    return model.round_config(K, block_size=4, max_model_len=LIMIT, rule=rule, **changes)


def inputs_for(cfg: RoundConfig, seed: int = 0) -> tuple[DraftInputs, Any]:
    """Pending windows of every size from 1 to K+1, an idle row, a row whose steps run into
    max_model_len; NaN where nothing was cached."""
    K, rng = cfg.num_speculative_tokens, np.random.default_rng(seed)
    seq_lens = np.array([K + 1, 9, 16, 7, LIMIT - 1], np.int32)
    pending = np.array([K + 1, 1, min(2, K + 1), 0, K], np.int32)
    tables, num_blocks = block_tables(BATCH, cfg, shuffle_seed=seed, guard=2)
    (table,) = cfg.draft_tables(tables)
    shape = (num_blocks[0], cfg.block_size, ATTENTION.num_kv_heads, ATTENTION.head_dim)
    caches = []
    for _ in range(cfg.draft.num_layers):
        k, v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        for b in range(BATCH):
            for p in range(seq_lens[b] - pending[b]):
                slot = table[b, p // shape[1]], p % shape[1]
                k[slot], v[slot] = rng.normal(size=shape[2:]), rng.normal(size=shape[2:])
        caches.append(FullCache(jnp.asarray(k), jnp.asarray(v)))
    width = HIDDEN * max(1, len(cfg.draft.aux_layers))
    arrays = DraftInputs(
        seq_lens=jnp.asarray(seq_lens),
        pending_tokens=jnp.asarray(rng.integers(0, VOCAB, (BATCH, K + 1)), jnp.int32),
        pending_hidden=jnp.asarray(rng.normal(size=(BATCH, K + 1, width)), jnp.float32),
        num_pending=jnp.asarray(pending),
        block_tables=(jnp.asarray(table),),
        sampling=jax.tree.map(jnp.asarray, sampling_state(range(10, 10 + BATCH), TEMPERATURES)),
    )
    return arrays, tuple(caches)


def dense(cache: FullCache, table: np.ndarray) -> FullCache:
    """One request's keys and values in order of position, as a cache of a single block."""
    return FullCache(*(x[table].reshape(1, -1, *x.shape[2:]) for x in (cache.k, cache.v)))


def dense_pass(first: int, rows: int, window: int | None) -> Pass:
    """A pass over rows at positions first, first + 1, ... of one request whose slots are its
    positions."""
    positions = np.minimum(first + np.arange(rows), LIMIT)
    length = min(first + rows, LIMIT)
    seen_from = np.zeros(rows) if window is None else np.maximum(positions - window + 1, 0)
    as_int = lambda x: jnp.asarray(np.atleast_1d(x), jnp.int32)  # noqa: E731
    metadata = AttentionMetadata(
        positions=as_int(positions)[None],
        seq_lens=as_int(length),
        slot_mapping=as_int(np.where(positions < LIMIT, positions, PAD_SLOT))[None],
        block_table=jnp.zeros((1, 1), jnp.int32),
        window_start=as_int(seen_from)[None],
        num_pages=as_int(1),
    )
    return Pass((metadata,), REFERENCE_OPS)


@partial(jax.jit, static_argnums=0)
def one_pass(
    cfg: Any,
    params: Any,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: Any,
) -> tuple[Any, Any, Any]:
    """The family's own forward and head on all rows: logits [batch, rows, Vd], feedback and
    caches."""
    family = step_family(cfg)
    out = family.forward(params, cfg, tokens, hidden, pass_, caches)
    return family.logits(params, cfg, out.head_input, pass_.ops), out.feedback, out.caches


noise_of = jax.jit(gumbel_noise, static_argnums=(1, 4))


def eager_draft(
    cfg: RoundConfig, params: Any, inputs: DraftInputs, caches: Any, b: int
) -> tuple[list[int], np.ndarray, Any, list[Any]]:
    """Request b alone, one draft pass after another: tokens [K], logits [K, Vd], the caches, and
    what hidden state each step feeds back."""
    own: Any = cfg.draft  # EAGLE's
    family, K = step_family(own), cfg.num_speculative_tokens
    length, n = int(inputs.seq_lens[b]), int(inputs.num_pending[b])
    temperature, keys = float(inputs.sampling.temperature[b]), inputs.sampling.keys[b : b + 1]
    caches = tuple(dense(cache, np.asarray(inputs.block_tables[0][b])) for cache in caches)
    tokens = inputs.pending_tokens[b : b + 1, :n]
    hidden = family.fuse(params, cfg.draft, inputs.pending_hidden[b : b + 1, :n], REFERENCE_OPS)
    pass_ = dense_pass(length - n, n, own.sliding_window)
    drawn, all_logits, fed_back = [], [], []
    for step in range(K):
        logits, feedback, caches = one_pass(cfg.draft, params, tokens, hidden, pass_, caches)
        logits = np.asarray(logits)[0, -1]
        scores = logits
        if temperature and cfg.draft_sampling == "probabilistic" and cfg.sampled:
            if cfg.rule == "strict":  # the noise of the token's own position, by the target's ids
                noise = noise_of(
                    keys, "sample", jnp.asarray([length + 1 + step], jnp.int32), 0, VOCAB
                )
                noise = noise[:, params["draft_to_target"]] if own.maps_vocabulary else noise
            else:
                noise = noise_of(keys, "draft", jnp.asarray([length], jnp.int32), step, logits.size)
            scores = logits / np.float32(temperature) + np.asarray(noise)[0]
        token = int(np.argmax(scores))
        token = int(params["draft_to_target"][token]) if own.maps_vocabulary else token
        drawn.append(token)
        all_logits.append(logits)
        tokens, hidden = jnp.asarray([[token]], jnp.int32), feedback[:, -1:]
        fed_back.append(np.asarray(hidden[0, 0]))
        pass_ = dense_pass(min(length + step, LIMIT), 1, own.sliding_window)
    return drawn, np.stack(all_logits), caches, fed_back


def compiled(cfg: RoundConfig) -> Any:
    """propose as a fresh program, so that what a test patches is traced."""
    return jax.jit(
        lambda params, inputs, caches, buffers=None: propose(cfg, params, inputs, caches, buffers)
    )


def assert_equals_eager_draft(
    cfg: RoundConfig, params: Any, carry: Any, inputs: DraftInputs, caches: Any
) -> None:
    for b in set(range(BATCH)) - {IDLE}:
        tokens, logits, dense_caches, fed_back = eager_draft(cfg, params, inputs, caches, b)
        assert carry.proposal.draft_tokens[b].tolist() == tokens
        if carry.proposal.draft_logits is not None:
            np.testing.assert_allclose(carry.proposal.draft_logits[b], logits, **TOLERANCE)
        for got, expected in zip(carry.caches, dense_caches, strict=True):
            got = dense(got, np.asarray(inputs.block_tables[0][b]))
            for x, y in ((got.k, expected.k), (got.v, expected.v)):
                np.testing.assert_allclose(x, y, **TOLERANCE)  # NaN at the same, unwritten slots
        assert int(carry.token[b]) == tokens[-1]
        np.testing.assert_allclose(carry.hidden[b, 0], fed_back[-1], **TOLERANCE)


def assert_only_this_proposals_slots_changed(
    cfg: RoundConfig, carry: Any, inputs: DraftInputs, caches: Any
) -> None:
    """Step 0's pending rows and one row of each later step; nothing past step K-1's slot, no idle
    or guard block."""
    size, expected = cfg.block_size, set()
    for length, n, table in zip(
        inputs.seq_lens.tolist(),
        inputs.num_pending.tolist(),
        inputs.block_tables[0].tolist(),
        strict=True,
    ):
        last = min(length + cfg.num_speculative_tokens - 1, LIMIT) if n else 0
        expected |= {table[p // size] * size + p % size for p in range(length - n, last)}
    for before, after in zip(jax.tree.leaves(caches), jax.tree.leaves(carry.caches), strict=True):
        old, new = (
            np.asarray(x).reshape(-1, ATTENTION.num_kv_heads * ATTENTION.head_dim)
            for x in (before, after)
        )
        same = (old == new) | (np.isnan(old) & np.isnan(new))
        assert set(np.flatnonzero(~same.all(axis=1)).tolist()) == expected


WINDOWS = {1: None, 2: 3, 3: None, 4: 3, 5: None}


@pytest.mark.parametrize(
    ("method", "K"),
    slow_unless(
        [("eagle", 1), ("eagle", 4), ("eagle3", 2)],
        itertools.product(METHODS, range(1, 6)),
    ),
)
def test_equals_an_eager_draft_in_every_column(method: str, K: int) -> None:
    """Tokens, logits, caches and feedback; greedy and sampled rows, sliding windows, max_model_len;
    into poisoned buffers. And no slot of the cache changes but those of the proposal's own rows."""
    model = tiny_model(method, window=WINDOWS[K])
    cfg = config(model, K)
    inputs, caches = inputs_for(cfg)
    poisoned = Proposal(
        jnp.full((BATCH, K), -7, jnp.int32),
        jnp.full((BATCH, K, layered(cfg.draft).draft_vocab_size), jnp.nan, jnp.float32),
    )
    carry = compiled(cfg)(model.params["draft"], inputs, caches, poisoned)
    assert (
        carry.proposal.draft_tokens.shape == (BATCH, K)
        and carry.proposal.draft_logits.dtype == jnp.float32
    )
    assert_equals_eager_draft(cfg, model.params["draft"], carry, inputs, caches)
    assert_only_this_proposals_slots_changed(cfg, carry, inputs, caches)


@pytest.mark.parametrize(
    ("method", "rule", "changes"),
    [
        ("eagle3", "strict", {}),
        ("eagle", "strict", {}),
        ("eagle3", "block", {"draft_sampling": "greedy"}),
        ("eagle", "probabilistic", {"sampled": False}),
    ],
)
def test_other_ways_to_draw_equal_the_eager_draft_too(
    method: str, rule: str, changes: dict[str, Any]
) -> None:
    """The strict rule shares the target's noise; a greedy draft has none. Neither keeps logits."""
    model = tiny_model(method)
    cfg = config(model, 3, rule, **changes)
    inputs, caches = inputs_for(cfg)
    carry = compiled(cfg)(model.params["draft"], inputs, caches)
    assert carry.proposal.draft_logits is None
    assert_equals_eager_draft(cfg, model.params["draft"], carry, inputs, caches)


def test_the_carry_is_that_of_the_last_step() -> None:
    """Driven by hand, the carry after steps 0 .. K-1 and the one that propose returns hold the same
    token and hidden state."""
    K, model = 4, tiny_model("eagle3")
    cfg = config(model, K)
    inputs, caches = inputs_for(cfg)
    params = model.params["draft"]
    carry = jax.jit(partial(first_step, cfg))(params, inputs, caches)
    for step in range(1, K):
        carry = jax.jit(partial(next_step, cfg))(params, inputs, step, carry)
    whole = compiled(cfg)(params, inputs, caches)
    np.testing.assert_allclose(whole.hidden, carry.hidden, **TOLERANCE)
    assert np.array_equal(whole.token, carry.token) and np.array_equal(
        whole.token, whole.proposal.draft_tokens[:, -1]
    )


@pytest.mark.parametrize("method", ["eagle"])
def test_stale_metadata_changes_the_compiled_loops_logits(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With step 1's metadata in every later step, columns 0 and 1 still agree with the eager draft
    and later ones do not."""

    def step_1_always(
        groups: Any, block_tables: Any, seq_lens: Any, num_pending: Any, step: Any, **options: Any
    ) -> tuple[AttentionMetadata, ...]:
        return rebuild_draft_metadata(groups, block_tables, seq_lens, num_pending, 1, **options)

    monkeypatch.setattr(propose_module, "rebuild_draft_metadata", step_1_always)
    model = tiny_model(method)
    cfg = config(model, 4)
    inputs, caches = inputs_for(cfg)
    inputs = replace(
        inputs, sampling=replace(inputs.sampling, temperature=jnp.zeros(BATCH, jnp.float32))
    )
    stale = compiled(cfg)(model.params["draft"], inputs, caches)
    for b in (0, 1, 2):
        tokens, logits, *_ = eager_draft(cfg, model.params["draft"], inputs, caches, b)
        assert stale.proposal.draft_tokens[b, :2].tolist() == tokens[:2]
        np.testing.assert_allclose(stale.proposal.draft_logits[b, :2], logits[:2], **TOLERANCE)
        assert np.abs(stale.proposal.draft_logits[b, 2:] - logits[2:]).max(axis=1).min() > 1e-3


@needs_mosaic
@pytest.mark.parametrize(("method", "window"), [("eagle3", 3), ("eagle", None)])
def test_the_kernels_metadata_changes_nothing(method: str, window: int | None) -> None:
    """Every pass of the draft with the kernel's metadata and tables of the rotation, to the bit."""
    model = tiny_model(method, window=window)
    cfg = config(model, 3)
    inputs, caches = inputs_for(cfg)
    plain = compiled(cfg)(model.params["draft"], inputs, caches)
    with interpreted():
        ours = compiled(replace(cfg, ops=Ops(step_metadata="mosaic_gpu")))(
            model.params["draft"], inputs, caches
        )
    jax.tree.map(np.testing.assert_array_equal, plain, ours)


@pytest.mark.parametrize("method", METHODS)
def test_draft_step_can_be_called_alone(method: str) -> None:
    model = tiny_model(method)
    cfg = config(model, 2)
    inputs, caches = inputs_for(cfg)
    params, family = model.params["draft"], step_family(layered(cfg.draft))
    caches = tuple(dense(cache, np.asarray(inputs.block_tables[0][1])) for cache in caches)
    hidden = family.fuse(params, cfg.draft, inputs.pending_hidden[1:2, :2], REFERENCE_OPS)
    pass_ = dense_pass(7, 2, None)
    all_logits, all_feedback, _ = one_pass(
        cfg.draft, params, inputs.pending_tokens[1:2, :2], hidden, pass_, caches
    )
    for row in (0, 1):
        one_row = replace(pass_, last_row=jnp.asarray([row], jnp.int32))
        logits, feedback, _ = draft_step(
            params, inputs.pending_tokens[1:2, :2], hidden, one_row, caches, cfg=cfg.draft
        )
        np.testing.assert_allclose(logits, all_logits[:, row], **TOLERANCE)
        np.testing.assert_allclose(feedback, all_feedback[:, row : row + 1], **TOLERANCE)


# ---- the shape of the program


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def traced(cfg: RoundConfig, model: Model) -> list[Any]:
    inputs, caches = inputs_for(cfg)
    jaxpr = jax.make_jaxpr(lambda *args: propose(cfg, *args).proposal)(
        model.params["draft"], inputs, caches
    )
    return list(equations(jaxpr.jaxpr))


def loops(found: list[Any]) -> list[Any]:
    return [e for e in found if e.primitive.name in ("scan", "while")]


@pytest.mark.parametrize("method", METHODS)
def test_one_draft_token_traces_no_loop(method: str) -> None:
    model = tiny_model(method)
    assert not loops(traced(config(model, 1), model))


@pytest.mark.parametrize("K", [3, 4, 5])
@pytest.mark.parametrize("method", METHODS)
def test_more_draft_tokens_trace_one_loop_of_k_minus_1_trips(method: str, K: int) -> None:
    model = tiny_model(method)
    found = loops(traced(config(model, K), model))
    assert [(e.primitive.name, e.params["length"]) for e in found] == [("scan", K - 1)]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"draft_sampling": "greedy"}, False),
        ({"sampled": False}, False),
        ({"rule": "strict"}, False),
    ],
)
def test_a_buffer_of_draft_logits_exists_only_where_q_is_read(
    changes: dict[str, Any], kept: bool
) -> None:
    K, model = 3, tiny_model("eagle3")
    cfg = replace(config(model, K), **changes)
    shapes = {
        v.aval.shape
        for e in traced(cfg, model)
        for v in (*e.invars, *e.outvars)
        if hasattr(v.aval, "shape")
    }
    assert ((BATCH, K, layered(cfg.draft).draft_vocab_size) in shapes) == kept


def test_no_host_callback_is_traced() -> None:
    model = tiny_model("eagle3")
    assert not [e for e in traced(config(model, 3), model) if "callback" in e.primitive.name]


# ---- cases that vLLM's suite states


@pytest.mark.parametrize(("K", "expected"), [(1, [[42], [60]]), (3, [[42, 43, 44], [60, 61, 62]])])
@pytest.mark.usefixtures("toy_families")
def test_peaked_logits_give_the_peaks(K: int, expected: list[list[int]]) -> None:
    """Logits of step i peak at 42 + i and 60 + i, for requests of 5 and 3 tokens."""
    cfg = toy_config(100, K, draft=ToyDraft(100, method="replay"))
    text = np.zeros((2, 16), np.int32)
    text[0, 6:10], text[1, 4:8] = range(42, 46), range(60, 64)
    inputs = DraftInputs(
        seq_lens=jnp.asarray([5, 3], jnp.int32),
        pending_tokens=jnp.full((2, K + 1), 9, jnp.int32),
        pending_hidden=jnp.zeros((2, K + 1, 1), jnp.float32),
        num_pending=jnp.ones(2, jnp.int32),
        block_tables=(jnp.zeros((2, 1), jnp.int32),),
        sampling=jax.tree.map(jnp.asarray, sampling_state([0, 0])),
    )
    carry = propose(cfg, {"text": jnp.asarray(text)}, inputs, ())
    assert carry.proposal.draft_tokens.tolist() == expected
    assert np.asarray(carry.proposal.draft_logits).argmax(-1).tolist() == expected
