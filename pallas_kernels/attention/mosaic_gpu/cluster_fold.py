"""The last fold of a softmax that a cluster's CTAs share.

All send their state to the first CTA, through distributed shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.bounds import KEYS
from pallas_kernels.attention.mosaic_gpu.plan import Plan
from pallas_kernels.attention.mosaic_gpu.softmax_state import BY_COLUMN, MATRIX, join, spread
from pallas_kernels.mosaic import load, store
from pallas_kernels.online_softmax import State, where
from pallas_kernels.types import Barrier, Index, Ref

Here = tuple[Index, Index, Index]  # (request, part of a row tile, KV head)
Transport = tuple[Callable[[State], None], Callable[[int], State]]  # send(state), receive(rank)


def outputs(plan: Plan) -> list[jax.ShapeDtypeStruct]:
    """Return device memory for the states, in the interpreter: it has no stores to another CTA."""
    if plan.cluster == 1 or not plan.interpreted:
        return []
    lead = (plan.batch, plan.row_tiles * plan.parts, plan.num_kv_heads, plan.cluster)
    return [
        jax.ShapeDtypeStruct((*lead, *plan.tall), jnp.float32),
        jax.ShapeDtypeStruct((*lead, 2, plan.columns), jnp.float32),
    ]


def copies(plan: Plan) -> bool:
    """Return whether the first CTA reads maxima and sums from a copy of what it received.

    Without it they take reductions, but two CTAs fit an SM where clusters of two have 32 columns of
    128 values. The bits are the same.
    """
    return plan.cluster > 2 or plan.columns <= 24 or plan.head_dim <= 64


def scratch(plan: Plan) -> list[plgpu.ClusterBarrier | plgpu.Barrier | pl.MemoryRef]:
    """Return the first CTA's memory for the states, and the barrier that they complete."""
    if plan.cluster == 1:
        return []
    if plan.interpreted:
        return [plgpu.ClusterBarrier(collective_axes=("rank",))]
    others = plan.cluster - 1
    copy = [plgpu.SMEM(plan.square, jnp.float32)] if copies(plan) else []
    return [
        plgpu.SMEM((others, *plan.tall), jnp.float32),
        plgpu.SMEM((others, *plan.square), jnp.float32),
        *copy,
        plgpu.Barrier(num_arrivals=2 * others),
    ]


def fold_cluster(
    plan: Plan,
    shares: list[Ref],
    received: list[Barrier],
    here: Here,
    rank: jax.Array,
    state: State,
    finish: Callable[[State], None],
) -> None:
    """Run finish(the states of all ranks, folded as a binary tree) on the first CTA.

    shares, received: refs of `outputs` and of `scratch`. here: request, part of a row tile and KV
    head of the cluster.
    """
    *slots, barrier = [*shares, *received]
    send, receive = (
        _through_device_memory(slots, barrier, here, rank)
        if plan.interpreted
        else _through_cluster(plan, slots, barrier, rank)
    )
    pl.when((rank > 0) | plan.interpreted)(lambda: send(state))

    @pl.when(rank == 0)
    def _():
        plgpu.barrier_wait(barrier)

        def gather(base: int, size: int) -> State:
            if size == 1:
                return state if base == 0 else receive(base)
            return join(gather(base, size // 2), gather(base + size // 2, size // 2))

        finish(gather(0, plan.cluster))


def _through_cluster(plan: Plan, slots: list[Ref], barrier: Barrier, rank: jax.Array) -> Transport:
    values_slots, stats_slots, *copy = slots

    def row() -> jax.Array:
        """Return each element's row in a tile of maxima and sums."""
        return plgpu.broadcasted_iota(jnp.int32, plan.square, 0, layout=MATRIX)

    def send(state: State) -> None:
        values, top, total = state
        # Only two-dimensional tiles can be sent: of one, the upper half holds the maxima, the
        # lower half the sums.
        stats = jnp.where(row() < KEYS // 2, spread(top, plan.square), spread(total, plan.square))
        for sent, slots_of in ((values, values_slots), (stats, stats_slots)):
            slot = slots_of.at[rank - 1]
            plgpu.async_store_smem(
                sent, slot, barrier, cluster_idx=jnp.int32(0), cluster_dim="rank", optimized=False
            )

    def receive(sender: int) -> State:
        values = load(values_slots.at[sender - 1], MATRIX, optimized=False)
        stats = load(stats_slots.at[sender - 1], MATRIX, optimized=False)
        if not copy:  # all rows of a half are equal
            top = where(row() < KEYS // 2, stats, -jnp.inf).max(axis=0)
            return values, top, where(row() >= KEYS // 2, stats, 0.0).max(axis=0)
        # Sent tiles are tiled in memory; single rows can be read from this copy.
        (plain,) = copy
        store(plain, stats)
        top, total = (load(plain.at[i], BY_COLUMN, optimized=False) for i in (0, KEYS // 2))
        return values, top, total

    return send, receive


def _through_device_memory(
    slots: list[Ref], barrier: Barrier, here: Here, rank: jax.Array
) -> Transport:
    values_slots, stats_slots = slots

    def send(state: State) -> None:
        values, top, total = state
        store(values_slots.at[*here, rank], values)
        store(stats_slots.at[*here, rank, 0], top)
        store(stats_slots.at[*here, rank, 1], total)
        plgpu.barrier_arrive(barrier)

    def receive(sender: int) -> State:
        return (
            values_slots[*here, sender],
            stats_slots[*here, sender, 0],
            stats_slots[*here, sender, 1],
        )

    return send, receive
