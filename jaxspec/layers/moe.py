"""Mixture of experts: routers, and the experts' products.

A decode step has few rows, and reading weights takes its time: 4 rows that choose 4 of 32 experts
read at most half of them. So the products use the method that reads the fewest weights. The method
follows from shapes alone (`experts`), so it is fixed when a program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxspec.config import Ops
from jaxspec.layers.log_once import log_once
from jaxspec.layers.mlp import mlp_specs
from jaxspec.layers.mxfp4 import Mxfp4Weight
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import (
    AnyWeight,
    AssembledSpec,
    Params,
    ParamSpec,
    Weight,
    matrix,
    weight,
)
from jaxspec.layers.products import (
    ResidualStream,
    Stream,
    add_projection,
    add_to_stream,
    normed_values,
    project_swiglu,
    values_of,
)
from jaxspec.layers.row_tiles import ROW_TILE, in_tiles
from jaxspec.parallel.axes import Axes
from pallas_kernels import moe as moe_op
from pallas_kernels import router as router_op

# Up to this many rows, every expert multiplies all rows. Reading the experts takes longer than
# multiplying by them, even with the rows that did not choose them.
FEW_ROWS = 64
# Rows of a block of a grouped product, and the number of blocks whose weights are copied at a time.
BLOCK_ROWS, BLOCKS_AT_ONCE = (128, 16)


@dataclass(frozen=True)
class MoEConfig:
    """The static part of one layer's experts.

    gate: the activation
        "silu": SwiGLU
        "clamped": gpt-oss's; both halves are clamped to `limit`, the gate is sigmoid(alpha * gate),
        and one is added to the up half
        "clamped_silu": DeepSeek-V4's; SwiGLU of halves clamped in the same way
    norm_top_k: divide a row's weights by their sum
    num_groups, top_groups, routed_scaling: settings of the sigmoid router
    shared_size: width of the shared experts, which every row passes through
    """

    AXES: ClassVar[Axes] = {"intermediate_size": "expert_mlp", "shared_size": "mlp"}

    num_experts: int
    top_k: int
    intermediate_size: int
    gate: Literal["silu", "clamped", "clamped_silu"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    num_groups: int = 1
    top_groups: int = 1
    routed_scaling: float = 1.0
    norm_top_k: bool = True
    shared_size: int = 0

    def share_chosen(self, rows: int) -> float:
        """Return the share of the experts that some of the rows choose, each by chance."""
        return 1 - (1 - self.top_k / self.num_experts) ** rows


def moe_of(model: Any) -> MoEConfig | None:
    """Return the config of the experts of a target or a draft; None for a dense one."""
    return getattr(model, "moe", None)


def route(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    cfg: MoEConfig,
    kind: Literal["softmax", "sigmoid"],
    ops: Ops,
) -> tuple[jax.Array, jax.Array]:
    """Route x [rows, D] by the router op or, with groups, in jnp.

    Returns experts int32 [rows, at least top_k] and weights float32 [rows, top_k].

    The kernel serves the few rows of a decode step, as in `experts`. XLA routes the other cases,
    and the log says so once, with the reason.
    """
    if ops.rows_alike:
        of_tile = replace(ops, rows_alike=False)
        return in_tiles(lambda tile: route(tile, router, bias, cfg, kind, of_tile), x)
    if kind == "sigmoid" and cfg.num_groups > 1:
        assert bias is not None
        return route_sigmoid(router_logits(x, router, ops), bias, cfg)
    implementation = ops.moe
    if implementation != "reference":
        reason = router_op.unsupported(x.shape[0], router.shape, cfg.top_k, x.dtype)
        if reason is not None:
            log_once(f"XLA routes by {router.shape}: the kernel {reason}")
            implementation = "reference"
    inputs = router_op.Inputs(
        x=x,
        router=router,
        bias=bias,
        top_k=cfg.top_k,
        kind=kind,
        scaling=cfg.routed_scaling,
        normalise=cfg.norm_top_k,
    )
    return router_op.route(inputs, implementation=implementation)


def route_sigmoid(
    logits: jax.Array, bias: jax.Array, cfg: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Route by DeepSeek-V3's rule (2412.19437, section 2.1.2), as `route` does.

    logits: float32 [rows, experts]
    bias:   float32 [experts], the correction bias; it affects the choice and never the weights

    With groups, experts compete within the top_groups groups whose best two scores sum highest.
    """
    rows, num_experts = logits.shape
    scores = jax.nn.sigmoid(logits)
    for_choice = scores + bias
    if cfg.num_groups > 1:
        grouped = for_choice.reshape(rows, cfg.num_groups, -1)
        best_two = lax.top_k(grouped, 2)[0].sum(-1)
        _, kept = lax.top_k(best_two, cfg.top_groups)
        allowed = jnp.any(kept[:, :, None] == jnp.arange(cfg.num_groups), axis=1)
        for_choice = jnp.where(
            jnp.repeat(allowed, num_experts // cfg.num_groups, axis=1), for_choice, -jnp.inf
        )
    _, ids = lax.top_k(for_choice, cfg.top_k)
    return ids, router_op.reference.weigh(
        scores, ids, scaling=cfg.routed_scaling, normalise=cfg.norm_top_k
    )


def route_sqrt_softplus(
    logits: jax.Array, bias: jax.Array | None, cfg: MoEConfig, looked_up: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Route by DeepSeek-V4's rule: scores are sqrt(softplus(logits)).

    The rest is route_sigmoid without groups.

    looked_up: int32 [rows, top_k], experts that a table gives by the token's id, whatever their
    scores; there is no bias then
    """
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if looked_up is None:
        assert bias is not None
        looked_up = lax.top_k(scores + bias, cfg.top_k)[1]
    weights = jnp.take_along_axis(scores, looked_up, axis=1)
    return looked_up, weights / (weights.sum(-1, keepdims=True) + 1e-20) * cfg.routed_scaling


def expert_specs(
    prefix: str,
    cfg: MoEConfig,
    hidden_size: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Weight]:
    """Return gate_up and down of experts that a checkpoint stores one by one, as `prefix`.N.NAME.

    names: the checkpoint's names of gate, up and down
    """
    size, count = cfg.intermediate_size, cfg.num_experts

    def one_by_one(
        name: str,
        parts: tuple[str, ...],
        checkpoint_shape: tuple[int, int],
        axes: tuple[str | None, ...],
    ) -> Weight:
        sources = tuple(
            (f"{prefix}.{n}.{part}.weight", checkpoint_shape)
            for n in range(count)
            for part in parts
        )

        def build(arrays: Sequence[np.ndarray]) -> np.ndarray:
            pairs = [arrays[i : i + len(parts)] for i in range(0, len(arrays), len(parts))]
            return np.stack([np.concatenate(pair).T for pair in pairs])

        shape = (count, checkpoint_shape[1], len(parts) * checkpoint_shape[0])
        spec = AssembledSpec(
            f"{prefix}.*.{name}",
            shape,
            axes,
            side_by_side=len(parts),
            sources=sources,
            build=build,
        )
        return weight(spec)

    return {
        "gate_up": one_by_one(
            "gate_up", names[:2], (size, hidden_size), ("experts", "embed", "expert_mlp")
        ),
        "down": one_by_one(
            "down", names[2:], (hidden_size, size), ("experts", "expert_mlp", "embed")
        ),
    }


def sigmoid_moe_specs(prefix: str, cfg: MoEConfig, hidden_size: int) -> dict[str, Any]:
    """Return the weights of `add_sigmoid_moe` under `prefix` ("...mlp").

    The names are those of DeepSeek-V3 and GLM.
    """
    return {
        "router": matrix(f"{prefix}.gate.weight", hidden_size, cfg.num_experts, ("embed", None)),
        # A bias rounded to bfloat16 would choose other experts.
        "router_bias": ParamSpec(
            f"{prefix}.gate.e_score_correction_bias",
            (cfg.num_experts,),
            (None,),
            dtype="float32",
        ),
        "experts": expert_specs(f"{prefix}.experts", cfg, hidden_size),
        "shared": mlp_specs(f"{prefix}.shared_experts", hidden_size, cfg.shared_size),
    }


def softmax_moe_specs(prefix: str, cfg: MoEConfig, hidden_size: int) -> dict[str, Any]:
    """Return the weights of `add_softmax_moe` under `prefix` ("...mlp"), by Qwen's names."""
    return {
        "router": matrix(f"{prefix}.gate.weight", hidden_size, cfg.num_experts, ("embed", None)),
        "experts": expert_specs(f"{prefix}.experts", cfg, hidden_size),
    }


def router_logits(normed: jax.Array, router: jax.Array, ops: Ops) -> jax.Array:
    """Return float32 logits [rows, experts] of normed [rows, D]."""

    def multiply(rows: jax.Array) -> jax.Array:
        return jnp.matmul(rows, router, preferred_element_type=jnp.float32)

    return in_tiles(multiply, normed) if ops.rows_alike else multiply(normed)


def add_softmax_moe(
    layer: Params,
    cfg: MoEConfig,
    eps: float,
    x: Stream,
    ops: Ops,
    *,
    next_norm: Norm | None = None,
) -> ResidualStream:
    """Add experts(norm(x)) to the stream x [batch, rows, D], where add_mlp would add the MLP.

    eps:       epsilon of the norm, whose gain the layer holds. The router's bias is optional.
    next_norm: the norm that follows the layer (see add_projection)
    """
    normed = normed_values(x, Norm(layer["post_attention_layernorm"], eps), ops)
    flat = normed.reshape(-1, normed.shape[-1])
    chosen = route(flat, layer["router"], layer.get("router_bias"), cfg, "softmax", ops)
    routed = experts(layer["experts"], cfg, flat, *chosen, ops)
    return add_to_stream(x, routed.reshape(normed.shape), ops, next_norm=next_norm)


def add_sigmoid_moe(
    layer: Params, cfg: MoEConfig, eps: float, x: Stream, ops: Ops
) -> ResidualStream:
    """Add shared(norm(x)) and experts(norm(x)) to the stream x [batch, rows, D].

    It takes add_mlp's place in a layer of DeepSeek-V3 or GLM.
    """
    normed = rms_norm(values_of(x), layer["post_attention_layernorm"], eps, ops)
    shared = layer["shared"]
    inner = project_swiglu(normed, shared["gate_proj"], shared["up_proj"], ops)
    flat = normed.reshape(-1, normed.shape[-1])
    ids, weights = route(flat, layer["router"], layer["router_bias"], cfg, "sigmoid", ops)
    routed = experts(layer["experts"], cfg, flat, ids, weights, ops)
    routed = routed.reshape(normed.shape)
    return add_projection(x, inner, shared["down_proj"], ops, beside=routed)


def experts(
    params: Params,
    cfg: MoEConfig,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    ops: Ops,
) -> jax.Array:
    """Return the weighted sum over each row's experts, [rows, D].

    Of several devices that each hold whole experts, a device returns the sum over its own.

    params:  gate_up [experts, D, 2 * intermediate] (gate first) and
             down [experts, intermediate, D], each a Weight, or an Mxfp4Weight, Fp8Weight or
             Int4Weight; gate_up_bias and down_bias are optional
    x:       [rows, D]
    ids:     as `route` returns them
    weights: as `route` returns them

    The kernel serves up to moe_op.MAX_ROWS rows and reads each chosen expert once. Without it, or
    with more rows (prefill):
    rows * top_k < experts: the chosen experts are gathered, a copy for each row that chose one.
    rows <= FEW_ROWS: about all experts are chosen; each is read once and multiplies every row.
    more rows (prefill): rows are sorted by expert, and each is multiplied by its chosen experts.
    With rows_alike, any number of rows goes this last way.
    """
    held, first = _num_experts(params), None
    if held < cfg.num_experts:
        cfg = replace(cfg, num_experts=held)
        first = ops.layers.rank.astype(jnp.int32) * held
    if ops.moe != "reference" and x.shape[0] <= moe_op.MAX_ROWS and _kernel_takes(params, cfg, x):
        return _by_the_op(params, cfg, x, ids, weights, ops.moe, first)
    if ops.rows_alike:  # a row alone has one scale, which XLA may take out of products
        x = jnp.pad(x, ((0, max(0, ROW_TILE - x.shape[0])), (0, 0)))
        return _grouped(
            params, cfg, x, ids, weights, first, implementation=ops.moe, rows_alike=True
        )
    few = x.shape[0] <= FEW_ROWS or weights.size < cfg.num_experts
    if first is not None and few:
        ids, weights = own_routes(ids, weights, first, held)
    if weights.size < cfg.num_experts:
        return _gathered(params, cfg, x, ids, weights)
    if few:
        return _by_the_op(params, cfg, x, ids, weights, "reference", None)
    return _grouped(params, cfg, x, ids, weights, first, implementation=ops.moe)


def own_routes(
    ids: jax.Array, weights: jax.Array, first: jax.Array, held: int
) -> tuple[jax.Array, jax.Array]:
    """Return routes within the `held` experts from `first` on, ids counted from it.

    Another expert becomes one of these that some row has chosen, with weight 0. So no further
    expert is read for it, unless no row has chosen any of these.

    ids, weights: as `route` returns them
    """
    own = ids[:, : weights.shape[1]] - first
    is_own = (own >= 0) & (own < held)
    chosen = jnp.min(jnp.where(is_own, own, held))
    other = jnp.where(chosen < held, chosen, 0)
    return jnp.where(is_own, own, other), jnp.where(is_own, weights, 0.0)


def _num_experts(params: Params) -> int:
    return jax.tree.leaves(params["gate_up"])[0].shape[0]


def _kernel_takes(params: Params, cfg: MoEConfig, x: jax.Array) -> bool:
    """Return whether the op's kernel takes experts of this form; the log says why not.

    The ops of plain and MXFP4 experts are chosen at start (op_choice).
    """
    both = params["gate_up"], params["down"]
    if not any(isinstance(weight, moe_op.Codes) for weight in both):
        return True
    gate_up, down = (_as_stored(weight, x.dtype) for weight in both)
    reason = moe_op.unsupported(x.shape[0], cfg.top_k, gate_up, down, x.dtype)
    if reason is None:
        return True
    log_once(
        f"XLA multiplies by experts of {[w.shape for w in (gate_up, down)]}: the kernel {reason}"
    )
    return False


def _by_the_op(
    params: Params,
    cfg: MoEConfig,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    implementation: str,
    first_expert: jax.Array | None,
) -> jax.Array:
    gate_up, down = (_as_stored(params[name], x.dtype) for name in ("gate_up", "down"))
    inputs = moe_op.Inputs(
        x=x,
        ids=ids,
        weights=weights,
        gate_up=gate_up,
        down=down,
        gate_up_bias=params.get("gate_up_bias"),
        down_bias=params.get("down_bias"),
        gate=cfg.gate,
        alpha=cfg.alpha,
        limit=cfg.limit,
        first_expert=first_expert,
    )
    return moe_op.experts(inputs, implementation=implementation)


def _as_stored(weight: AnyWeight | Mxfp4Weight, dtype: DTypeLike) -> moe_op.Stored:
    return weight.to_array(dtype) if isinstance(weight, Weight) else weight


def _gathered(
    params: Params, cfg: MoEConfig, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> jax.Array:
    def product(x: jax.Array, name: str) -> jax.Array:
        codes, dtype = isinstance(params[name], moe_op.Codes), x.dtype
        if codes:  # every bit of the weights is kept
            x = moe_op.operand_of(x, params[name]).to_array(jnp.float32)
        weight = jax.tree.map(lambda w: w[ids], params[name]).to_array(x.dtype)
        # XLA would turn a dot with a bias into a matrix product, and first copy the gathered
        # weights (in float32). It fuses this sum with the gather, which then reads them once.
        y = jnp.sum(x[..., None].astype(jnp.float32) * weight.astype(jnp.float32), axis=-2)
        return _with_bias(y, params, name, ids).astype(dtype)

    spread = jnp.broadcast_to(x[:, None], (*ids.shape, x.shape[-1]))
    out = product(gated(cfg, product(spread, "gate_up")), "down")
    return _weighted(weights, out)


def _grouped(
    params: Params,
    cfg: MoEConfig,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    first: jax.Array | None = None,
    *,
    implementation: str,
    rows_alike: bool = False,
) -> jax.Array:
    """Sort rows by expert, pad each expert's rows to whole blocks, and multiply block by block.

    A block has BLOCK_ROWS rows and one expert. A device with whole experts of its own, from `first`
    on, makes no block for others': it sorts these pairs last, and gives them no place. Experts in
    codes are dequantised for BLOCKS_AT_ONCE blocks at a time, MXFP4 by this implementation of the
    op. Rows that fp8 experts multiply are quantised once, before they are sorted.

    With rows_alike, blocks of ROW_TILE rows are multiplied one by one. Products then have the same
    shape for any number of rows.

    lax.ragged_dot is no grouped product on a GPU: XLA multiplies every sorted row by every expert,
    with zeros in place of the other experts' rows.
    """
    rows, top_k = ids.shape
    block_rows, at_once = (ROW_TILE, 1) if rows_alike else (BLOCK_ROWS, BLOCKS_AT_ONCE)
    if first is not None:  # else the device has all experts
        own = ids - first
        ids = jnp.where((own >= 0) & (own < cfg.num_experts), own, cfg.num_experts)
    expert = ids.reshape(-1)
    order = jnp.argsort(expert)  # stable
    expert = expert[order]
    sizes = jnp.bincount(expert, length=cfg.num_experts)
    blocks = -(-sizes // block_rows)
    ends = jnp.cumsum(blocks)
    place = (
        (ends - blocks)[expert] * block_rows
        + jnp.arange(rows * top_k)
        - (jnp.cumsum(sizes) - sizes)[expert]
    )
    num_blocks = -(-rows * top_k // block_rows) + cfg.num_experts  # enough, however the rows choose
    if rows_alike:
        num_blocks = min(num_blocks, rows * top_k)
    of_block = jnp.minimum(
        jnp.searchsorted(ends, jnp.arange(num_blocks), side="right"), cfg.num_experts - 1
    )
    if first is not None:
        place = jnp.where(expert < cfg.num_experts, place, num_blocks * block_rows)
    row = jnp.zeros(num_blocks * block_rows, order.dtype).at[place].set(order // top_k)

    quantised = moe_op.operand_of(x, params["gate_up"])

    def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32)

    def run(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert, row = block

        def product(rows: moe_op.Operand, name: str) -> jax.Array:
            weight = _matrix_of(params[name], expert, x.dtype, implementation)
            if isinstance(weight, moe_op.Codes):
                y = moe_op.multiply(contract, rows, weight, x.dtype)
            else:
                y = contract(rows.values, weight)
            return _with_bias(y, params, name, expert).astype(x.dtype)

        inner = gated(cfg, product(jax.tree.map(lambda a: a[row], quantised), "gate_up"))
        return product(moe_op.operand_of(inner, params["down"]), "down")

    blocks = of_block, row.reshape(num_blocks, block_rows)
    if first is None:
        out = lax.map(run, blocks, batch_size=None if rows_alike else BLOCKS_AT_ONCE)
        out = out.reshape(-1, x.shape[-1])
        picked = out[place]
    else:
        out = _first_blocks(run, blocks, ends[-1], at_once, x.shape[-1]).reshape(-1, x.shape[-1])
        picked = out.at[place].get(mode="fill", fill_value=0)
    unsorted = (
        jnp.zeros((rows * top_k, x.shape[-1]), x.dtype)
        .at[order]
        .set(picked)
        .reshape(rows, top_k, -1)
    )
    if rows_alike:
        return in_tiles(_weighted, weights, unsorted)
    return _weighted(weights, unsorted)


def _weighted(weights: jax.Array, of_experts: jax.Array) -> jax.Array:
    """Return the weighted sum [rows, D] of each row's experts, [rows, top_k, D]."""
    summed = jnp.einsum("tk,tkd->td", weights, of_experts.astype(jnp.float32))
    return summed.astype(of_experts.dtype)


def _first_blocks(
    run: Callable[[tuple[jax.Array, jax.Array]], jax.Array],
    blocks: tuple[jax.Array, jax.Array],
    count: jax.Array,
    at_once: int,
    width: int,
) -> jax.Array:
    """Return run's results [num_blocks, rows, width] of the first `count` blocks, else zeros.

    at_once: blocks that run at a time

    The device chooses how many: the host reads the loop's condition back, which prefill can afford.
    """
    num_blocks, rows = blocks[1].shape
    dtype = jax.eval_shape(run, jax.tree.map(lambda b: b[0], blocks)).dtype
    at_once = min(at_once, num_blocks)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * at_once, num_blocks - at_once)
        some = jax.tree.map(lambda b: lax.dynamic_slice_in_dim(b, start, at_once), blocks)
        return lax.dynamic_update_slice_in_dim(out, jax.vmap(run)(some), start, 0)

    zeros = jnp.zeros((num_blocks, rows, width), dtype)
    return lax.fori_loop(0, -(-count // at_once), step, zeros)


def _matrix_of(
    weight: AnyWeight | Mxfp4Weight, expert: jax.Array, dtype: DTypeLike, implementation: str
) -> jax.Array | moe_op.Codes:
    """Return one expert's matrix [in, out]."""
    if isinstance(weight, Mxfp4Weight):
        return moe_op.dequantise(weight, expert, dtype, implementation=implementation)
    own = jax.tree.map(lambda w: w[expert], weight)
    return own.to_array(dtype) if isinstance(own, Weight) else own


def _with_bias(y: jax.Array, params: Params, name: str, expert: jax.Array) -> jax.Array:
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias[expert].astype(jnp.float32)


def gated(cfg: MoEConfig, gate_up: jax.Array) -> jax.Array:
    """Apply the experts' activation in float32, [..., 2 * intermediate] -> [..., intermediate]."""
    return moe_op.reference.gated(gate_up, cfg.gate, alpha=cfg.alpha, limit=cfg.limit)
