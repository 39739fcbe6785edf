"""Loads, addresses and comparisons of one thread, in PTX and MLIR where Pallas has no word for it.

Values are MLIR's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

Value: TypeAlias = Any  # an ir.Value, whose operands' types MLIR checks

inline_ptx = utils.inline_ptx  # pyright: ignore[reportAttributeAccessIssue]  # new in jax 0.11


def load(kind: str, pointer: Value, offset: int, result: ir.Type) -> Value:
    text = f"ld.{kind} $0, [$1 + {offset}];"
    return inline_ptx(text, pointer, result_types=result, has_side_effects=True)


def load_if(condition: Value, address: Value, offset: int, count: int) -> list[Value]:
    """Return `count` words from an address on, zeros unless the condition holds."""
    suffix, registers = vector_of([f"${i}" for i in range(count)])
    lines = [
        "{ .reg .pred here;",
        f"setp.ne.u32 here, ${count + 1}, 0;",
        *(f"mov.u32 ${i}, 0;" for i in range(count)),
        f"@here ld.global.{suffix} {registers}, [${count} + {offset}];",
        "}",
    ]
    found = inline_ptx(
        "\n".join(lines),
        *(address, arith.extui(i32(), condition)),
        result_types=[i32()] * count,
        has_side_effects=True,
    )
    return list(found)


def vector_of(names: Sequence[str]) -> tuple[str, str]:
    """Return the suffix of a PTX load or store of these registers, and the registers."""
    if len(names) == 1:
        return "u32", names[0]
    return f"v{len(names)}.u32", "{" + ", ".join(names) + "}"


def address_of(array: Value) -> Value:
    """Return the address of an array's first element, i64."""
    return llvm.ptrtoint(i64(), utils.memref_ptr(array))


def at(address: Value, offset: Value) -> Value:
    return arith.addi(address, arith.extui(i64(), offset))


def equal(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def below(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def c32(number: int) -> Value:
    return utils.c(number, i32())
