"""How much memory the KV cache gets, and how many blocks that makes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jaxspec.cache import pool_sizes
from jaxspec.config import CacheGroup, ConfigError, EngineConfig
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.round_configs import RoundConfigs
from jaxspec.parallel.layout import Placement
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import most_slot_bytes

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 4 << 30
RESERVE_BYTES = 1 << 30  # for programs, and what the allocator cannot use
BOOK_BYTES = 128  # of the host's memory, for its books of a block
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container (cgroup v2)


def whole_memory() -> tuple[int, str]:
    """Return the bytes of memory that one device's arrays may take, and whose memory that is.

    It is that of the smallest local device, or the host's where these have none of their own.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in each for each in stats):
        return min(each["bytes_limit"] for each in stats), "a device"
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        size = min(size, int(CGROUP_LIMIT.read_text()))
    return size, "the host"


class CacheMemory:
    """The sizes of the KV cache's pools, decided once, from the memory that is free by then.

    Bytes are those of one device, which has its pieces of each block.
    """

    def __init__(
        self,
        configs: RoundConfigs,
        config: EngineConfig,
        buckets: Buckets,
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
        rounds_per_step: int,
    ) -> None:
        self._configs, self._config, self._buckets = configs, config, buckets
        self._dtype, self._cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
        self._rounds_per_step = rounds_per_step
        self._num_blocks: tuple[int, ...] | None = None
        self._alike: Sequence[CacheMemory] = (self,)

    @staticmethod
    def size_alike(memories: Sequence[CacheMemory]) -> None:
        """Let replicas have pools of the same sizes: those of the one with the least memory.

        So each of them takes every request that another one takes.
        """
        for memory in memories:
            memory._alike = memories

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each KV-cache group, in all layers that the group serves."""
        return pool_sizes.block_bytes(self._configs.greedy.on_device(), self._cache_dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(n * size for n, size in zip(self.num_blocks, self.block_bytes, strict=True))

    def demand(self, group: CacheGroup, max_model_len: int) -> pool_sizes.PoolDemand:
        """Return the blocks that texts of max_model_len tokens take of a group."""
        return pool_sizes.demand(
            group,
            max_model_len=max_model_len,
            head_room=self._rows_of_round,
            max_chunk=self._buckets.max_chunk,
            rounds_per_step=self._rounds_per_step,
        )

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group's pool; the first use decides them."""
        return self.decide()

    def decide(self) -> tuple[int, ...]:
        """Decide the pools' sizes unless that is done, and return the blocks of each.

        ConfigError if they are too small for one request.
        """
        if self._num_blocks is None:
            fitting = [memory._find_fitting() for memory in self._alike]
            least = tuple(map(min, zip(*fitting, strict=True)))
            for memory in self._alike:
                memory._num_blocks = least
            counts = zip(least, self._configs.cache_groups, strict=True)
            logger.info(
                "KV cache: blocks of %d tokens, %s, %.2f GB",
                self._config.block_size,
                ", ".join(f"{n} for {group}" for n, group in counts),
                self.cache_bytes / 1e9,
            )
            return least
        return self._num_blocks

    def _find_fitting(self) -> tuple[int, ...]:
        """Return the blocks of each group that fit on these devices."""
        config, groups = self._config, self._configs.cache_groups
        demands = [self.demand(group, config.max_model_len) for group in groups]
        found = pool_sizes.decide_pool_sizes(
            config, groups, demands, self.block_bytes, self._free_bytes
        )
        if self._placement.spans_processes:  # each has looked at its own devices
            of_all = multihost_utils.process_allgather(np.array(found))
            found = tuple(map(int, of_all.min(axis=0)))
        return found

    def check_room(self, slot_bytes: int) -> None:
        """Raise ConfigError if the KV cache and the largest batch exceed the whole memory.

        slot_bytes: bytes of a slot of the state, without caches

        Programs need more than that. The check only keeps sizes that cannot be meant from filling
        the memory, since nothing is allocated before it.
        """
        config, target = self._config, self._configs.greedy.target
        assert config.batch_buckets is not None
        batch = config.batch_buckets[-1]
        tables = 4 * self._buckets.max_pages * len(self._configs.cache_groups)
        logits = 4 * self._rows_of_round * target.vocab_size // self._placement.size
        limit, whose = whole_memory()
        sharing = 1 if whose == "a device" else self._num_devices
        of_batch = sharing * batch * (slot_bytes + tables + logits)
        advice = (
            f"lower num_gpu_blocks_override ({config.num_gpu_blocks_override}), batch_buckets, "
            f"max_num_seqs ({config.max_num_seqs}) or max_model_len ({config.max_model_len})"
        )
        if of_batch > limit:  # looked at first, since pools are sized for each request of a batch
            raise ConfigError(
                f"memory: expected at most the {limit / 1e9:.1f} GB of {whose}, got "
                f"{of_batch / 1e9:.1f} GB for a batch of {batch}; {advice}"
            )
        blocks = sum(self.num_blocks)
        of_blocks = sharing * self.cache_bytes + BOOK_BYTES * blocks
        if of_blocks + of_batch > limit:
            raise ConfigError(
                f"memory: expected at most the {limit / 1e9:.1f} GB of {whose}, got "
                f"{of_blocks / 1e9:.1f} GB for {blocks} KV-cache blocks and "
                f"{of_batch / 1e9:.1f} GB for a batch of {batch}; {advice}"
            )

    @property
    def _placement(self) -> Placement:
        return self._configs.greedy.placement

    @property
    def _num_devices(self) -> int:
        """Devices of all replicas."""
        return self._placement.size * self._config.data_parallel_size

    @property
    def _rows_of_round(self) -> int:
        return self._configs.greedy.num_speculative_tokens + 1

    def _free_bytes(self) -> tuple[int, str]:
        """Return the bytes that the KV cache may take, and the origin of that number."""
        devices = self._placement.devices if self._buckets.on_gpu else ()
        stats = [device.memory_stats() or {} for device in devices]
        if not stats or any("bytes_limit" not in each for each in stats):
            room = CPU_POOL_BYTES // self._num_devices
            return room, f"{room / 1e9:.1f} GB of host memory"
        share, limit = self._config.gpu_memory_utilization, min(s["bytes_limit"] for s in stats)
        used, working = max(s["bytes_in_use"] for s in stats), self._working_bytes()
        source = (
            f"gpu_memory_utilization {share} of {limit / 1e9:.1f} GB, of which {used / 1e9:.1f} GB "
            f"are in use and {working / 1e9:.1f} GB kept for computing"
        )
        return int(share * limit) - used - working, source

    def _working_bytes(self) -> int:
        """Estimate what the largest programs need beside weights and caches.

        That is logits with the sampler's copies, prefill's rows, and what slots hold for requests
        with every sampling parameter.
        """
        cfg, config = self._configs.greedy.on_device(), self._config
        target, vocab = cfg.target, cfg.vocab_shards.piece(cfg.target.vocab_size)
        round_rows = config.max_num_seqs * self._rows_of_round
        logits = 4 * min(4 * round_rows * vocab, 1 << 30)
        logits = max(logits, 4 * 4 * self._buckets.max_tiles * vocab)
        intermediate = getattr(target, "intermediate_size", 4 * target.hidden_size)
        width = 8 * target.hidden_size + 3 * intermediate
        prefill = 2 * self._buckets.max_chunk * width * self._dtype.itemsize
        assert config.batch_buckets is not None
        vocabulary = Vocabulary(cfg.target.vocab_size)
        sampling = config.batch_buckets[-1] * most_slot_bytes(vocabulary, cfg.vocab_shards.count)
        return logits + prefill + sampling + RESERVE_BYTES
