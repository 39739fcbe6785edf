"""The resident state, and all that uses the devices.

Each process of an engine has one, and all of them run the same programs on it. Slots, prefill and
rounds return at once and do not wait for the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.config import EngineConfig, RoundConfig
from jaxspec.decode import mailboxes, programs, slots
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode import state as decode_state
from jaxspec.decode.several_rounds import RoundProgram
from jaxspec.decode.spread import shardings, spread
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.engine.block_tables import BlockTables
from jaxspec.engine.buckets import buckets_between
from jaxspec.engine.memory import CacheMemory
from jaxspec.engine.prefill_tiles import PrefillTiles
from jaxspec.engine.round_configs import GREEDY, ConfigKey, RoundConfigs
from jaxspec.layers.params import Params
from jaxspec.parallel.processes import Channel, ProcessError, end_process
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import STOPS, StateLayout, sampling_rows

# The methods that use the devices, which the processes that follow repeat. Their arguments are
# plain data, and positional.
FOLLOWED = (
    "_begin",
    "compile_begin",
    "_drop_state",
    "change_layout",
    "write_rows",
    "move",
    "_deactivate",
    "prefill",
    "round",
)


class ResidentState:
    """The weights, and the state of the requests that run.

    Each program consumes `state` (donated) and returns its successor. A process that leads tells
    the others each call of the methods in FOLLOWED.

    params: of target and draft
    tables: the block tables of the slots
    needed: the layout that the requests that run need; a new state has its sizes
    layout: of the arrays that the state has
    rounds_per_step: rounds that one program runs
    round_program: runs a step's rounds. A tool that records them puts a program of its own there,
        which may return a Verification with more fields.
    channel: to the processes that follow, or from the one that leads; None for a single process
    """

    def __init__(
        self,
        params: Params,
        configs: RoundConfigs,
        config: EngineConfig,
        memory: CacheMemory,
        tables: BlockTables,
        needed: StateLayout,
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
        rounds_per_step: int,
    ) -> None:
        self.params, self.tables, self.rounds_per_step = params, tables, rounds_per_step
        self.needed = self.layout = needed
        self.round_program: RoundProgram = rounds.run_rounds
        self._configs, self._config, self._memory = configs, config, memory
        self._dtypes = {"dtype": jnp.dtype(dtype).name, "cache_dtype": jnp.dtype(cache_dtype).name}
        self._state: DecodeState | None = None
        self._failures_seen = 0  # of the devices' mailboxes, when the state was made
        self._relays: dict[Hashable, Callable[[DecodeState], DecodeState]] = {}
        self.channel = Channel() if configs.greedy.placement.spans_processes else None
        if self.channel is not None and self.channel.leads:
            for name in FOLLOWED:
                setattr(self, name, self._led(self.channel, name))

    # --- several processes -----------------------------------------------------------------------

    def _led(self, channel: Channel, name: str) -> Callable[..., Any]:
        """Return a method that the followers run too, with the same arguments."""
        method = getattr(self, name)

        def run(*args: Any) -> Any:
            if name not in ("_begin", "_drop_state"):
                _ = self.state  # the followers need one first
            sent = [self._configs.key_of(a) if isinstance(a, RoundConfig) else a for a in args]
            try:
                channel.tell((name, sent))
                return method(*args)
            except ProcessError:
                raise
            except BaseException as e:  # they may have launched what is not launched here
                reason = (str(e).splitlines() or [""])[0]
                channel.close(f"{type(e).__name__}: {reason:.300}")
                if not isinstance(e, Exception):
                    raise
                raise ProcessError(
                    f"processes: expected {name.strip('_')} to run on all, "
                    f"got {type(e).__name__}: {reason:.300}"
                ) from e

        return run

    def follow(self) -> None:
        """Run what the leading process runs, until it closes the channel."""
        assert self.channel is not None and not self.channel.leads
        try:
            while (message := self.channel.receive()) is not None:
                name, sent = message
                assert name in FOLLOWED, name
                getattr(self, name)(
                    *(self._configs.at(a) if isinstance(a, ConfigKey) else a for a in sent)
                )
        except ProcessError:
            raise
        except BaseException:  # the leader waits for this process, which an exit would not end
            traceback.print_exc()
            end_process(f"processes: process {jax.process_index()} failed; it ends")

    # --- the state as a whole --------------------------------------------------------------------

    @property
    def state(self) -> DecodeState:
        """The resident state; the first use makes it, idle and with empty caches."""
        if self._state is None:
            self._begin(*self.initial_sizes)
        assert self._state is not None
        return self._state

    @property
    def initial_sizes(self) -> tuple[StateLayout, tuple[int, ...]]:
        """The layout, and the blocks of each pool, of a state that is made now."""
        return self.needed.fit(GREEDY), self._memory.num_blocks

    def _begin(self, layout: StateLayout, num_blocks: tuple[int, ...], /) -> None:
        """Make the state, idle and with empty caches of so many blocks."""
        self.layout = layout
        cfg, batch, stops = self._first_state(layout)
        self._failures_seen = mailboxes.num_failures(cfg)
        state = _init_state(cfg, batch, stops, num_blocks=num_blocks, **self._dtypes)
        self._state = jax.tree.map(_committed, state)
        self.tables.reset(batch)

    def compile_begin(self, layout: StateLayout, num_blocks: tuple[int, ...], /) -> None:
        """Compile what makes the next state."""
        first = self._first_state(layout)
        _init_state.lower(*first, num_blocks=num_blocks, **self._dtypes).compile()

    def _first_state(self, layout: StateLayout) -> tuple[RoundConfig, int, int]:
        """The config, slots and stop tokens of the state that the first use makes."""
        assert self._config.batch_buckets is not None
        (stops,) = layout.sizes[STOPS]
        return self._configs.greedy, self._config.batch_buckets[0], stops

    def check_room(self) -> None:
        """Raise ConfigError for sizes that exceed the whole memory; allocate nothing."""
        cfg, _, stops = self._first_state(self.needed.fit(GREEDY))
        one_block = (1,) * len(self._configs.cache_groups)
        init = partial(_init_state, cfg, 1, stops, num_blocks=one_block, **self._dtypes)
        rows = jax.tree.leaves(slots.without_caches(jax.eval_shape(init)))
        self._memory.check_room(sum(x.size * x.dtype.itemsize for x in rows))

    def adopt(self, state: DecodeState) -> None:
        """Go on with a state made elsewhere, whose sampling rows hold no logits processor."""
        self._failures_seen = mailboxes.num_failures(self._configs.greedy)
        self._state = jax.tree.map(_committed, state)
        self.layout = self.layout.hold(GREEDY).with_stops(state.stop_token_ids.shape[1])
        self.tables.reset(state.active.shape[0])

    def take_state(self) -> DecodeState:
        """Return the state and forget it, caches included; the next use makes a new one."""
        state, self._state = self._state, None
        assert state is not None, "expected a state, got none: nothing has run"
        return state

    def forget(self) -> None:
        """Drop the state, caches included."""
        if self.channel is None or self.channel.is_open:
            self._drop_state()

    def _drop_state(self) -> None:
        self._state = None

    @property
    def is_whole(self) -> bool:
        """Whether there is a state, and no program that failed has taken its arrays along."""
        return self._state is not None and not any(
            x.is_deleted() for x in jax.tree.leaves(self._state)
        )

    def check_devices(self) -> None:
        """Raise JaxRuntimeError if a device has not answered another one."""
        cfg = self._configs.greedy
        if (reason := mailboxes.silent_rank(cfg, self._failures_seen)) is not None:
            raise jax.errors.JaxRuntimeError(f"tensor_parallel_size {cfg.placement.size}: {reason}")

    # --- its slots -------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots of the batch that runs."""
        return self.state.active.shape[0]

    def _set_rows(self, rows: DecodeState) -> None:
        self._state = slots.with_caches(rows, self.state)

    def move(self, sources: Sequence[int], /) -> None:
        """Make slot i of the new batch slot sources[i] of the old one, an idle slot for -1.

        Slots move from bucket to next bucket, so that few programs compile.
        """
        buckets = self._config.batch_buckets
        assert buckets is not None
        wanted = np.asarray(sources, np.int32)
        for size in buckets_between(buckets, self.num_slots, len(sources)):
            rows = np.full(size, -1, np.int32)
            count = min(len(wanted), len(rows))
            rows[:count] = wanted[:count]
            self._set_rows(slots.move(slots.without_caches(self.state), rows))
            wanted = np.arange(len(wanted), dtype=np.int32)
            wanted[len(rows) :] = -1
        self.tables.reset(len(sources))

    def deactivate(self, cleared: Sequence[int]) -> None:
        """Stop these slots from generating."""
        if cleared:
            self._deactivate(list(cleared))

    def _deactivate(self, cleared: list[int], /) -> None:
        ended = np.zeros(self.num_slots, bool)
        ended[cleared] = True
        self._state = replace(self.state, active=slots.deactivate(self.state.active, ended))

    def change_layout(self, layout: StateLayout, /) -> bool:
        """Give the state the arrays of a layout, and return whether they are new ones.

        Without memory for them, nothing changes.
        """
        state = self.state  # (its first use sets the layout)
        is_new = not layout.has_shapes_of(self.layout)
        if is_new:
            self._set_rows(self._relaid(slots.without_caches(state), layout))
        self.layout = layout
        return is_new

    def _relaid(self, rows: DecodeState, layout: StateLayout) -> DecodeState:
        cfg = self._configs.greedy
        if cfg.placement.mesh is None:
            return jax.tree.map(_committed, slots.relaid(rows, layout))
        key = layout.held, tuple(sorted(layout.sizes.items()))
        if key not in self._relays:
            relaid = partial(slots.relaid, layout=layout)
            out = shardings(cfg, jax.eval_shape(relaid, rows))
            self._relays[key] = jax.jit(relaid, out_shardings=out)
        return self._relays[key](rows)

    def write_rows(self, at: np.ndarray, new: dict[str, Any], /) -> None:
        """Write processors' states into slots; see slots.admit."""
        sampling = self.state.sampling
        processors = slots.admit(sampling.processors, at, new)
        self._state = replace(self.state, sampling=replace(sampling, processors=processors))

    # --- its programs ----------------------------------------------------------------------------

    def prefill(self, cfg: RoundConfig, tiles: PrefillTiles, /) -> Verification:
        """Dispatch one prefill call."""
        processors = slots.take(self.state.sampling.processors, tiles.slots)
        verification, after = programs.run_prefill(
            cfg,
            self.params,
            slots.without_rows(self.state, processors),
            tiles.block_tables,
            tiles.chunk,
            (slots.prefill_rows(self.state, tiles.rows), tiles.ending),
            compilation=self._config.compilation,
        )
        rows = slots.put_back(
            slots.without_caches(self.state), tiles.slots, slots.without_caches(after)
        )
        self._state = slots.with_caches(rows, after)
        return verification

    def round(self, cfg: RoundConfig, changed: Mapping[int, np.ndarray], /) -> Verification:
        """Dispatch a step's rounds, after copying the block tables that have changed."""
        args = self.params, self.state, self.tables.on_device(changed), self._config.compilation
        verification, self._state = self.round_program(cfg, self.rounds_per_step, *args)
        return verification


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("num_blocks", "dtype", "cache_dtype"))
def _init_state(
    cfg: RoundConfig,
    batch: int,
    stops: int,
    *,
    num_blocks: tuple[int, ...],
    dtype: str,
    cache_dtype: str,
) -> DecodeState:
    """Return idle rows over empty caches."""
    rows = sampling_rows(StateLayout(Vocabulary(cfg.target.vocab_size)), [], batch=batch)

    def init(cfg: RoundConfig) -> DecodeState:
        return decode_state.init_state(
            cfg,
            jax.tree.map(jnp.asarray, rows),
            jnp.zeros(batch, jnp.int32),
            jnp.full((batch, stops), -1, jnp.int32),
            num_blocks,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )

    return spread(init, 1, None)(cfg)


def _committed(x: jax.Array) -> jax.Array:
    """Return the array bound to its device, without a copy.

    A program with an exported kernel binds its results, and a program is compiled anew for
    arguments that are bound. So the state is bound from the start.
    """
    return x if x.committed else jax.device_put(x, x.sharding)
