"""Several rounds as one program: the host pays the cost of a dispatch once for all of them.

vLLM calls a relative of this multi-step scheduling. No part of a round waits for the host. The
state is the loop's carry, and metadata is rebuilt on the device. A request that ends in one of the
rounds is idle in the rest.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Protocol

import jax

from jaxspec.cache.metadata import BlockTables
from jaxspec.config import EngineConfig, RoundConfig
from jaxspec.decode.programs import Program, compile_round, result_and_state, run_round
from jaxspec.decode.round import decode_round
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.layers.params import Params
from jaxspec.sampling.loop_rows import scan_rows

# A host takes one to three milliseconds to schedule and dispatch a program: hundreds of arguments,
# and CUDA graphs whose addresses have moved. So many rounds outlast that on an H200; more would
# only make new requests wait (docs/notes/rounds-per-step.md). Pairs, ascending: (bytes of the
# target's weights, rounds of a target below them).
SEVERAL = ((1 << 30, 4), (6 << 30, 2))
# XLA takes three milliseconds to launch a program of 32 layers on two devices. Its round takes them
# as long, with 8 GB of weights each; two rounds outlast it (docs/notes/tensor-parallel.md).
SEVERAL_SHARED, BELOW_BYTES_SHARED = 2, 32 << 30


def rounds_per_step(config: EngineConfig, *, on_gpu: bool, weight_bytes: int) -> int:
    """Return the number of rounds that one program runs.

    It is config.rounds_per_step if that is set, else as many as a target needs to outlast the host.

    weight_bytes: of the target, on one device
    """
    if config.rounds_per_step is not None:
        return config.rounds_per_step
    if not on_gpu or config.compilation != "round":
        return 1
    for below_bytes, rounds in SEVERAL:
        if weight_bytes < below_bytes:
            return rounds
    shares = config.tensor_parallel_size > 1
    return SEVERAL_SHARED if shares and weight_bytes < BELOW_BYTES_SHARED else 1


def decode_rounds(
    cfg: RoundConfig, num_rounds: int, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    """Run decode_round num_rounds times.

    The block tables hold room for all rounds. Every array of the Verification has an axis of rounds
    before its own axes.
    """

    def step(_: jax.Array, state: DecodeState) -> tuple[Verification, DecodeState]:
        return decode_round(cfg, params, state, block_tables)

    return scan_rows(step, state, num_rounds)


# The whole state is donated: it is a loop's carry, whose small arrays are copied once per program
# in any case.
_rounds = Program(decode_rounds, donate=3, static=2, results=result_and_state)


def run_rounds(
    cfg: RoundConfig,
    num_rounds: int,
    params: Params,
    state: DecodeState,
    block_tables: Any,
    compilation: str,
) -> tuple[Verification, DecodeState]:
    """Run the rounds of a step: one in the given compilation mode, or several in one program."""
    if num_rounds == 1:
        return run_round(cfg, params, state, block_tables, compilation)
    return _rounds(cfg, num_rounds, params, state, block_tables)


def compile_rounds(
    cfg: RoundConfig, num_rounds: int, params: Params, state: DecodeState, block_tables: Any
) -> None:
    """Compile the program of a step's rounds for these shapes; see Program.compile."""
    if num_rounds == 1:
        compile_round(cfg, params, state, block_tables)
    else:
        _rounds.compile(cfg, num_rounds, params, state, block_tables)


class RoundProgram(Protocol):
    """The signature of run_rounds, for programs that also record the rounds."""

    def __call__(
        self,
        cfg: RoundConfig,
        num_rounds: int,
        params: Params,
        state: DecodeState,
        block_tables: Any,
        compilation: str,
        /,
    ) -> tuple[Verification, DecodeState]: ...


def each_round(verification: Verification) -> list[Verification]:
    """Return the results of a step in order: several rounds, a single one, or a prefill."""
    if verification.num_sampled.ndim == 1:
        return [verification]
    return [jax.tree.map(itemgetter(i), verification) for i in range(len(verification.num_sampled))]
