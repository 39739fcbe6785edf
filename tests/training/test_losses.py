"""The losses against their definitions and against speculators'."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.params import Weight
from jaxspec.training import losses, target

TOLERANCE = 1e-5  # float32, sums of 48 terms


def logits(seed: int, shape: tuple[int, ...] = (2, 7, 48)) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@pytest.mark.oracle("speculators")
@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_kl_loss_of_several_steps_equals_speculators(decay: float) -> None:
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.metrics import compute_metrics

    draft, target = [logits(i, (1, 9, 48)) for i in range(3)], logits(10, (1, 9, 48))
    mask = np.asarray([[0, 1, 1, 0, 1, 1, 1, 0, 1]], bool)
    expected, ours = 0.0, []
    probs = jax.nn.softmax(jnp.asarray(target), axis=-1)
    for step, z in enumerate(draft):
        loss, _ = compute_metrics(
            torch.tensor(z),
            torch.tensor(target),
            torch.tensor(mask),
            torch.tensor(mask),
            step,
            decay,
            resolve_loss_config("kl_div", "eager"),
        )
        expected += float(loss)
        rows = 9 - step
        p = probs[:, step:]
        cross_entropy = losses.soft_cross_entropy(jnp.asarray(z[:, :rows]), p)
        kl = cross_entropy + jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)
        rows_of_loss = jnp.asarray(mask[:, step:], jnp.float32)
        ours.append(jnp.sum(kl * rows_of_loss) / jnp.sum(rows_of_loss))
    np.testing.assert_allclose(losses.decayed_sum(ours, decay), expected, rtol=TOLERANCE)


def test_soft_cross_entropy_and_its_gradient() -> None:
    z, p = jnp.asarray(logits(0)), jax.nn.softmax(jnp.asarray(logits(1)), axis=-1)
    np.testing.assert_allclose(
        losses.soft_cross_entropy(z, p),
        -jnp.sum(p * jax.nn.log_softmax(z), axis=-1),
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
    gradient = jax.grad(lambda z: jnp.sum(losses.soft_cross_entropy(z, p)))(z)
    np.testing.assert_allclose(gradient, jax.nn.softmax(z, axis=-1) - p, atol=TOLERANCE)


def test_soft_cross_entropy_is_least_at_the_target_and_survives_zeros() -> None:
    z = jnp.asarray(logits(2))
    p = jax.nn.softmax(z, axis=-1)
    least = -jnp.sum(p * jax.nn.log_softmax(z), axis=-1)  # the target's entropy
    np.testing.assert_allclose(losses.soft_cross_entropy(z, p), least, atol=TOLERANCE)
    assert float((losses.soft_cross_entropy(jnp.asarray(logits(3)), p) - least).min()) > 0.1
    one_hot = jax.nn.one_hot(jnp.argmax(z, axis=-1), 48)
    np.testing.assert_allclose(
        losses.soft_cross_entropy(z, one_hot),
        -jnp.max(jax.nn.log_softmax(z), axis=-1),
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )


def test_accepted_prefix_needs_every_earlier_step() -> None:
    matches = [jnp.asarray(m, bool) for m in ([1, 1, 1, 0, 1], [1, 0, 1, 1, 1], [1, 1, 0, 1, 1])]
    counted = jnp.asarray([1, 1, 1, 1, 0], bool)
    np.testing.assert_allclose(losses.accepted_prefix(matches, counted), [3, 2, 1])


@pytest.mark.parametrize("tied", [False, True])
def test_head_logits_have_the_gradient_of_the_plain_product(tied: bool) -> None:
    rng = np.random.default_rng(0)
    x, head, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 3, 8), (8, 12), (2, 3, 12))
    )
    head = head.T if tied else head
    plain = lambda x, head: jnp.sum(weight * jnp.tanh(x @ (head.T if tied else head)))  # noqa: E731

    def ours(x: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.sum(weight * jnp.tanh(losses.head_logits(x, Weight(head, transposed=tied))))

    for a, b in zip(jax.grad(plain, (0, 1))(x, head), jax.grad(ours, (0, 1))(x, head), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_choice_and_total_are_argmax_and_logsumexp() -> None:
    z = jnp.asarray(logits(4)).at[0, 0].add(300.0).at[1, 1, 5].set(90.0).at[1, 1, 9].set(90.0)
    choice, total = target.choice_and_total(z)
    np.testing.assert_array_equal(choice, jnp.argmax(z, axis=-1))
    np.testing.assert_allclose(total, jax.nn.logsumexp(z, axis=-1), rtol=1e-6)
    assert int(choice[1, 1]) == 5


@pytest.mark.parametrize("stored", [(False, False), (True, False), (True, True), (False, True)])
def test_summed_logits_have_the_gradient_of_plain_products(stored: tuple[bool, bool]) -> None:
    """stored: whether each head is stored as [V, D]."""
    rng = np.random.default_rng(1)
    shapes = (2, 3, 8), (2, 3, 5), (8, 12), (5, 12), (2, 3, 12)
    x, y, a, b, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def plain(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(weight * jnp.tanh(x @ a + y @ b))

    def ours(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        heads = tuple(Weight(h.T if t else h, t) for h, t in zip((a, b), stored, strict=True))
        return jnp.sum(weight * jnp.tanh(losses.summed_logits((x, y), heads)))

    arguments, each = (x, y, a, b), (0, 1, 2, 3)
    np.testing.assert_allclose(ours(*arguments), plain(*arguments), rtol=1e-5)
    for found, expected in zip(
        jax.grad(ours, each)(*arguments), jax.grad(plain, each)(*arguments), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_summed_logits_take_their_gradient_in_the_inputs_dtype() -> None:
    """In bfloat16 each gradient is a product of rounded numbers, summed in float32."""
    rng = np.random.default_rng(2)
    x, y, a, b, g = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((6, 8), (6, 5), (12, 8), (5, 12), (6, 12))
    )
    bf16 = lambda array: jnp.asarray(array, jnp.bfloat16)  # noqa: E731
    heads = Weight(bf16(a), transposed=True), Weight(bf16(b))
    logits, back = jax.vjp(losses.summed_logits, (bf16(x), bf16(y)), heads)
    assert logits.dtype == jnp.float32
    rounded = [np.asarray(bf16(array), np.float64) for array in (x, y, a, b, g)]
    x, y, a, b, g = rounded
    np.testing.assert_allclose(logits, x @ a.T + y @ b, rtol=1e-5, atol=1e-5)
    (to_x, to_y), (to_a, to_b) = back(jnp.asarray(g, jnp.float32) * (1 + 2.0**-10))
    found = to_x, to_y, to_a.values, to_b.values
    for array, expected in zip(found, (g @ a, g @ b.T, g.T @ x, y.T @ g), strict=True):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, bf16(expected))


@pytest.mark.oracle("torch")
def test_smooth_l1_equals_torchs() -> None:
    import torch

    a, b = 3 * logits(6), logits(7)
    expected = torch.nn.functional.smooth_l1_loss(
        torch.tensor(a), torch.tensor(b), reduction="none"
    ).mean(-1)
    np.testing.assert_allclose(
        losses.smooth_l1(jnp.asarray(a), jnp.asarray(b)), expected.numpy(), rtol=TOLERANCE
    )


@pytest.mark.parametrize("share", [1.0, 0.8], ids=["whole", "draft vocabulary"])
def test_scores_of_drafts_and_their_gradient(share: float) -> None:
    """share: of the target's distribution that the draft's vocabulary has."""
    z, p = jnp.asarray(logits(0)), share * jax.nn.softmax(jnp.asarray(logits(1)), axis=-1)
    z, p = z.at[0, 0].add(40.0), p.at[0, 1].set(0.0)  # large logits; a row without a target
    weights = jnp.asarray(logits(2, (2, 2, 7)))

    def by_formula(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_q = jax.nn.log_softmax(z)
        overlap = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
        return -jnp.sum(p * log_q, axis=-1), overlap

    def weighed(cross_entropy: jax.Array, overlap: jax.Array) -> jax.Array:
        return jnp.sum(weights[0] * cross_entropy + weights[1] * overlap)

    def loss(z: jax.Array) -> jax.Array:
        scores = losses.draft_scores(z, p)
        return weighed(scores.cross_entropy, scores.overlap)

    scores, (cross_entropy, overlap) = losses.draft_scores(z, p), by_formula(z)
    np.testing.assert_allclose(scores.cross_entropy, cross_entropy, rtol=TOLERANCE)
    np.testing.assert_allclose(scores.overlap, overlap, rtol=TOLERANCE)
    np.testing.assert_array_equal(scores.choice, jnp.argmax(z, axis=-1))
    expected = jax.grad(lambda z: weighed(*by_formula(z)))(z)
    np.testing.assert_allclose(jax.grad(loss)(z), expected, atol=TOLERANCE)
