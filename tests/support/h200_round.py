"""Rounds compiled for an H200 (h200.py): their arguments by shape, and what the host launches."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxspec import drafts, models
from jaxspec.config import RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode import state as decode_state
from jaxspec.decode.prefill import prefill
from jaxspec.decode.state import DecodeState
from jaxspec.drafts import DraftModelConfig
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.drafts.families import layered
from jaxspec.layers.params import Params, ParamSpec, is_spec
from jaxspec.loading.binding import shared_weights
from jaxspec.parallel.layout import ONE_DEVICE_LAYOUT, Layout
from jaxspec.sampling.processors.truncation import TruncationState
from jaxspec.sampling.state import SamplingState
from tests.support import h200

# Copies to an address that the host computes, and those on another stream.
COPIES_ON_STREAMS = {"kDynamicSliceFusion", "kAsyncStart", "kAsyncDone"}


@dataclass
class Thunk:
    """A step of the executable: kind as XLA names it (kCustomKernel, kWhile, ...), and the steps
    inside."""

    kind: str
    inside: list[Thunk]

    def launches(self) -> Counter[str]:
        """Kinds of the kernels, copies and library calls in it."""
        if not self.inside or self.kind == "kDynamicSliceFusion":
            return Counter([self.kind])
        return sum((thunk.launches() for thunk in self.inside), Counter())


def body_of(thunk: Thunk) -> Thunk:
    """Of the first loop in it."""
    loop = next(inside for inside in thunk.inside if inside.kind == "kWhile")
    [body] = [part for part in loop.inside if part.kind == "body"]
    return body


def parse_thunks(dump: str) -> Thunk:
    """XLA's thunk_sequence dump, whose indentation is the nesting."""
    root = Thunk("program", [])
    open_at = [(-1, root)]
    for line in dump.splitlines():
        if not line.strip():
            continue
        kind = re.match(r"\s*(?:\d+: )?(\w+)", line)
        assert kind is not None, line
        indent = len(line) - len(line.lstrip())
        if kind[1] in ("condition", "body"):  # the parts of a loop, which XLA does not indent
            while open_at[-1][1].kind != "kWhile":
                open_at.pop()
            indent = open_at[-1][0] + 1
        while indent <= open_at[-1][0]:
            open_at.pop()
        thunk = Thunk(kind[1], [])
        open_at[-1][1].inside.append(thunk)
        open_at.append((indent, thunk))
    return root


@dataclass(frozen=True)
class Compiled:
    """hlo: optimised. thunks: what the host or a CUDA graph launches, in order. ptxas: its report
    on every Mosaic kernel."""

    cfg: RoundConfig
    num_rounds: int
    hlo: str
    thunks: Thunk
    ptxas: str
    aliased: int  # bytes of the results that live in donated arguments

    @property
    def num_loops(self) -> int:
        """Around a draft step: the draft's, and that of the rounds."""
        return 1 if self.num_rounds == 1 else 2

    @property
    def round(self) -> Thunk:
        """What launches a round: of several, the body of their loop."""
        return self.thunks if self.num_rounds == 1 else body_of(self.thunks)


def weights(specs: Params, layout: Layout = ONE_DEVICE_LAYOUT) -> Params:
    """Return a parameter table's arrays on a layout's devices, by their shapes, in bfloat16."""

    def struct(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(layout.shape_of(spec), jnp.dtype(spec.dtype or jnp.bfloat16))

    return jax.tree.map(struct, specs, is_leaf=is_spec)


def abstract_arguments(
    cfg: RoundConfig, batch: int, pages: int, cache_dtype: Any = jnp.bfloat16
) -> tuple[Params, DecodeState, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return params, state and block tables of decode_round, by their shapes alone."""
    struct, draft = jax.ShapeDtypeStruct, layered(cfg.draft)
    place = cfg.placement
    target = weights(models.family(cfg.target).param_specs(cfg.target), place.target(cfg.target))
    bound = dict(weights(drafts.family(draft).param_specs(draft), place.draft(draft)))
    if not isinstance(draft, DraftModelConfig):
        bound |= shared_weights(draft, bound, target)
    if draft.maps_vocabulary:
        bound["draft_to_target"] = struct((draft.draft_vocab_size,), jnp.int32)
        bound["target_to_draft"] = struct((draft.vocab_size,), jnp.int32)
    ints, floats = struct((batch,), jnp.int32), struct((batch,), jnp.float32)
    processors = {"truncation": TruncationState(ints, floats)} if cfg.processors else {}  # type: ignore[arg-type]
    sampling = SamplingState(struct((batch, 2), jnp.uint32), floats, processors)  # type: ignore[arg-type]
    groups = len(cfg.cache_groups)
    new = lambda sampling: decode_state.init_state(  # noqa: E731
        cfg,
        sampling,
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, 4), jnp.int32),
        (batch * pages,) * groups,
        dtype=jnp.bfloat16,
        cache_dtype=cache_dtype,
    )
    return (
        {"target": target, "draft": bound},
        jax.eval_shape(new, sampling),
        (struct((batch, pages), jnp.int32),) * groups,
    )


def compile_round(
    cfg: RoundConfig,
    batch: int,
    pages: int,
    *,
    num_rounds: int = 1,
    cache_dtype: Any = jnp.bfloat16,
) -> Compiled:
    """Compile rounds as the engine runs them on one device: in place, num_rounds in a program."""
    params, state, tables = abstract_arguments(cfg, batch, pages, cache_dtype)
    several = num_rounds > 1
    static = (cfg, num_rounds) if several else (cfg,)
    with tempfile.TemporaryDirectory() as folder, h200.ptxas_report() as report:
        executable = h200.compile_for_h200(
            rounds.decode_rounds if several else programs.decode_round_in_place,
            *static,
            params,
            *((state,) if several else programs.split_donated(state)),
            tables,
            static_argnums=tuple(range(len(static))),
            donate_argnums=len(static) + 1,
            options=dict(cfg.compiler_options) | {"xla_dump_to": folder},
        )
        return Compiled(
            cfg,
            num_rounds,
            executable.as_text(),
            _thunks_in(folder, "jit_decode_round"),
            report(),
            executable.memory_analysis().alias_size_in_bytes,
        )


def prefill_arguments(cfg: RoundConfig, num_tiles: int, pages: int) -> tuple[Any, ...]:
    """Return params, state, block tables and chunk of prefill, by their shapes alone."""
    of_tile = jax.ShapeDtypeStruct((num_tiles,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((num_tiles, cfg.ops.prefill_tile), jnp.int32)
    chunk = PromptChunk(tokens, of_tile, of_tile, of_tile)
    return *abstract_arguments(cfg, num_tiles, pages), chunk


def compile_prefill(cfg: RoundConfig, num_tiles: int, pages: int) -> Thunk:
    """Compile a prefill call of one device; return what it launches."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("jax.default_backend", lambda: "gpu"),  # products of many rows ask for it
    ):
        h200.compile_for_h200(
            prefill,
            cfg,
            *prefill_arguments(cfg, num_tiles, pages),
            static_argnums=0,
            donate_argnums=2,
            options=dict(cfg.prefill_options) | {"xla_dump_to": folder},
        )
        return _thunks_in(folder, "jit_prefill")


def _thunks_in(folder: str, program: str) -> Thunk:
    [thunks] = Path(folder).glob(f"*{program}*.thunk_sequence_after_thunk_passes.txt")
    return parse_thunks(thunks.read_text())
