"""Sample, verify and score on pieces of the vocabulary, and compare with whole rows.

    python -m tests.parallel.vocab_shards_on_devices PART

PART: "usual" has each rule and each other kind of case on four devices, "rest" the other rounds,
and processors and the op on two devices.
Prints a line for each case. Tokens and counts have to be equal, scores equal to 1e-5, and every
device has to have the same bits of each result.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

from jaxspec import drafts, models
from jaxspec.config import RoundConfig, SamplingFeatures
from jaxspec.decode.prefill import prefill
from jaxspec.decode.round import decode_round
from jaxspec.decode.state import DecodeState, init_state
from jaxspec.drafts import families
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.sampling.logits import process_target_logits, state_axes
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import PROCESSORS
from jaxspec.sampling.processors.processor import Window
from pallas_kernels.rejection_sampling import RULES, Inputs, rejection_sample
from pallas_kernels.vocab_shards import WHOLE, VocabShards
from tests.sampling.test_logits_processing import REQUESTS, SAMPLED, state_of
from tests.support import toys
from tests.support.toys import ToyDraft, toy_config

V, DRAFT_V, K, ROUNDS, PROMPT_LENGTH = 40, 24, 3, 4, 6
AXIS = "model"
CUT, SAME = PartitionSpec(None, AXIS), PartitionSpec()
Specs = Any  # a pytree of PartitionSpec


def run(count: int, function: Callable[..., Any], specs: Specs, *arguments: Any) -> Any:
    """Run function(shards, *arguments) on `count` devices; results [count, ...] of each of them."""
    if count == 1:
        return jax.tree.map(
            lambda x: np.asarray(x)[None], jax.jit(partial(function, WHOLE))(*arguments)
        )

    def on_device(*pieces: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(VocabShards(AXIS, count), *pieces))

    mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,))
    program = jax.shard_map(
        on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), check_vma=False
    )
    return jax.tree.map(np.asarray, jax.jit(program)(*arguments))


def compare(
    function: Callable[..., Any], specs: Specs, *arguments: Any, counts: Sequence[int]
) -> Any:
    """Compare these numbers of devices with one, and return one device's results."""
    whole = run(1, function, specs, *arguments)
    for count in counts:
        for (path, found), expected in zip(
            jax.tree.leaves_with_path(run(count, function, specs, *arguments)),
            jax.tree.leaves(whole),
            strict=True,
        ):
            name = f"{count} devices, {jax.tree_util.keystr(path)}"
            for device in found:
                np.testing.assert_array_equal(device, found[0], err_msg=f"{name}: devices differ")
            if found.dtype == np.float32:
                np.testing.assert_allclose(found[0], expected[0], 1e-5, 1e-5, err_msg=name)
            else:
                np.testing.assert_array_equal(found[0], expected[0], err_msg=name)
    return jax.tree.map(lambda x: x[0], whole)


def table(seed: int, columns: int = V) -> np.ndarray:
    """Logits after each token. Halves, so that tokens of several devices have the same."""
    values = 2 * np.random.default_rng(seed).normal(size=(V, columns))
    return (np.round(2 * values) / 2).astype(np.float32)


def maps(seed: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """A draft's tokens in an order of their own: draft_to_target and target_to_draft."""
    ids = np.random.default_rng(seed).permutation(V)[:DRAFT_V].astype(np.int32)
    back = np.full(V, -1, np.int32)
    back[ids] = np.arange(DRAFT_V)
    return ids, back


# ---- rounds of the toy models, whose logits are rows of a table


def configs(part: str) -> Iterator[RoundConfig]:
    """Each rule, greedy and sampled, each vocabulary of a draft, each kind of scores."""
    every = frozenset(p.name for p in PROCESSORS)
    plain = partial(toy_config, V, 0, draft=None, draft_groups=())
    mapped = ToyDraft(V, own_vocab_size=DRAFT_V)
    rates = (0.7,) * K
    usual = (
        (plain(), SamplingFeatures(sampled=False, prompt_logprobs=True)),
        (toy_config(V, K, "strict", "greedy"), SamplingFeatures(all_logprobs=True, logprobs=True)),
        (toy_config(V, K, draft=mapped), SamplingFeatures(logprobs=True, prompt_logprobs=True)),
        (toy_config(V, K, "block", draft=mapped), SamplingFeatures(processors=every)),
        (toy_config(V, K, draft=mapped), SamplingFeatures(sampled=False, processors=every)),
        (toy_config(V, K, "synthetic", acceptance_rates=rates), SamplingFeatures()),
    )
    rest = (
        (plain(), SamplingFeatures(processors=every, logprobs=True)),
        (toy_config(V, K), SamplingFeatures(sampled=False, logprobs=True)),
        (toy_config(V, K, "strict", draft=mapped), SamplingFeatures(processors=every)),
        (toy_config(V, K), SamplingFeatures(processors=every)),
        (toy_config(V, K, draft_sampling="greedy"), SamplingFeatures()),
        (toy_config(V, K, acceptance_rates=rates), SamplingFeatures()),
        (toy_config(V, K, "block"), SamplingFeatures()),
    )
    for cfg, features in usual if part == "usual" else rest:
        yield cfg.with_features(features)


def requests_of(cfg: RoundConfig) -> list[SamplingParams]:
    """As many kinds of requests as these rounds serve."""
    if cfg.processors:
        return REQUESTS if cfg.sampled else [replace(p, temperature=0.0) for p in REQUESTS]
    return [
        SAMPLED() if i % 4 and cfg.sampled else replace(SAMPLED(), temperature=0.0)
        for i in range(12)
    ]


def rounds(
    cfg: RoundConfig, shards: VocabShards, params: Any, state: DecodeState, chunk: PromptChunk
) -> Any:
    """Prefill, then some rounds: all that they return."""
    cfg = replace(cfg, vocab_shards=shards)
    tables = (jnp.zeros((len(chunk.tokens), 1), jnp.int32),) * len(cfg.cache_groups)
    first, state = prefill(cfg, params, state, tables, chunk)

    def step(state: DecodeState, _: None) -> Any:
        verification, state = decode_round(cfg, params, state, tables)
        return state, verification

    return first, lax.scan(step, state, None, ROUNDS)[1]


def rounds_arguments(cfg: RoundConfig) -> tuple[Specs, tuple[Any, ...]]:
    """The specs and the arguments of `rounds`."""
    requests = requests_of(cfg)
    batch, rng = len(requests), np.random.default_rng(4)
    target = table(0)
    target[5, 3] = np.inf  # a row that overflows, on the first device
    params: dict[str, Any] = {"target": {"table": target}}
    if cfg.draft is not None:
        likely = table(0) + (rng.random((V, V)) < 0.1) * table(1)
        ids, back = maps()
        is_mapped = families.layered(cfg.draft).maps_vocabulary
        params["draft"] = {"table": likely[:, ids] if is_mapped else likely}
        if is_mapped:
            params["draft"] |= {"draft_to_target": ids, "target_to_draft": back}
    state = init_state(
        cfg,
        state_of(requests, [[]] * batch, cfg),
        jnp.full(batch, 1000, jnp.int32),
        jnp.full((batch, 1), -1, jnp.int32),
        (1,) * len(cfg.cache_groups),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    tokens = rng.integers(6, V, (batch, PROMPT_LENGTH)).astype(np.int32)
    tokens[1, -1] = 5
    full = partial(np.full, batch, dtype=np.int32)
    chunk = PromptChunk(tokens, full(0), full(PROMPT_LENGTH), full(-1))  # type: ignore[arg-type]
    specs = jax.tree.map(lambda _: SAME, (params, state, chunk))
    for model in specs[0].values():
        model["table"] = CUT
    axes = jax.tree.map(
        lambda names: PartitionSpec(*(AXIS if name == "vocab" else None for name in names)),
        state_axes(state.sampling),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return (specs[0], replace(specs[1], sampling=axes), specs[2]), (params, state, chunk)


def exchanges(cfg: RoundConfig) -> int:
    """The number of all-gathers in a round on 2 devices, loops counted by their trips."""
    specs, arguments = rounds_arguments(cfg)

    def one(params: Any, state: DecodeState, chunk: PromptChunk) -> Any:
        shard_cfg = replace(cfg, vocab_shards=VocabShards(AXIS, 2))
        tables = (jnp.zeros((len(chunk.tokens), 1), jnp.int32),) * len(cfg.cache_groups)
        return decode_round(shard_cfg, params, state, tables)[0]

    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    program = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=SAME, check_vma=False)

    def count(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            assert eqn.primitive.name not in ("psum", "all_reduce", "while"), eqn
            total += eqn.primitive.name == "all_gather"
            inner = sum(count(getattr(x, "jaxpr", x)) for x in jaxprs_in_params(eqn.params))
            total += inner * eqn.params.get("length", 1)
        return total

    return count(jax.make_jaxpr(program)(*arguments).jaxpr)


# ---- the op, with logits that models seldom have


def op_inputs(rule: str, q: str, batch: int = 96) -> tuple[Specs, Inputs]:
    """Rejection sampling of logits with NaN, infinities and equal values, drafts out of range, and
    uniforms close to 1."""
    rng = np.random.default_rng(9)
    target = np.round(3 * rng.normal(size=(batch, K + 1, V))).astype(np.float32)
    draft = np.round(2 * target[:, :K] + rng.normal(size=(batch, K, V))).astype(np.float32) / 2
    draft[:32] = target[:32, :K]  # p equals q: rounding leaves no mass
    target[32:40, :, 10:] = -np.inf  # all mass on the first device
    target[40:44] = -np.inf
    target[44:48, :, 12:25] = np.nan
    target[48:50, 1, 33] = np.inf
    draft[50:56, :, :20] = -np.inf
    likely = np.argmax(np.nan_to_num(target[:, :K], nan=-np.inf), axis=-1)
    drawn = np.where(rng.random((batch, K)) < 0.5, likely, rng.integers(-1, V + 2, (batch, K)))
    uniforms = rng.random((batch, K), np.float32)
    uniforms[:32] = np.float32(1 - 2.0**-24)
    ids, back = maps()
    inputs = Inputs(
        target_logits=jnp.asarray(target),
        draft_tokens=jnp.asarray(drawn, jnp.int32),
        draft_logits=None
        if q == "one-hot"
        else jnp.asarray(draft[..., ids] if q == "mapped" else draft),
        target_to_draft=jnp.asarray(back) if q == "mapped" else None,
        greedy=jnp.asarray(rng.random(batch) < 0.2),
        active=jnp.asarray(rng.random(batch) < 0.9),
        uniforms=jnp.asarray(uniforms),
        recover_noise=jnp.asarray(rng.gumbel(size=(batch, V)), jnp.float32),
        acceptance_rates=jnp.full(K, 0.6) if rule == "synthetic" else None,
        temperature=jnp.asarray(rng.uniform(0.5, 1.5, batch), jnp.float32),
        rule=rule,  # type: ignore[arg-type]
    )
    specs = jax.tree.map(lambda _: SAME, inputs)
    piece = PartitionSpec(None, None, AXIS)
    cut: Any = {"target_logits": piece, "recover_noise": CUT}
    if inputs.draft_logits is not None:
        cut["draft_logits"] = piece
    return replace(specs, **cut), inputs


def judged(shards: VocabShards, cases: dict[str, Inputs]) -> Any:
    return {name: rejection_sample(replace(case, shards=shards)) for name, case in cases.items()}


# ---- processors, one after another


def processed(shards: VocabShards, states: Any, logits: jax.Array, drafts: jax.Array) -> Any:
    """Return the whole rows after each processor alone."""
    window = Window(jnp.full(len(drafts), 9, jnp.int32), drafts, shards)
    return {
        name: shards.whole_rows(
            process_target_logits(
                SamplingFeatures(processors=frozenset({name})), logits, state, window
            )
        )
        for name, state in states.items()
    }


def check_processors(counts: Sequence[int]) -> None:
    rng = np.random.default_rng(3)
    logits = table(6)[rng.integers(0, V, (len(REQUESTS), K + 1))]
    choice = rng.choice([5, 5, 30, 7, 8, 12, 33], (len(REQUESTS), K)).astype(np.int32)
    texts = [[5, 30, 5, 11, 5][: i % 6] for i in range(len(REQUESTS))]
    states, specs = {}, {}
    for processor in PROCESSORS:
        features = SamplingFeatures(processors=frozenset({processor.name}))
        states[processor.name] = state_of(REQUESTS, texts, features)
        specs[processor.name] = jax.tree.map(
            lambda names: PartitionSpec(*(AXIS if name == "vocab" else None for name in names)),
            state_axes(states[processor.name]),
            is_leaf=lambda x: isinstance(x, tuple),
        )
    found = compare(
        processed,
        (specs, PartitionSpec(None, None, AXIS), SAME),
        states,
        logits,
        choice,
        counts=counts,
    )
    for name, rows in found.items():
        plain = (
            logits
            / np.where(states[name].temperature == 0, 1, states[name].temperature)[:, None, None]
        )
        assert not np.array_equal(rows, plain), f"{name}: expected it to change a row"


def main() -> None:
    assert len(jax.devices()) == 4
    for name, family in toys.TARGET_FAMILIES.items():
        models.FAMILIES[name] = family  # type: ignore[assignment]
    for name, family in toys.DRAFT_FAMILIES.items():
        drafts.FAMILIES[name] = family  # type: ignore[assignment]
    (part,) = sys.argv[1:]
    sizes = (4,) if part == "usual" else (2,)
    check_processors(sizes)
    print("processors")
    cases = {
        f"{rule}, {q}": op_inputs(rule, q)
        for rule, q in itertools.product(RULES, ("same", "mapped", "one-hot"))
    }
    inputs, specs = ({name: case[i] for name, case in cases.items()} for i in (1, 0))
    for tokens, count in compare(judged, (specs,), inputs, counts=sizes).values():
        assert len(set(count.tolist())) == K + 2 and len(set(tokens.ravel().tolist())) > V // 2
    print("rejection_sample")
    for cfg in configs(part):
        specs, arguments = rounds_arguments(cfg)
        first, later = compare(partial(rounds, cfg), specs, *arguments, counts=(4,))
        assert first.overflowed.tolist() == [i == 1 for i in range(len(first.overflowed))]
        counts = sorted(set(later.num_sampled.ravel().tolist()))
        print(f"{cfg.rule} K={cfg.num_speculative_tokens} {counts}")
        assert len(counts) > 1 or cfg.draft is None
    mapped = ToyDraft(V, own_vocab_size=DRAFT_V)
    greedy = SamplingFeatures(sampled=False)
    print(
        json.dumps(
            {
                "greedy": exchanges(toy_config(V, K, draft=mapped).with_features(greedy)),
                "probabilistic": exchanges(toy_config(V, K)),
                "probabilistic, mapped": exchanges(toy_config(V, K, draft=mapped)),
                "block": exchanges(toy_config(V, K, "block")),
                "block, mapped": exchanges(toy_config(V, K, "block", draft=mapped)),
                "strict": exchanges(toy_config(V, K, "strict", draft=mapped)),
            }
        )
    )


if __name__ == "__main__":
    main()
