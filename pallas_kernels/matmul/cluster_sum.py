"""A sum over a cluster's CTAs, each of which has multiplied a part of the depth: the first one gets all shares, and adds them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting

AXIS = "part"  # of the cluster


def outputs(blocks: int, senders: int, shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    """Device memory for the shares of so many warpgroups, which the interpreter needs: it knows no stores to another CTA.

    shape: of a share, [products, columns, rows].
    """
    return (
        [jax.ShapeDtypeStruct((blocks, senders, *shape), jnp.float32)]
        if senders and interpreting()
        else []
    )


def scratch(senders: int, warpgroups: int, shape: tuple[int, ...]) -> list[Any]:
    """What the first CTA receives in, and the barrier that tells it so. warpgroups: of a CTA."""
    if not senders:
        return []
    if interpreting():
        return [plgpu.ClusterBarrier(collective_axes=(AXIS,), num_arrivals=warpgroups)]
    return [
        plgpu.SMEM((senders, *shape), jnp.float32),
        plgpu.Barrier(num_arrivals=senders * shape[0]),
    ]


def send(share: Sequence[jax.Array], memory: list[Any], block: Any, sender: Any) -> None:
    """From a warpgroup of any CTA but the first. memory: refs of `outputs` and of `scratch`, one after the other."""
    slots, barrier = memory
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


def add(
    totals: list[jax.Array], memory: list[Any], block: Any, senders: int, warpgroups: int
) -> list[jax.Array]:
    """totals plus the senders' shares, in the senders' order."""
    slots, barrier = memory
    if interpreting():
        pl.loop(0, warpgroups)(
            lambda _: plgpu.barrier_arrive(barrier)
        )  # it counts those of the first CTA as well
        slots = slots.at[block]
    plgpu.barrier_wait(barrier)
    for sender in range(senders):
        shares = (slots.at[sender, product] for product in range(len(totals)))
        totals = [
            a + plgpu.load(b, layout=plgpu.Layout.WGMMA, optimized=False)
            for a, b in zip(totals, shares, strict=True)
        ]  # pyright: ignore[reportCallIssue]
    return totals
