"""A benchmark case ready to run: random weights and caches, an engine, timed parts of a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxspec import drafts, models
from jaxspec.cache.arrays import KVCache, cache_specs, resolve_cache_dtype
from jaxspec.cache.metadata import (
    AttentionMetadata,
    BlockTables,
    build_metadata,
    rebuild_draft_metadata,
)
from jaxspec.config import (
    REFERENCE_OPS,
    ConfigError,
    EngineConfig,
    RoundConfig,
    SamplingFeatures,
    SpeculativeConfig,
)
from jaxspec.decode import programs, slots
from jaxspec.decode import state as decode_state
from jaxspec.decode.several_rounds import run_rounds
from jaxspec.decode.spread import everywhere, shardings
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import verify_rows
from jaxspec.drafts import (
    BLOCKS,
    DraftModelConfig,
    LayeredConfig,
    hidden_width,
    layered_drafter,
)
from jaxspec.drafts.autoregressive import AutoregressiveState
from jaxspec.drafts.block import BlockState
from jaxspec.drafts.drafter import DraftContext, Observation, Proposal
from jaxspec.drafts.families import layered
from jaxspec.drafts.independent import IndependentState
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request
from jaxspec.layers import op_choice
from jaxspec.layers.mxfp4 import Mxfp4Spec
from jaxspec.layers.params import Params, ParamSpec, init_random
from jaxspec.layers.quantized.table import QuantizedSpec
from jaxspec.llm import LLM
from jaxspec.loading.binding import bind_draft, bind_draft_model
from jaxspec.loading.placement import choose_placement
from jaxspec.parallel.layout import ONE_DEVICE_LAYOUT, Layout, Placement, put
from jaxspec.sampling import synthetic
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.state import SamplingState
from jaxspec.tools.benchmark.cases import Case
from jaxspec.tools.benchmark.dimensions import MODELS, HeadShape, draft_config
from jaxspec.tools.benchmark.floor import memory_needed, round_floor
from jaxspec.tools.benchmark.timing import DISCARDED, Timing, back_to_back, time_chained

BLOCK_SIZE = 64
OF_A_ROUND = ("plain", "draft", "context", "verify", "sampling", "round", "engine", "rebuild")
PARTS = (*OF_A_ROUND, "first_token")
# Parts that are programs of the engine.
ON_SEVERAL_DEVICES = ("plain", "verify", "round", "engine", "first_token")
REBUILDS, JUDGEMENTS = 16, 4  # metadata rebuilds, and calls of the sampler, in one program
BLOCKS_ONLY, STEPS_ONLY = "context", "rebuild"  # parts that other drafts do not have
NEVER = 1 << 30  # max_tokens that no run reaches
Figures = dict[str, Any]  # of a case or a part of its round, as JSON


@dataclass(frozen=True)
class Effort:
    """How long a case is timed.

    rounds:          calls dispatched back to back
    repeats:         how often they are timed
    rounds_per_step, max_num_batched_tokens, prefill_in_order: the engine's (EngineConfig)
    cuda_graphs:     RoundConfig's; None leaves the choice to the engine
    pause:           seconds of idling before each repeat (see back_to_back)
    """

    rounds: int = 64
    repeats: int = 5
    rounds_per_step: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_in_order: bool | None = None
    cuda_graphs: bool | None = None
    pause: float = 0.0


def parts_of(case: Case) -> tuple[str, ...]:
    """Return the parts that the case's draft and devices have.

    Several devices time the parts that are programs of the engine.
    """
    absent = STEPS_ONLY if case.method in BLOCKS else BLOCKS_ONLY
    one_device = case.tensor_parallel_size == 1
    return tuple(
        part for part in PARTS if part != absent and (one_device or part in ON_SEVERAL_DEVICES)
    )


# --- weights ---------------------------------------------------------------------------------


@cache
def _draws(spec: ParamSpec, dtype: jnp.dtype, sharding: NamedSharding | None) -> Any:
    """Return the program that draws the weights of a spec."""
    return jax.jit(lambda key: init_random(spec, key, dtype), out_shardings=sharding)


def random_params(
    specs: Params, key: jax.Array, dtype: DTypeLike, layout: Layout = ONE_DEVICE_LAYOUT
) -> Params:
    """Draw init_random's weights on the devices, one array at a time, with one program a shape.

    Float32 copies of a whole model do not fit. Each device draws its pieces.
    """
    leaves, treedef = jax.tree.flatten(specs)

    # The name says whether a vector is a bias. Arrays of one shape and kind share a program.
    def name(spec: ParamSpec) -> str:
        return "bias" if spec.name.endswith("bias") else "weight"

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        axes = spec.axes if layout.size > 1 else (None,) * len(spec.shape)
        shape = layout.shape_of(spec)
        kind: ParamSpec
        if isinstance(spec, QuantizedSpec):
            plain = ParamSpec("weight", spec.base.shape, (None, None))
            kind = replace(spec, name="weight", shape=shape, axes=axes, base=plain)
        else:
            kind_of = Mxfp4Spec if isinstance(spec, Mxfp4Spec) else ParamSpec
            kind = kind_of(name(spec), shape, axes, spec.transpose, spec.dtype)
        return _draws(kind, jnp.dtype(dtype), layout.sharding(axes))(key)

    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten(draw(spec, k) for spec, k in zip(leaves, keys, strict=True))


class Weights:
    """Random weights of one model and of its drafts, kept until another model is requested."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = jnp.dtype(dtype)
        self._made_for: tuple[str, Placement] | None = None
        self._target: Params = None
        self._drafts: dict[tuple[str, HeadShape], Params] = {}

    def get(self, case: Case) -> tuple[Params, Params]:
        """Return the weights of target and draft, the draft's bound to the target's."""
        dimensions = MODELS[case.model]
        placement = choose_placement(_devices(case))
        if (case.model, placement) != self._made_for:
            self._target, self._drafts = None, {}  # freed before the next ones are made
            specs = models.family(dimensions.target).param_specs(dimensions.target)
            layout = placement.target(dimensions.target)
            self._target = random_params(specs, jax.random.key(0), self.dtype, layout)
            self._made_for = (case.model, placement)
        head = (case.method, case.head)
        if head not in self._drafts:
            cfg = draft_config(dimensions, *head)
            specs, layout = drafts.family(cfg).param_specs(cfg), placement.draft(cfg)
            own = random_params(specs, jax.random.key(1), self.dtype, layout)
            self._drafts[head] = self._bound(cfg, own, placement)
        return self._target, self._drafts[head]

    def _bound(self, cfg: LayeredConfig, own: Params, placement: Placement) -> Params:
        """Return a draft's weights beside what it shares with the target."""
        if isinstance(cfg, DraftModelConfig):
            return bind_draft_model(cfg, own, placement)
        if not cfg.maps_vocabulary:
            return bind_draft(cfg, own, self._target, None, placement)
        # A trained head keeps the most frequent tokens, whose ids are not the first ones.
        chosen = np.random.default_rng(0).permutation(cfg.vocab_size)[: cfg.draft_vocab_size]
        return bind_draft(cfg, own, self._target, np.sort(chosen), placement)


def _devices(case: Case) -> EngineConfig:
    """Return an engine's settings with the devices of a case."""
    return EngineConfig(
        tensor_parallel_size=case.tensor_parallel_size,
        enable_expert_parallel=case.enable_expert_parallel,
    )


# --- a case ready to run ---------------------------------------------------------------------


def implementations(text: str) -> dict[str, str]:
    """Read fields of Kernels from "attention=reference,matmul=mosaic_gpu".

    A name alone is for every op; "auto" leaves an op to the engine.
    """
    return {
        op: name
        for op, name in op_choice.parse(text, flag="--implementation").items()
        if name != "auto"
    }


def configure(
    case: Case, dtype: DTypeLike, chosen: dict[str, str], effort: Effort
) -> tuple[RoundConfig, RoundConfig, int]:
    """Return the case's round, its plain step, and the pages of a request.

    Nothing is put into the device's memory.
    """
    llm, plain, pages = _engines(case, dtype, effort, {}, {})
    return *_round_configs(case, llm, plain, chosen, effort), pages


def _engines(
    case: Case, dtype: DTypeLike, effort: Effort, target: Params, draft: Params
) -> tuple[LLM, LLM, int]:
    """Return engines over these weights, with and without the draft, and the pages of a request.

    The pages hold the context and every timed round at its longest.
    """
    dimensions, K = MODELS[case.model], case.num_speculative_tokens
    pages = -(-(case.context + (effort.rounds + DISCARDED + 2) * (K + 1)) // BLOCK_SIZE)

    def engine(
        draft: tuple[LayeredConfig, Params] | None, speculative: SpeculativeConfig | None
    ) -> LLM:
        groups = RoundConfig.for_models(
            dimensions.target,
            draft and draft[0],
            ops=REFERENCE_OPS,
            block_size=BLOCK_SIZE,
            max_model_len=pages * BLOCK_SIZE,
        ).cache_groups
        config = EngineConfig(
            max_model_len=pages * BLOCK_SIZE,
            max_num_seqs=case.batch,
            kv_cache_dtype=case.kv_cache_dtype,
            tensor_parallel_size=case.tensor_parallel_size,
            enable_expert_parallel=case.enable_expert_parallel,
            block_size=BLOCK_SIZE,
            compilation=case.compilation,  # type: ignore[arg-type]
            batch_buckets=(case.batch,),
            rounds_per_step=effort.rounds_per_step,
            max_num_batched_tokens=effort.max_num_batched_tokens,
            prefill_in_order=effort.prefill_in_order,
            num_gpu_blocks_override=(case.batch * pages,)
            * len(groups),  # blocks of every group, as the requests start in all of them
        )
        return LLM((dimensions.target, target), draft, speculative, config=config, dtype=dtype)

    speculative = SpeculativeConfig(
        method=case.method,
        num_speculative_tokens=K,
        rejection_sample_method=case.rule,
        draft_kv_cache_dtype=case.draft_kv_cache_dtype,
        max_num_verify_tokens=case.max_num_verify_tokens,
    )
    return (
        engine((draft_config(dimensions, case.method, case.head), draft), speculative),
        engine(None, None),
        pages,
    )


def _round_configs(
    case: Case, llm: LLM, plain: LLM, chosen: dict[str, str], effort: Effort
) -> tuple[RoundConfig, RoundConfig]:
    rates = synthetic.conditional_rates(
        synthetic.rates_from_length(case.acceptance_length, case.num_speculative_tokens)
    )
    for engine in (llm, plain):
        configs = engine.runner.configs
        ops = replace(configs.greedy.ops, **chosen)
        configs.override(ops=ops, cuda_graphs=effort.cuda_graphs)
    llm.runner.configs.override(acceptance_rates=rates)

    features = SamplingFeatures(sampled=case.temperature > 0)
    limits_drafts = bool((case.drafts < case.num_speculative_tokens).any())
    round_ = llm.runner.configs.get(features, limits_drafts=limits_drafts, batch=case.batch)
    return round_, plain.runner.configs.get(features, batch=case.batch)


def does_not_fit(
    case: Case, dtype: DTypeLike, chosen: dict[str, str], effort: Effort, limit: int | None
) -> str | None:
    """Return why the case cannot run in `limit` bytes of device memory, None if it can.

    limit None is an unknown amount: the case is tried.
    """
    cfg, _, pages = configure(case, dtype, chosen, effort)
    slots = pages * BLOCK_SIZE
    cache_dtype = resolve_cache_dtype(case.kv_cache_dtype, dtype)
    needed = memory_needed(cfg, case.batch, slots, dtype=dtype, cache_dtype=cache_dtype)
    needed //= cfg.placement.size
    if limit is None or needed <= limit:
        return None
    return f"needs {needed / 1e9:.1f} GB of device memory, {limit / 1e9:.1f} GB are there"


class Workload:
    """One case on the device. Each run consumes the state (donated) and returns its successor."""

    def __init__(
        self, case: Case, weights: Weights, chosen: dict[str, str], effort: Effort
    ) -> None:
        self.case, self.effort = case, effort
        self.llm, self.plain_llm, pages = _engines(case, weights.dtype, effort, *weights.get(case))
        self.cfg, self.plain_cfg = _round_configs(case, self.llm, self.plain_llm, chosen, effort)
        self.engine = self.llm.engine
        blocks = np.random.default_rng(0).permutation(case.batch * pages).astype(np.int32)
        self.host_table = blocks.reshape(case.batch, pages)
        self.block_tables = (self._placed(self.host_table),) * len(self.cfg.cache_groups)
        dtypes = {"dtype": self.llm.dtype, "cache_dtype": self.llm.cache_dtype}
        self.state = random_state(case, self.cfg, blocks.size, **dtypes)
        if self.cfg.placement.mesh is not None:
            self.state = jax.device_put(self.state, shardings(self.cfg, self.state))
        self.proposal = self._random_proposal()

    @property
    def params(self) -> Params:
        return self.llm.params

    @property
    def start(self) -> int:
        """Tokens of a request when timing starts.

        The case's context is what a request holds halfway through the timed rounds.
        """
        return max(1, self.case.context - int(self.case.tokens_a_round * self.effort.rounds / 2))

    def _random_proposal(self) -> Proposal:
        case, cfg = self.case, self.cfg
        shape = (case.batch, case.num_speculative_tokens)
        draft = layered(cfg.draft)
        tokens = np.random.default_rng(3).integers(0, draft.draft_vocab_size, shape, np.int32)
        if draft.maps_vocabulary:
            tokens = np.asarray(self.params["draft"]["draft_to_target"])[tokens]
        logits = (
            normal((*shape, draft.draft_vocab_size), "float32", jax.random.key(3))
            if cfg.keeps_draft_logits
            else None
        )
        return Proposal(jnp.asarray(tokens), logits)

    def _placed(self, array: jax.typing.ArrayLike) -> jax.Array:
        """Put an array where the engine keeps it: whole on each device.

        A program of several devices would copy it from one of them in each call.
        """
        return put(array, everywhere(self.cfg))

    def rewind(self, state: DecodeState, max_tokens: int = NEVER) -> DecodeState:
        """Return the state with every request live, `start` tokens long, max_tokens to go."""
        batch = self.case.batch
        return replace(
            state,
            seq_lens=self._placed(jnp.full(batch, self.start, jnp.int32)),
            active=self._placed(jnp.ones(batch, bool)),
            num_generated=self._placed(jnp.zeros(batch, jnp.int32)),
            max_tokens=self._placed(jnp.full(batch, max_tokens, jnp.int32)),
        )

    def _step(self, llm: LLM, cfg: RoundConfig, state: DecodeState) -> DecodeState:
        """Run the rounds of one step of an engine, which are one program."""
        per_step, mode = llm.runner.rounds_per_step, self.case.compilation
        return run_rounds(cfg, per_step, llm.params, state, self.block_tables, mode)[1]

    def _round(self, state: DecodeState) -> DecodeState:
        return self._step(self.llm, self.cfg, state)

    def run_rounds(self) -> DecodeState:
        """Dispatch effort.rounds rounds from the start."""
        self.state = self.rewind(self.state)
        for _ in range(self._num_steps(self.llm)):
            self.state = self._round(self.state)
        return self.state

    def _num_steps(self, llm: LLM) -> int:
        """Return the number of an engine's steps that effort.rounds rounds are."""
        return max(1, self.effort.rounds // llm.runner.rounds_per_step)

    def _timed(
        self, step: Callable[[DecodeState], DecodeState], state: DecodeState, count: int
    ) -> tuple[Timing, DecodeState]:
        repeats, pause = self.effort.repeats, self.effort.pause
        return back_to_back(
            step, state, count=count, repeats=repeats, rewind=self.rewind, pause=pause
        )

    # --- the parts, each as {"seconds": median, ...} ---

    def time_round(self) -> Figures:
        """Time a round, dispatched as the engine does: rounds_per_step of them are a program."""
        count, per_step = self._num_steps(self.llm), self.llm.runner.rounds_per_step
        timing, self.state = self._timed(self._round, self.state, count)
        gained = (np.asarray(self.state.seq_lens) - self.start).mean() / (count * per_step)
        return timing.to_dict(per_step) | {
            "acceptance_length": float(gained),
            "rounds_per_step": per_step,
        }

    def time_plain(self) -> Figures:
        """Time a step of plain decoding on the same weights and the target's caches.

        It is dispatched as the engine does: rounds_per_step of them are a program.
        """
        draft, bare = self.state.draft, replace(self.state, draft=None)
        step = partial(self._step, self.plain_llm, self.plain_cfg)
        timing, bare = self._timed(step, bare, self._num_steps(self.plain_llm))
        self.state = replace(bare, draft=draft)
        per_step = self.plain_llm.runner.rounds_per_step
        return timing.to_dict(per_step) | {"rounds_per_step": per_step}

    def time_draft(self) -> Figures:
        """Time the proposal of K drafts as one program."""
        state = self.rewind(self.state)
        context = decode_state.draft_context(self.cfg, state, self.block_tables)
        rest = replace(state.draft, caches=())

        def step(carry: tuple[Proposal, KVCache]) -> tuple[Proposal, KVCache]:
            return _propose(self.cfg, self.params["draft"], context, rest, carry[1])

        return self._timed_draft(step, (self.proposal, self.state.draft.caches))

    def time_context(self) -> Figures:
        """Time the write of the accepted rows' context into a block draft's caches.

        `verify` holds it too. All rows but the last draft's are accepted.
        """
        case, cfg, K = self.case, self.cfg, self.case.num_speculative_tokens
        state, dtype = self.rewind(self.state), self.llm.dtype.name
        rows, aux = (case.batch, K + 1), hidden_width(layered(cfg.draft), cfg.target)
        hidden = normal((*rows, cfg.target.hidden_size), dtype, jax.random.key(7))
        features = normal((*rows, aux), dtype, jax.random.key(8))
        context = decode_state.draft_context(cfg, state, self.block_tables)
        num_sampled = jnp.full(case.batch, K, jnp.int32)
        inputs = (context, self.proposal.draft_tokens, num_sampled, hidden, features)
        rest = replace(state.draft, caches=())

        def step(carry: tuple[Proposal, KVCache]) -> tuple[Proposal, KVCache]:
            return carry[0], _observe(cfg, self.params["draft"], inputs, rest, carry[1])

        return self._timed_draft(step, (self.proposal, self.state.draft.caches))

    def _timed_draft(
        self,
        step: Callable[[tuple[Proposal, KVCache]], tuple[Proposal, KVCache]],
        carry: tuple[Proposal, KVCache],
    ) -> Figures:
        count, repeats = self.effort.rounds, self.effort.repeats
        timing, (_, caches) = back_to_back(step, carry, count=count, repeats=repeats)
        self.state = replace(self.state, draft=replace(self.state.draft, caches=caches))
        return timing.to_dict()

    def time_verify(self) -> Figures:
        """Time the target's pass, rejection sampling and commit."""

        def step(s: DecodeState) -> DecodeState:
            return programs.verify_program(
                self.cfg, self.params, s, self.block_tables, self.proposal
            )[1]

        timing, self.state = self._timed(step, self.state, self.effort.rounds)
        return timing.to_dict()

    def time_sampling(self) -> Figures:
        """Time rejection sampling, its noise included, on logits that lie in memory.

        Several calls are chained in one program.
        """
        case, cfg = self.case, self.cfg
        shape = (case.batch, case.num_speculative_tokens + 1, cfg.target.vocab_size)
        state = self.rewind(self.state)
        sampling, active, to_draft = (
            state.sampling,
            state.active,
            self.params["draft"].get("target_to_draft"),
        )

        def op(
            target_logits: jax.Array,
            seq_lens: jax.Array,
            draft_tokens: jax.Array,
            draft_logits: jax.Array | None = None,
        ) -> tuple[jax.Array, jax.Array]:
            proposal = Proposal(draft_tokens, draft_logits)
            verification = verify_rows(
                cfg, target_logits, proposal, to_draft, sampling, seq_lens, active
            )
            return verification.output_tokens, verification.num_sampled

        copies = []
        for key in jax.random.split(jax.random.key(4), JUDGEMENTS):
            arrays = {"target_logits": normal(shape, "float32", key), "seq_lens": state.seq_lens}
            arrays |= {"draft_tokens": self.proposal.draft_tokens}
            copies.append(
                arrays
                if self.proposal.draft_logits is None
                else arrays | {"draft_logits": jnp.copy(self.proposal.draft_logits)}
            )
        return time_chained(op, copies, repeats=self.effort.repeats).to_dict(JUDGEMENTS)

    def time_rebuild(self) -> Figures:
        """Time one rebuild of the draft's attention metadata; a round holds K of them."""
        cfg = self.cfg
        ones = jnp.ones(self.case.batch, jnp.int32)
        tables = cfg.draft_tables(self.block_tables)
        start = lambda _: _metadata(cfg, tables, ones)  # noqa: E731
        step = lambda metadata: _rebuilds(cfg, metadata)  # noqa: E731
        repeats = self.effort.repeats
        timing, _ = back_to_back(
            step, start(None), count=max(2, self.effort.rounds // 4), repeats=repeats, rewind=start
        )
        return timing.to_dict(REBUILDS)

    def time_engine(self) -> Figures:
        """Time a round in the engine's own loop, which reads each step's results.

        The figure is of the steady state, while all requests are live.
        """
        seconds = [self._engine_round() for _ in range(self.effort.repeats + 1)][
            1:
        ]  # the first one warms the loop up
        found = {"acceptance_length": self.engine.stats.metrics.mean_acceptance_length}
        return (
            Timing(tuple(seconds)).to_dict()
            | found
            | {"rounds_per_step": self.llm.runner.rounds_per_step}
        )

    def _engine_round(self) -> float:
        """Return the seconds of one round, from a run of all requests through the engine's loop."""
        engine, case = self.engine, self.case
        tokens = int((self.effort.rounds - 1) * case.acceptance_length)
        read_at: list[float] = []  # when each step's rounds were read
        ended: list[int] = []  # steps read before a request's end was

        def note_end(request: Request, num_new: int) -> None:
            del num_new
            if request.finish_reason is not None:
                ended.append(len(read_at))

        params = SamplingParams(case.temperature, max_tokens=tokens)
        requests = [
            Request(
                [0] * self.start,
                params,
                tokens,
                draft_limit=int(draft_limit),
                on_tokens=note_end,
                metrics=SpecDecodeMetrics(case.num_speculative_tokens),
            )
            for draft_limit in case.drafts
        ]
        state = jax.block_until_ready(self.rewind(self.state, tokens))
        engine.set_state(state, requests, self.host_table.tolist())
        engine.on_rounds = lambda *_: read_at.append(time.perf_counter())
        while engine.has_requests:
            engine.step()
        engine.on_rounds = None
        self.state = engine.take_state()
        per_step = self.llm.runner.rounds_per_step
        if ended[0] < 2:
            raise ConfigError(
                f"--rounds: expected some steps of {per_step} rounds, at least {8 * per_step}, "
                f"got {self.effort.rounds}"
            )
        read = read_at[min(DISCARDED, ended[0] - 2) : ended[0]]
        return (read[-1] - read[0]) / (len(read) - 1) / per_step

    def time_first_token(self) -> Figures:
        """Time prompts that arrive together, until the last one's first token is handed out.

        There are `batch` prompts of `context` random tokens, others in each repeat. Each request
        asks for one token, so that no round runs between two calls of prefill.
        """
        # A prompt's last tile overwrites its slot's row, and later parts need the rows as they are.
        rows = jax.tree.map(
            lambda x: jax.device_put(jnp.copy(x), x.sharding),  # bound, as the engine's arrays are
            slots.without_caches(self.state),
        )
        idle = self._placed(jnp.zeros(self.case.batch, bool))
        self.engine.set_state(replace(self.state, active=idle), [], [])
        rng = np.random.default_rng(9)
        self._first_tokens(rng)  # compiles the programs
        seconds = [self._first_tokens(rng) for _ in range(self.effort.repeats)]
        self.state = slots.with_caches(rows, self.engine.take_state())
        self.engine.forget_prefixes()  # the next state's blocks hold none of these prompts
        return Timing(tuple(seconds)).to_dict() | {"prompt_tokens": self.case.context}

    def _first_tokens(self, rng: np.random.Generator) -> float:
        """Return the seconds from adding `batch` new prompts to the last of their first tokens."""
        engine, case = self.engine, self.case
        handed_out: list[float] = []
        shape, vocab = (case.batch, case.context), self.cfg.target.vocab_size
        requests = [
            Request(
                prompt,
                SamplingParams(case.temperature, max_tokens=1),
                max_tokens=1,
                draft_limit=case.num_speculative_tokens,
                on_tokens=lambda *_: handed_out.append(time.perf_counter()),
            )
            for prompt in rng.integers(0, vocab, shape).tolist()
        ]
        began = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.has_requests:
            engine.step()
        assert not any(r.num_prefix_hits for r in requests), "expected prompts that are new"
        return handed_out[-1] - began

    def trace(self, folder: Path, rounds: int = 3) -> None:
        """Write a profiler trace of a few rounds, whose times differ: CUDA graphs are off in it."""
        state = jax.block_until_ready(self.rewind(self.state))
        with jax.profiler.trace(str(folder)):
            for _ in range(rounds):
                state = self._round(state)
            self.state = jax.block_until_ready(state)

    def floor(self, *, plain: bool, bandwidth: float, matmul_rate: float) -> Figures:
        """Return the floor at the mean context of the timed rounds."""
        gained = 1.0 if plain else self.case.tokens_a_round
        context = int(self.start + gained * self.effort.rounds / 2)
        cfg = self.plain_cfg if plain else self.cfg
        dtype, cache_dtype = self.llm.dtype, self.llm.cache_dtype
        floor = round_floor(cfg, self.case.batch, context, dtype=dtype, cache_dtype=cache_dtype)
        return floor.to_dict(bandwidth, matmul_rate)

    def measure(self, parts: Sequence[str]) -> Figures:
        """Return each part's timing by name, and the metadata's share of the round."""
        timed = [part for part in parts_of(self.case) if part in parts]
        found: Figures = {part: getattr(self, f"time_{part}")() for part in timed}
        if "rebuild" in found and "round" in found:
            found["rebuild"]["share_of_round"] = (
                self.case.num_speculative_tokens
                * found["rebuild"]["seconds"]
                / found["round"]["seconds"]
            )
        if "engine" in found and "round" in found:
            found["engine"]["over_back_to_back"] = (
                found["engine"]["seconds"] / found["round"]["seconds"]
            )
        return found


def random_state(
    case: Case, cfg: RoundConfig, num_blocks: int, *, dtype: DTypeLike, cache_dtype: DTypeLike
) -> DecodeState:
    """Return live requests with random caches and random pending rows, none of them zeros.

    No request has stop tokens.
    """
    batch, K = case.batch, case.num_speculative_tokens
    rng = np.random.default_rng(2)
    draft = layered(cfg.draft)

    def tokens(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(0, cfg.target.vocab_size, shape, np.int32))

    def draft_state() -> AutoregressiveState | BlockState | IndependentState:
        of_draft = cfg.cache_dtype_of_draft(cache_dtype)
        caches = _random_caches(draft, num_blocks, of_draft, jax.random.key(6))
        if isinstance(draft, DraftModelConfig):
            return IndependentState(jnp.full(batch, -1, jnp.int32), caches)
        if draft.method in BLOCKS:
            return BlockState(caches)
        width = hidden_width(draft, cfg.target)
        return AutoregressiveState(
            pending_tokens=tokens(batch, K + 1),
            pending_hidden=normal((batch, K + 1, width), jnp.dtype(dtype).name, jax.random.key(4)),
            num_pending=jnp.full(batch, min(2, K + 1), jnp.int32),
            caches=caches,
        )

    sampling = SamplingState(
        keys=jnp.asarray(rng.integers(0, 2**32, (batch, 2), np.uint32)),
        temperature=jnp.full(batch, case.temperature, jnp.float32),
    )
    return DecodeState(
        seq_lens=jnp.full(batch, case.context, jnp.int32),
        next_token=tokens(batch),
        active=jnp.ones(batch, bool),
        num_generated=jnp.zeros(batch, jnp.int32),
        max_tokens=jnp.full(batch, NEVER, jnp.int32),
        stop_token_ids=jnp.full((batch, 4), -1, jnp.int32),
        draft_limit=jnp.asarray(case.drafts),
        sampling=sampling,
        draft=draft_state(),
        target_caches=_random_caches(cfg.target, num_blocks, cache_dtype, jax.random.key(5)),
        waited=None if case.max_num_verify_tokens is None else jnp.zeros(batch, jnp.int32),
    )


def _random_caches(
    cfg: models.TargetConfig | LayeredConfig,
    num_blocks: int,
    cache_dtype: DTypeLike,
    key: jax.Array,
) -> KVCache:
    specs = cache_specs(cfg.attention, (num_blocks,) * cfg.num_layers, BLOCK_SIZE, cache_dtype)
    pools, treedef = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(pools))
    return treedef.unflatten(
        normal(pool.shape, pool.dtype.name, k) for pool, k in zip(pools, keys, strict=True)
    )


@partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: str, key: jax.Array) -> jax.Array:
    """Draw random numbers on the device."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


# rest: the drafter's state without its caches
@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _propose(
    cfg: RoundConfig, params: Params, context: DraftContext, rest: Any, caches: KVCache
) -> tuple[Proposal, KVCache]:
    drafter = layered_drafter(layered(cfg.draft))
    proposal, state = drafter.propose(cfg, params, replace(rest, caches=caches), context)
    return proposal, state.caches


# inputs: the context, drafts, the counts of sampled tokens, and the target's hidden and aux states
@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _observe(
    cfg: RoundConfig,
    params: Params,
    inputs: tuple[DraftContext, jax.Array, jax.Array, jax.Array, jax.Array],
    rest: Any,
    caches: KVCache,
) -> KVCache:
    context, draft_tokens, num_sampled, hidden, aux = inputs
    seen = Observation(
        seq_lens=context.seq_lens,
        active=context.active,
        output_tokens=jnp.pad(draft_tokens, ((0, 0), (0, 1)), constant_values=-1),
        num_sampled=num_sampled,
        block_tables=context.block_tables,
        target=models.TargetOutput(hidden=hidden, aux=aux, caches=()),
    )
    drafter = layered_drafter(layered(cfg.draft))
    return drafter.observe(cfg, params, replace(rest, caches=caches), seen).caches


@partial(jax.jit, static_argnums=0)
def _metadata(
    cfg: RoundConfig, block_tables: BlockTables, lengths: jax.Array
) -> tuple[AttentionMetadata, ...]:
    return build_metadata(
        cfg.draft_groups,
        block_tables,
        lengths,
        lengths,
        rows=1,
        attention=layered(cfg.draft).attention,
        ops=REFERENCE_OPS,
    )


@partial(jax.jit, static_argnums=0)
def _rebuilds(
    cfg: RoundConfig, metadata: tuple[AttentionMetadata, ...]
) -> tuple[AttentionMetadata, ...]:
    for _ in range(REBUILDS):  # a barrier each, or they would be fused into one
        rebuilt = rebuild_draft_metadata(
            cfg.draft_groups,
            tuple(group.block_table for group in metadata),
            metadata[0].seq_lens,
            metadata[0].seq_lens,
            1,
            attention=layered(cfg.draft).attention,
            ops=REFERENCE_OPS,
        )
        metadata = lax.optimization_barrier(rebuilt)
    return metadata
