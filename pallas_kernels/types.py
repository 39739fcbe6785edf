"""Names for types that jax leaves unnamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import jax

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct  # only its shape and dtype are read
Index: TypeAlias = jax.Array | int  # an int32 scalar of a kernel, traced or static
STATIC = {"static": True}  # metadata of a dataclass field that is no array: part of jit's key

if TYPE_CHECKING:
    from jax._src.state.types import TransformedRef as Ref
    from jax.experimental.pallas import Slice as PallasSlice

    Slice: TypeAlias = slice | PallasSlice  # what pl.ds returns
else:
    Ref = Any  # a kernel's argument is a tracer that has TransformedRef's methods
    Slice = Any

# Pallas declares these as AbstractRef and as WGMMAAbstractAccumulatorRef, which have no typed `at`
# and no typed `[...]`.
Barrier: TypeAlias = Any
Accumulator: TypeAlias = Any
