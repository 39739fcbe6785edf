"""Products of activations with weights, and the residual stream that they add to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxspec.config import Ops
from jaxspec.layers.log_once import log_once
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import AnyWeight, Weight
from jaxspec.layers.row_tiles import ROW_TILE
from jaxspec.layers.sums import add_sum, partial_dtype
from pallas_kernels import fp8_matmul as fp8_op
from pallas_kernels import int4_matmul as int4_op
from pallas_kernels import matmul as matmul_op
from pallas_kernels import sum_norm as sum_norm_op
from pallas_kernels.fp8_matmul import Fp8Weight, RowNorm, Rows
from pallas_kernels.int4_matmul import Int4Weight

FEW_ROWS, SWIGLU_ROWS = 64, (128, 256)  # at most; rows that the kernel of gate and up takes


@struct.dataclass
class DeferredNorm:
    """A norm that the next product completes, as the op of its weights takes it.

    kind:    type of the weights that the product before multiplied by, static; those of the next
             have the same
    scaled:  [batch * rows, D], the rows times the norm's gain
    squares: float32 [pieces, batch * rows or more], partial sums of the rows' squares
    largest: float32 [pieces, batch * rows or more], the largest magnitudes of scaled, if the
             next product quantises it
    """

    kind: type[AnyWeight] = struct.field(pytree_node=False)
    scaled: jax.Array
    squares: jax.Array
    largest: jax.Array | None = None


@struct.dataclass
class ResidualStream:
    """The residual stream between two blocks of a layer, or the rows between gate, up and down.

    x:             [batch, rows, D]; codes in fp8 if the product that made it quantised it
    deferred_norm: the next norm, if the product that made x prepared it
    normed:        [batch, rows, D], x under the next norm, if it is made together with x
    largest:       float32 [pieces, batch * rows or more], the largest magnitudes of x, if the
                   product that made x found them for the next product
    quantised:     [batch * rows or more, D], what the next product multiplies in fp8, if the
                   product that made x quantised it: x, if that is codes, or x under the next norm
    """

    x: jax.Array
    deferred_norm: DeferredNorm | None = None
    normed: jax.Array | None = None
    largest: jax.Array | None = None
    quantised: Rows | None = None

    def rows_in_fp8(self, *, normed: bool) -> Rows | None:
        """Return the rows of the next product in fp8, None if they are not there.

        normed: whether it follows a norm
        """
        if self.quantised is None or normed == (self.x.dtype == self.quantised.codes.dtype):
            return None
        return self.quantised


Stream = jax.Array | ResidualStream  # [batch, rows, D], prepared for the next norm or not


@dataclass(frozen=True)
class _Rows:
    """The rows of a product, as the op takes them.

    x:       [rows and padding, depth], values or codes
    norm:    that the op begins with
    squares: of a norm that the product completes; see DeferredNorm
    largest: see ResidualStream and DeferredNorm
    scales:  of codes
    """

    x: jax.Array
    norm: RowNorm | None = None
    squares: jax.Array | None = None
    largest: jax.Array | None = None
    scales: jax.Array | None = None


@dataclass(frozen=True)
class _Next:
    """What follows a product, which may prepare its result for it.

    norm:   of the result
    weight: of the product that multiplies gate and up
    """

    norm: Norm | None = None
    weight: AnyWeight | None = None


@dataclass(frozen=True)
class _Operands:
    """Weights of one product, as their op takes them.

    kind:       type of the weights
    matrices:   arrays, or quantised weights
    transposed: the arrays are [out, in]
    """

    kind: type[AnyWeight]
    matrices: tuple[Any, ...]
    transposed: bool = False

    @classmethod
    def of(cls, weights: tuple[AnyWeight, ...]) -> _Operands:
        first = weights[0]
        assert {type(weight) for weight in weights} == {type(first)}, "weights of several forms"
        if isinstance(first, Weight):
            values = tuple(weight.values for weight in weights if isinstance(weight, Weight))
            return cls(Weight, values, first.transposed)
        return cls(type(first), weights)

    def shares_norm(self, rows: int, width: int, weights: tuple[AnyWeight, ...]) -> bool:
        """Return whether the op shares the norm of its result with the product after it.

        weights: of the latter, () if they are not known
        """
        if any(type(weight) is not self.kind for weight in weights):
            return False
        if self.kind is Weight:
            return matmul_op.shares_norm(rows, width)
        if not weights:
            return False
        if self.kind is Int4Weight:
            return int4_op.shares_norm(rows, width)
        both = [weight for weight in (*self.matrices, *weights) if isinstance(weight, Fp8Weight)]
        return fp8_op.shares_norm(rows, width, both)

    def row_tile(self, rows: int) -> int:
        """Return the number to whose multiples rows are padded, so that the op copies nothing."""
        first = self.matrices[0]
        is_library = isinstance(first, Fp8Weight) and first.activation != "block"
        return fp8_op.LIBRARY_ROWS if is_library and rows > FEW_ROWS else ROW_TILE

    def quantises_next(
        self, rows: int, width: int, weights: tuple[AnyWeight, ...], *, swiglu: bool = False
    ) -> bool:
        """Return whether the op quantises its result for the product after it.

        weights: of the latter, () if they are not known
        swiglu:  whether SwiGLU is between both; else a norm
        """
        both = [weight for weight in (*self.matrices, *weights) if isinstance(weight, Fp8Weight)]
        if not weights or len(both) < len(self.matrices) + len(weights):
            return False
        return fp8_op.quantises_next(rows, width, both, swiglu=swiglu)

    def unsupported(self, product: matmul_op.Product) -> str | None:
        """Return why the op's kernel cannot make this product, None if it can."""
        if self.kind is Fp8Weight:
            return fp8_op.unsupported(product)
        if self.kind is Int4Weight:
            return int4_op.unsupported(product)
        return matmul_op.unsupported(product)

    def row_norm(
        self, stream: ResidualStream, x: jax.Array, norm: Norm, ops: Ops, implementation: str
    ) -> RowNorm | None:
        """Return the norm for the op, or None if the op does not take it.

        x:              [rows and padding, width], the stream's values
        implementation: of the product
        """
        if self.kind is not Fp8Weight or stream.normed is not None or ops.rms_norm == "reference":
            return None
        if not fp8_op.takes_norm(x, implementation):
            return None
        return RowNorm(norm.gain, norm.eps)

    def multiply(
        self, inputs: matmul_op.Inputs[Any], rows: _Rows, implementation: str
    ) -> matmul_op.Result | fp8_op.BeforeNorm:
        """Run the op on inputs, whose x are these rows."""
        if self.kind is Fp8Weight:
            largest = None if implementation == "reference" else rows.largest
            if inputs.gain is not None:
                return fp8_op.product_for_norm(
                    inputs, largest=largest, implementation=implementation
                )
            return fp8_op.fp8_matmul(
                inputs,
                norm=rows.norm,
                largest=largest,
                scales=rows.scales,
                implementation=implementation,
            )
        if self.kind is Int4Weight:
            return int4_op.int4_matmul(inputs, implementation=implementation)
        return matmul_op.matmul(inputs, implementation=implementation)


@dataclass(frozen=True)
class _Form:
    """The static form of a product; see the matmul op.

    out_dtype:  dtype of the result
    swiglu:     multiply by two weights and combine the results as SwiGLU
    """

    out_dtype: DTypeLike
    swiglu: bool = False


def values_of(x: Stream) -> jax.Array:
    """Return the stream's values [batch, rows, D]."""
    return x.x if isinstance(x, ResidualStream) else x


def normed_values(x: Stream, norm: Norm, ops: Ops) -> jax.Array:
    """Return the norm of the stream [batch, rows, D], which may have been made together with it."""
    if isinstance(x, ResidualStream) and x.normed is not None:
        return x.normed
    return rms_norm(values_of(x), norm.gain, norm.eps, ops)


def pick_row(x: jax.Array, row: jax.Array | None) -> jax.Array:
    """Return row int32 [batch] of x [batch, rows, ...] as [batch, 1, ...].

    Returns x itself if row is None or x has one row.
    """
    if row is None or x.shape[1] == 1:
        return x
    return jnp.take_along_axis(x, row.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)


def idle_rows(batch: int, rows: int, ops: Ops) -> int:
    """Return how many idle rows a request of `rows` rows should have beside them.

    Few rows that are no multiple of 8 take a copy of each operand before a product's kernel, and
    one of the result after it. Many rows get an idle one if the kernel of gate and up takes them
    then.
    """
    if ops.matmul == "reference":
        return 0
    if batch * rows <= FEW_ROWS:
        padding = -rows % (ROW_TILE // math.gcd(batch, ROW_TILE)) if batch * rows > ROW_TILE else 0
        return padding if batch * (rows + padding) <= FEW_ROWS else 0
    return int(batch * (rows + 1) in SWIGLU_ROWS and batch * rows not in SWIGLU_ROWS)


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """Multiply x [..., in] by weight [in, out] (+ bias [out]) with XLA.

    The product accumulates in float32 and has x's dtype.
    """
    y = jnp.matmul(x, weight.to_array(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def project(
    x: Stream,
    weights: tuple[AnyWeight, ...],
    ops: Ops,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Multiply (the norm of) x [batch, rows, in] by each of weights [in, out], and add bias.

    The results stand side by side.

    Returns [batch, rows, sum of outs] in x's dtype, rounded once, after the bias.
    """
    return _multiply(x, weights, ops, _Form(values_of(x).dtype), norm=norm, bias=bias).x


def project_swiglu(
    x: Stream, gate: AnyWeight, up: AnyWeight, ops: Ops, *, norm: Norm | None = None
) -> jax.Array:
    """Return silu(x @ gate) * (x @ up) of (the norm of) x [batch, rows, in].

    The result is [batch, rows, inner].
    """
    form = _Form(values_of(x).dtype, swiglu=True)
    return _multiply(x, (gate, up), ops, form, norm=norm).x


def project_swiglu_for(
    down: AnyWeight, x: Stream, gate: AnyWeight, up: AnyWeight, ops: Ops, *, norm: Norm | None
) -> ResidualStream:
    """Return project_swiglu(x, gate, up), with what the product with `down` needs to know of it.

    x of the result may be codes in fp8, for that product alone.
    """
    form = _Form(values_of(x).dtype, swiglu=True)
    return _multiply(x, (gate, up), ops, form, norm=norm, following=_Next(weight=down))


def vocab_logits(hidden: jax.Array, lm_head: AnyWeight, ops: Ops) -> jax.Array:
    """Return float32 logits [..., vocab] of hidden [..., D].

    With a vocabulary that is cut over devices, they are those of the device's own tokens.

    The logits are the float32 accumulator. Rounding them to bfloat16 makes ties, and ties make
    greedy text depend on the path.
    """
    return _multiply(hidden, (lm_head,), ops, _Form(jnp.float32)).x


def add_projection(
    stream: Stream,
    x: Stream,
    weight: AnyWeight,
    ops: Ops,
    *,
    bias: jax.Array | None = None,
    beside: jax.Array | None = None,
    next_norm: Norm | None = None,
) -> ResidualStream:
    """Add x @ weight (+ bias) to the residual stream: the end of an attention or MLP block.

    A device of several multiplies its piece of x by its piece of the weight, and the stream gets
    the sum of all devices' products. x may also be whole on each device.

    beside:    another term of the block's output, [batch, rows, D], such as that of its experts
    next_norm: the norm that follows. The sum comes prepared for it where the kernels of product and
    norm are chosen, the norm's weights are of this one's type and there is no bias. Sums of several
    devices come normed already, and those of 65 to 256 rows of a deep plain product.
    """
    if ops.layers.size > 1:
        partial = project_part(values_of(x), weight, ops)
        partial = partial if beside is None else partial + beside
        return add_to_stream(stream, partial, ops, bias=bias, next_norm=next_norm)
    if beside is not None:
        return add_to_stream(add_projection(stream, x, weight, ops, bias=bias), beside, ops)
    form = _Form(values_of(stream).dtype)
    following = _Next(norm=next_norm if ops.shares_norms and bias is None else None)
    residual = values_of(stream)
    return _multiply(x, (weight,), ops, form, bias=bias, residual=residual, following=following)


def project_part(x: jax.Array, weight: AnyWeight, ops: Ops) -> jax.Array:
    """Return the device's term of x @ weight, cut along its depth: [batch, rows, out].

    The terms are not summed yet: add_to_stream or sum_of_devices has to follow.

    x: [batch, rows, in], the device's piece of it or all of it
    """
    x = ops.layers.own_piece(x, weight.depth)
    return _multiply(x, (weight,), ops, _Form(partial_dtype(x, ops))).x


def add_to_stream(
    stream: Stream,
    delta: jax.Array,
    ops: Ops,
    *,
    bias: jax.Array | None = None,
    next_norm: Norm | None = None,
) -> ResidualStream:
    """Add a block's output delta [batch, rows, D] (+ bias) to the residual stream.

    delta: the device's term of it, where several devices share the layers
    """
    residual = values_of(stream)
    if ops.layers.size > 1:
        if bias is not None:  # one device's term has it
            delta = delta + jnp.where(ops.layers.rank == 0, bias, 0).astype(delta.dtype)
        x, normed = add_sum(residual, delta, ops, next_norm)
        return ResidualStream(x, normed=normed)
    assert bias is None  # a product adds its own
    return ResidualStream(residual + delta)


def _multiply(
    x: Stream,
    weights: tuple[AnyWeight, ...],
    ops: Ops,
    form: _Form,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    following: _Next = _Next(),
) -> ResidualStream:
    """Run the weights' op on (the norm of) x [batch, rows, depth].

    See the matmul op for bias and residual.
    """
    stream = x if isinstance(x, ResidualStream) else ResidualStream(x)
    *shape, depth = stream.x.shape
    count, operands = math.prod(shape), _Operands.of(weights)
    deferred = stream.deferred_norm if norm is not None else None
    if deferred is not None and deferred.kind is not operands.kind:
        deferred = None
    codes = stream.rows_in_fp8(normed=norm is not None) if operands.kind is Fp8Weight else None
    assert stream.x.dtype != jnp.float8_e4m3fn or codes is not None, "codes need their scales"
    # Few rows have one order anyway. So have logits in fp8 blocks, 64 rows at a time.
    in_order = ops.is_prefill and ops.prefill_in_order and count > FEW_ROWS
    in_order &= operands.kind is not Fp8Weight or jnp.dtype(form.out_dtype) == jnp.bfloat16
    next_gain = None
    if following.norm is not None and residual is not None and not in_order:
        width = residual.shape[-1]
        if operands.shares_norm(count, width, following.norm.weights):
            next_gain = following.norm.gain
    implementation, padding = _choose_backend(
        jax.ShapeDtypeStruct((count, depth), (stream.x if codes is None else codes.codes).dtype),
        operands,
        ops,
        form,
        has_bias=bias is not None,
        has_residual=residual is not None,
        is_normed=deferred is not None,
        prepares_norm=next_gain is not None,
        in_order=in_order,
    )
    if implementation == "reference":
        deferred, next_gain = None, None

    def flat(a: jax.Array) -> jax.Array:
        a = a.reshape(count, -1)
        return jnp.pad(a, ((0, padding), (0, 0))) if padding else a

    if codes is not None:
        codes = codes.take_rows(0, count + padding)
        rows = _Rows(codes.codes, scales=codes.scales)
    elif deferred is not None:
        rows = _Rows(flat(deferred.scaled), squares=deferred.squares, largest=deferred.largest)
    elif norm is None:
        rows = _Rows(flat(stream.x), largest=stream.largest)
    else:
        values = flat(stream.x)
        row_norm = operands.row_norm(stream, values, norm, ops, implementation)
        rows = _Rows(values, norm=row_norm)
        if row_norm is None:
            rows = _Rows(flat(normed_values(stream, norm, ops)))
    inputs = matmul_op.Inputs(
        x=rows.x,
        weights=operands.matrices,
        squares=rows.squares,
        eps=0.0 if norm is None else norm.eps,
        bias=bias,
        residual=None if residual is None else flat(residual),
        gain=next_gain,
        swiglu=form.swiglu,
        transposed=operands.transposed,
        in_order=in_order,
        out_dtype=form.out_dtype,
    )
    return _run(inputs, rows, operands, ops, implementation, following, tuple(shape))


def _run(
    inputs: matmul_op.Inputs[Any],
    rows: _Rows,
    operands: _Operands,
    ops: Ops,
    implementation: str,
    following: _Next,
    shape: tuple[int, ...],
) -> ResidualStream:
    """Run the op in the form that prepares its result for what follows.

    shape: of the result without padding and width
    """
    count = math.prod(shape)

    def unpadded(a: jax.Array) -> jax.Array:
        return a[:count].reshape(*shape, -1)

    if implementation != "reference" and inputs.gain is None:
        if _quantises_swiglu(len(rows.x), operands, following.weight, ops):
            made = fp8_op.quantised_swiglu(
                inputs, norm=rows.norm, scales=rows.scales, implementation=implementation
            )
            return ResidualStream(unpadded(made.codes), quantised=made)
        if following.norm is not None and _quantises_norm(inputs, operands, following.norm, ops):
            next_norm = RowNorm(following.norm.gain, following.norm.eps)
            out, made = fp8_op.product_and_norm(
                inputs, next_norm, scales=rows.scales, implementation=implementation
            )
            return ResidualStream(unpadded(out), quantised=made)
    if _measures(len(rows.x), operands, following.weight, ops, implementation):
        out, found = fp8_op.measured_swiglu(
            inputs, norm=rows.norm, largest=rows.largest, implementation=implementation
        )
        return ResidualStream(unpadded(out), largest=found)
    if following.norm is not None and (num_parts := _num_parts(inputs, operands, ops)) > 1:
        total, normed = _multiply_in_parts(inputs, num_parts, following.norm, ops)
        return ResidualStream(unpadded(total), normed=unpadded(normed))
    made = operands.multiply(inputs, rows, implementation)
    if not isinstance(made, tuple):
        return ResidualStream(unpadded(made))
    out, scaled, squares = made[:3]
    found = made.largest if isinstance(made, fp8_op.BeforeNorm) else None
    prepared = DeferredNorm(operands.kind, scaled[:count], squares, found)
    return ResidualStream(unpadded(out), prepared)


def _quantises_swiglu(
    rows: int, operands: _Operands, next_weight: AnyWeight | None, ops: Ops
) -> bool:
    """Return whether gate and up of many rows come quantised for the product after them."""
    if next_weight is None or not _hands_on_codes(ops):
        return False
    return operands.quantises_next(rows, next_weight.depth, (next_weight,), swiglu=True)


def _quantises_norm(
    inputs: matmul_op.Inputs[Any], operands: _Operands, next_norm: Norm, ops: Ops
) -> bool:
    """Return whether a sum of many rows comes under its norm, quantised for the next product."""
    if inputs.residual is None or not _hands_on_codes(ops):
        return False
    rows, width = inputs.residual.shape
    return operands.quantises_next(rows, width, next_norm.weights)


def _hands_on_codes(ops: Ops) -> bool:
    """Return whether products of many rows may quantise their result.

    Kernels for this take some numbers of rows, and their SwiGLU has other bits than XLA's. So no
    prefill call takes them: calls have any number of rows. Several devices exchange values.
    """
    return not ops.is_prefill and ops.layers.size == 1


def _num_parts(inputs: matmul_op.Inputs[Any], operands: _Operands, ops: Ops) -> int:
    """Return the parts of the depth that XLA multiplies for the op of sum and norm; 1 for none."""
    if operands.kind is not Weight or inputs.residual is None or ops.is_prefill:
        return 1
    (rows, depth), width = inputs.x.shape, inputs.residual.shape[1]
    if sum_norm_op.unsupported(width, inputs.residual.dtype) is not None:
        return 1
    return sum_norm_op.num_parts(rows, depth, width)


def _multiply_in_parts(
    inputs: matmul_op.Inputs[jax.Array], num_parts: int, next_norm: Norm, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """Return (residual + x @ weight, its norm), with the depth cut into parts."""
    (weight,), residual = inputs.weights, inputs.residual
    assert residual is not None and inputs.bias is None and not inputs.transposed
    parts = jnp.einsum(
        "rpd,pdn->prn",
        inputs.x.reshape(len(inputs.x), num_parts, -1),
        weight.reshape(num_parts, -1, weight.shape[1]),
        preferred_element_type=jnp.float32,
    )
    return sum_norm_op.sum_norm(
        parts, residual, next_norm.gain, eps=next_norm.eps, implementation=ops.rms_norm
    )


def _measures(
    rows: int, operands: _Operands, next_weight: AnyWeight | None, ops: Ops, implementation: str
) -> bool:
    """Return whether a product finds the largest magnitudes in its result, for the one after it."""
    if operands.kind is not Fp8Weight or not isinstance(next_weight, Fp8Weight):
        return False
    if ops.layers.size > 1:  # x may be another piece then
        return False
    return fp8_op.takes_largest(rows, next_weight, implementation)


def _choose_backend(
    x: jax.ShapeDtypeStruct,
    operands: _Operands,
    ops: Ops,
    form: _Form,
    *,
    has_bias: bool,
    has_residual: bool,
    is_normed: bool,
    prepares_norm: bool,
    in_order: bool,
) -> tuple[str, int]:
    """Return the op's implementation for this product, and the rows of padding it needs.

    The kernels serve the few rows of a decode step, gate and up of 128 or 256 rows, and all rows of
    prefill in order, of fp8 blocks and of int4. XLA multiplies the others; the log says so once,
    with the reason. Of other fp8 weights, XLA multiplies more rows within the op, and kernels
    quantise them.
    """
    rows, depth = x.shape
    if ops.matmul == "reference":  # XLA multiplies one row by a kernel of its own
        return "reference", max(0, ROW_TILE - rows) if ops.rows_alike else 0
    padding = -rows % operands.row_tile(rows) if rows > ROW_TILE else 0
    product = matmul_op.Product(
        jax.ShapeDtypeStruct((rows + padding, depth), x.dtype),
        operands.matrices,
        biased=has_bias,
        residual=has_residual,
        normed=is_normed,
        norms=prepares_norm,
        swiglu=form.swiglu,
        transposed=operands.transposed,
        in_order=in_order,
        out_dtype=form.out_dtype,
    )
    reason = operands.unsupported(product)
    if reason is None:
        return ops.matmul, padding
    log_once(f"XLA multiplies by {[w.shape for w in operands.matrices]}: the kernel {reason}")
    return "reference", 0
