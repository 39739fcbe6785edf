"""Mosaic kernels of rejection sampling against the reference and the float64 oracle: interpreted at
small shapes, on a GPU at real ones.

Tokens are compared exactly. Where the oracle says that a comparison is too close for float32 (two
scores or a probability and its threshold within 1e-5 of each other, or within the rounding of the
residual), either outcome passes; such requests are counted, and may be few.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling import Inputs as OpInputs
from pallas_kernels.rejection_sampling import rejection_sample
from pallas_kernels.rejection_sampling.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.rejection import oracle
from tests.kernels.rejection.inputs import Inputs, emitted
from tests.support.slow import slow_unless

TINY = [name for name in SHAPES if name.startswith("tiny")]
REAL = [name for name in SHAPES if not name.startswith("tiny")]
RULES = {
    "probabilistic": "tiny",
    "block": "tiny-block",
    "synthetic": "tiny-synthetic",
}
UNCERTAIN = 0.05  # of the requests at most; about one in a thousand is expected


@functools.cache
def program(
    implementation: str, memory: str | None
) -> Callable[[OpInputs], tuple[jax.Array, jax.Array]]:
    """The compiled op. memory: what the interpreter fills memory with before it is written; None
    compiles for the device."""
    return jax.jit(functools.partial(rejection_sample, implementation=implementation))


def arguments_of(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """The op's inputs by name, to be changed."""
    return dict(vars(make_inputs(shape, seed)))


def run(
    arguments: dict[str, Any], implementation: str = "mosaic_gpu", memory: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    inputs = jax.tree.map(jnp.asarray, OpInputs(**arguments))
    with contextlib.ExitStack() as stack:
        if memory is not None:
            stack.enter_context(interpreted(memory))
        tokens, num_sampled = program(implementation, memory)(inputs)
        return np.asarray(tokens), np.asarray(num_sampled)


def interpret(arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    return run(arguments, memory="nan")


def rows(arguments: dict[str, Any], index: list[int]) -> dict[str, Any]:
    """The requests at `index` alone."""
    shared = ("target_to_draft", "acceptance_rates", "rule", "sampled", "shards")
    at = np.asarray(index)
    return {
        name: x if name in shared or x is None else jax.tree.map(lambda leaf: leaf[at], x)
        for name, x in arguments.items()
    }


def with_numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same, with the numbers of what is given as streams."""
    uniforms, recover_noise = arguments["uniforms"], arguments["recover_noise"]
    _, K = arguments["draft_tokens"].shape
    if isinstance(uniforms, Stream):
        arguments = arguments | {"uniforms": np.asarray(uniforms.uniforms(K))}
    if isinstance(recover_noise, Stream):
        arguments = arguments | {
            "recover_noise": np.asarray(recover_noise.gumbel(arguments["target_logits"].shape[-1]))
        }
    return arguments


def expected(arguments: dict[str, Any], b: int) -> tuple[list[int], bool]:
    """What request b must emit by the float64 oracle, and whether float32 must agree."""
    one = with_numbers(rows(arguments, [b]))
    temperature = one.pop("temperature")
    if temperature is not None:
        divisor = np.where(one["greedy"], 1.0, temperature.astype(np.float64))[:, None, None]
        one["target_logits"] = one["target_logits"] / divisor
        one["draft_logits"] = None if one["draft_logits"] is None else one["draft_logits"] / divisor
    vocab = one["target_logits"].shape[-1]
    inputs = Inputs(**{f.name: one.get(f.name) for f in fields(Inputs)})
    if inputs.recover_noise is None:
        inputs = replace(inputs, recover_noise=np.zeros((1, vocab), np.float32))
    return oracle.verify(inputs, 0, one["rule"])


def check(
    arguments: dict[str, Any],
    tokens: np.ndarray,
    num_sampled: np.ndarray,
    requests: range | None = None,
) -> int:
    """Every request against the oracle; how many were too close to call."""
    actual = emitted(tokens, num_sampled)
    requests = requests or range(len(actual))
    uncertain = 0
    for b in requests:
        wanted, certain = expected(arguments, b)
        uncertain += not certain
        assert not certain or actual[b] == wanted, (
            f"request {b}: expected {wanted}, got {actual[b]}"
        )
    return uncertain


# ---- interpreted


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    slow_unless(
        [n for n in TINY if n not in ("tiny", "tiny-even", "tiny-block-eagle1", "tiny-drawn-odd")],
        TINY,
    ),
)
def test_interpreted_kernels_give_the_references_tokens(name: str) -> None:
    lengths, uncertain, requests = set(), 0, 0
    for seed in range(2):
        arguments = arguments_of(SHAPES[name], seed)
        tokens, num_sampled = interpret(arguments)
        uncertain += check(arguments, tokens, num_sampled)
        for got, wanted in zip((tokens, num_sampled), run(arguments, "reference"), strict=True):
            np.testing.assert_array_equal(got, wanted)
        lengths |= set(num_sampled.tolist())
        requests += len(tokens)
    assert uncertain <= UNCERTAIN * requests
    assert len(lengths) > min(SHAPES[name].K, 2), (
        "too few lengths occur: the inputs exercise too little"
    )


@needs_mosaic
@pytest.mark.parametrize("name", ["smollm2-b1", "smollm2-b1-drawn", "llama3-8b-b1-greedy"])
def test_interpreted_kernels_at_real_vocabularies(name: str) -> None:
    arguments = arguments_of(SHAPES[name])
    tokens, num_sampled = interpret(arguments)
    for got, wanted in zip((tokens, num_sampled), run(arguments, "reference"), strict=True):
        np.testing.assert_array_equal(got, wanted)


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    slow_unless(
        ["tiny-block", "tiny-drawn-plain"],
        [*RULES.values(), *(name for name in TINY if "drawn" in name)],
    ),
)
def test_a_request_alone_gives_the_tokens_it_gives_in_a_batch(name: str) -> None:
    arguments = arguments_of(SHAPES[name])
    tokens, num_sampled = interpret(arguments)
    for part in ([0], [3, 2], [5, 6, 7]):
        alone = interpret(rows(arguments, part))
        np.testing.assert_array_equal(alone[0], tokens[part])
        np.testing.assert_array_equal(alone[1], num_sampled[part])


@needs_mosaic
@pytest.mark.parametrize("name", [name for name in TINY if "drawn" in name])
@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_streams_give_the_tokens_of_their_numbers(name: str, implementation: str) -> None:
    arguments = arguments_of(SHAPES[name], seed=1)
    memory = "nan" if implementation == "mosaic_gpu" else None
    for got, wanted in zip(
        run(arguments, implementation, memory),
        run(with_numbers(arguments), implementation, memory),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)


@needs_mosaic
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("rule", "name"), RULES.items())
def test_nan_and_infinite_logits_give_ids_in_range(rule: str, name: str, greedy: bool) -> None:
    """NaN counts as -inf and +inf as the largest float: single entries as in the reference, whole
    rows stay in range."""
    arguments = arguments_of(replace(SHAPES[name], batch=8))
    arguments |= {"greedy": np.full(8, greedy), "active": np.ones(8, bool)}
    arguments["temperature"] = (
        # +inf over a temperature below 1 overflows: the reference's tokens are arbitrary there too
        None
    )
    target, draft = arguments["target_logits"], arguments["draft_logits"]
    rng = np.random.default_rng(1)
    for value, share in ((np.nan, 0.2), (-np.inf, 0.2)):
        target[rng.random(target.shape) < share] = value
        if draft is not None:
            draft[rng.random(draft.shape) < share] = value
    target[4, :, 650] = np.inf
    target[5], target[6], target[7] = np.nan, -np.inf, np.inf
    tokens, num_sampled = interpret(arguments)
    emitted(tokens, num_sampled)
    assert tokens.max() < target.shape[-1]
    for got, wanted in zip((tokens, num_sampled), run(arguments, "reference"), strict=True):
        np.testing.assert_array_equal(got[:7], wanted[:7])


@needs_mosaic
@pytest.mark.parametrize(("rule", "name"), RULES.items())
def test_padding_rows_emit_nothing_and_disturb_nobody(rule: str, name: str) -> None:
    arguments = arguments_of(SHAPES[name])
    arguments["active"] = np.ones(12, bool)
    wanted = run(arguments, "reference")
    for key in ("target_logits", "draft_logits", "recover_noise", "uniforms"):
        if arguments[key] is not None:
            arguments[key][5:] = np.nan
    arguments["draft_tokens"][5:] = 2**31 - 1
    arguments["active"] = np.arange(12) < 5
    tokens, num_sampled = interpret(arguments)
    np.testing.assert_array_equal(tokens[:5], wanted[0][:5])
    np.testing.assert_array_equal(num_sampled[:5], wanted[1][:5])
    assert (tokens[5:] == -1).all() and (num_sampled[5:] == 0).all()


@needs_mosaic
@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_a_residual_without_mass_is_the_plain_target(rule: str) -> None:
    """p = q leaves nothing to draw from; u = 1 forces what rounding does rarely."""
    arguments = arguments_of(replace(SHAPES["tiny-block-eagle1"], rule=rule, K=1))
    target = arguments["target_logits"]
    arguments |= {
        "draft_logits": target[:, :1].copy(),
        "uniforms": np.ones((12, 1), np.float32),
        "active": np.ones(12, bool),
    }
    arguments |= {
        "draft_tokens": target[:, 0].argmax(-1)[:, None].astype(np.int32),
        "greedy": np.zeros(12, bool),
    }
    arguments["temperature"] = np.full(12, 0.75, np.float32)
    tokens, num_sampled = interpret(arguments)
    assert (num_sampled == 1).all()
    assert (
        tokens[:, 0].tolist()
        == (target[:, 0] / np.float32(0.75) + arguments["recover_noise"]).argmax(-1).tolist()
    )


@needs_mosaic
def test_the_first_of_equal_maxima_wins_across_pieces() -> None:
    arguments = arguments_of(SHAPES["tiny-greedy"])
    arguments["target_logits"] = np.zeros_like(arguments["target_logits"])
    arguments["target_logits"][1:, :, [600, 1200, 1299]] = 1.0
    arguments["active"] = np.ones(12, bool)
    arguments["draft_tokens"][:] = 600
    tokens, num_sampled = interpret(arguments)
    assert (
        tokens[0].tolist() == [0, -1, -1, -1]
        and (tokens[1:] == 600).all()
        and num_sampled.tolist() == [1] + [4] * 11
    )


@needs_mosaic
def test_lanes_that_no_piece_wrote_have_no_say() -> None:
    """Memory full of zeros looks like a piece whose best logit is 0, at id 0: the winner here, a
    tie with it, is 600."""
    arguments = arguments_of(SHAPES["tiny-greedy"])
    arguments["target_logits"] = -np.abs(arguments["target_logits"]) - 1
    arguments["target_logits"][:, :, 600] = 0.0
    arguments["active"] = np.ones(12, bool)
    tokens, num_sampled = run(arguments, memory="zero")
    assert (tokens[np.arange(12), num_sampled - 1] == 600).all()


@needs_mosaic
def test_expm1_keeps_its_digits_down_to_0() -> None:
    from pallas_kernels.rejection_sampling.mosaic_gpu.residual import expm1

    x = -np.concatenate([[0.0, 0.5, 0.50001, np.inf], np.logspace(-30, 2, 2000)]).astype(np.float32)
    wanted = np.expm1(x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(expm1(jnp.asarray(x)), np.float64), wanted, rtol=4e-7)


# ---- what the kernels refuse


def test_an_unsupported_vocabulary_is_an_error() -> None:
    arguments = arguments_of(replace(SHAPES["tiny"], vocab=127, draft_vocab=127))
    message = (
        "target vocabulary of 128 to"
        if jax.__version_info__ >= (0, 11)
        else "expected jax 0.11 or later"
    )
    with pytest.raises(ValueError, match=message):
        run(arguments)


@needs_mosaic
@pytest.mark.parametrize(
    ("vocab", "draft_vocab"), [(s.vocab, s.draft_vocab) for s in SHAPES.values()]
)
def test_every_named_shape_is_supported_and_cut_without_a_gap(
    vocab: int, draft_vocab: int | None
) -> None:
    from pallas_kernels.pieces import LANES, cut
    from pallas_kernels.rejection_sampling.mosaic_gpu import Tuning, unsupported

    logits = lambda width: jax.ShapeDtypeStruct((1, 1, width), jnp.float32)  # noqa: E731
    assert unsupported(logits(vocab), None if draft_vocab is None else logits(draft_vocab)) is None
    for size in (Tuning().sweep, Tuning().draw):
        pieces = cut(vocab, size)
        starts = [min(i * pieces.size, vocab - pieces.size) for i in range(pieces.count)]
        assert pieces.count <= LANES and pieces.size % (LANES * pieces.vector) == 0
        assert all(start % pieces.vector == 0 for start in starts) and vocab % pieces.vector == 0
        assert np.unique(np.add.outer(starts, np.arange(pieces.size))).size == vocab


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*TINY, *REAL])
def test_on_the_gpu(name: str) -> None:
    """Memory that held NaN before: a lane or an output that no block writes shows up. A request
    alone gives the same, and so do numbers."""
    shape = SHAPES[name]
    arguments = arguments_of(shape)
    run(arguments)
    poison = [jnp.full(2**20, jnp.nan) for _ in range(64)]
    jax.block_until_ready(poison)
    del poison
    tokens, num_sampled = run(arguments)
    uncertain = check(
        arguments, tokens, num_sampled, range(min(shape.batch, 2))
    )  # the oracle takes seconds a request
    assert uncertain <= max(1, UNCERTAIN * shape.batch)
    wanted = run(arguments, "reference")
    differing = (tokens != wanted[0]).any(axis=1)
    for b in np.flatnonzero(differing):
        assert not expected(arguments, b)[1], (
            f"request {b}: reference {wanted[0][b]}, kernel {tokens[b]}"
        )
    for got, whole in zip(run(with_numbers(arguments)), (tokens, num_sampled), strict=True):
        np.testing.assert_array_equal(got, whole)
    last = shape.batch - 1
    for got, whole in zip(run(rows(arguments, [last])), (tokens, num_sampled), strict=True):
        np.testing.assert_array_equal(got[0], whole[last])
