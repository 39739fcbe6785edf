"""A sum over a cluster's CTAs, each of which has multiplied a part of the depth.

The first CTA receives the shares of the others, and adds them in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.matmul.mosaic_gpu.sizes import Results, Scratch, Sizes
from pallas_kernels.mosaic import load
from pallas_kernels.types import Barrier, Index, Ref

AXIS = "part"  # of the cluster


def outputs(sizes: Sizes) -> jax.ShapeDtypeStruct | None:
    """Return device memory for the shares, in the interpreter: it has no stores to another CTA."""
    if not sizes.senders or not interpreting():
        return None
    return jax.ShapeDtypeStruct((sizes.blocks, sizes.senders, *sizes.share), jnp.float32)


def scratch(sizes: Sizes) -> list[plgpu.ClusterBarrier | plgpu.Barrier | pl.MemoryRef]:
    """Return the first CTA's memory for the shares, and the barrier that they complete."""
    if not sizes.senders:
        return []
    if interpreting():
        arrivals = sizes.tuning.warpgroups
        return [plgpu.ClusterBarrier(collective_axes=(AXIS,), num_arrivals=arrivals)]
    return [
        plgpu.SMEM((sizes.senders, *sizes.share), jnp.float32),
        plgpu.Barrier(num_arrivals=sizes.senders * sizes.share[0]),
    ]


@dataclass(frozen=True)
class Exchange:
    """The first CTA's memory for the shares, in the kernel, and the barrier that they complete."""

    slots: Ref
    barrier: Barrier

    @classmethod
    def of(cls, results: Results[Ref], scratch: Scratch[Ref]) -> Exchange:
        shares = [] if results.shares is None else [results.shares]
        return cls(*shares, *scratch.received)


def send(share: Sequence[jax.Array], exchange: Exchange, block: Index, sender: Index) -> None:
    """Send a warpgroup's share, from any CTA but the first."""
    slots, barrier = exchange.slots, exchange.barrier
    for product, values in enumerate(share):
        if interpreting():
            slots[block, sender, product] = values
        else:
            slot = slots.at[sender, product]
            plgpu.async_store_smem(
                values, slot, barrier, cluster_idx=jnp.int32(0), cluster_dim=AXIS, optimized=False
            )
    if interpreting():
        plgpu.barrier_arrive(barrier)


def add(sizes: Sizes, totals: list[jax.Array], exchange: Exchange, block: Index) -> list[jax.Array]:
    """Return totals plus the senders' shares, in the senders' order."""
    slots, barrier = exchange.slots, exchange.barrier
    if interpreting():
        # The barrier counts the arrivals of the first CTA as well.
        pl.loop(0, sizes.tuning.warpgroups)(lambda _: plgpu.barrier_arrive(barrier))
        slots = slots.at[block]
    plgpu.barrier_wait(barrier)
    for sender in range(sizes.senders):
        totals = [
            total + load(slots.at[sender, product], plgpu.Layout.WGMMA, optimized=False)
            for product, total in enumerate(totals)
        ]
    return totals
