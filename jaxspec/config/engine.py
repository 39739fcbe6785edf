"""EngineConfig: settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from jaxspec.config.cache_dtype import KVCacheDtype, settled_kv_cache_dtype
from jaxspec.config.keys import ENGINE, checks_keywords
from jaxspec.config.quantization import OwnMethod, Quantize, settled_quantize
from jaxspec.config.reading import (
    ConfigError,
    check_int32,
    check_positive_int,
    is_number,
    is_one_of,
    is_positive_int,
    items_of,
    set_field,
    settle_integers,
    shown,
)
from jaxspec.config.settings import setting

Compilation = Literal["round", "step", "eager"]


@checks_keywords(ENGINE)
@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine.

    None changes the distribution of a text, but for kv_cache_dtype and quantize.

    max_model_len: tokens that a request may hold, prompt included.
    max_num_seqs: requests that run together.
    block_size: tokens of a KV-cache block.
    max_num_batched_tokens: tokens of one prefill call, of all requests together. A longer prompt is
        prefilled in chunks, with a round of the other requests after each. They are rounded up to
        whole tiles (Ops.prefill_tile). None: 2,048, or 4,096 if several devices share the models.
    compilation: "round" (one program a round), "step" (one a draft step) or "eager" (none).
    batch_buckets: batch sizes that programs are compiled for; a smaller batch is padded. None:
        powers of two.
    rounds_per_step: rounds that one dispatched program runs. Several give the host more time for
        each; requests enter, and results are read, only between two steps. None: 4 or 2 on GPUs
        whose rounds are shorter than the host's time (jaxspec.decode.several_rounds), else 1.
    kernels: "reference", "mosaic_gpu", or "auto" for the fastest that device and models allow;
        "op=name,op=name" for single ops (jaxspec.layers.op_choice).
    gpu_memory_utilization: the share of the device's memory that weights, KV cache and everything
        else may take together.
    num_gpu_blocks_override: KV-cache blocks of each pool, on a GPU or a CPU, or a tuple with one
        number for each KV-cache group. A pool with a window gets no more than max_num_seqs requests
        need. None: the blocks that fit in that share (in 4 GiB on a CPU), and no more than
        max_num_seqs requests of max_model_len need.
    kv_cache_dtype: of keys and values in the caches of the target, and of a draft without a
        draft_kv_cache_dtype. "fp8" (e4m3) takes the scales of a checkpoint that has them, else 1;
        latent attention and DeepSeek-V4's have no such caches. "auto" is fp8 for a checkpoint whose
        config says so, else the weights' dtype. The Hopper kernels take bfloat16 and fp8.
    quantize: quantises the target's plain weights while they load: "fp8" (a scale for each output
        channel and each token), "fp8-block" (for 128 x 128, and 128 of a token) or "int4" (for 128
        weights of an output channel, or fewer where a width is no multiple). Routers stay plain.
        A checkpoint's own method may be named, and needs no setting: a loaded target has None.
    enable_prefix_caching: prompts with an equal prefix share its blocks.
    tensor_parallel_size: devices that share each model: each holds pieces of the weights and of
        the KV cache, and all run one program.
    data_parallel_size: replicas of the engine behind one queue. Each has devices and a KV cache of
        its own; a request runs on one of them. max_num_seqs, max_num_batched_tokens and
        num_gpu_blocks_override are those of one replica.
    enable_expert_parallel: with several devices, each holds whole experts instead of a piece of
        every expert.
    prefill_in_order: with the Hopper kernels, the products of prompts have one order of summation
        for all sizes of prefill calls, so that a prompt's bits do not depend on the prompts beside
        it. XLA's products, which are faster in short calls of large models, do not promise that.
        None: for targets below 1 GiB on each device, and in int4 (jaxspec.layers.op_choice).
    batch_invariant: rounds of one batch size, and prefill calls of one size, the largest, whatever
        runs. In prefill that is not in order, in rounds of more than 64 rows and without kernels,
        the last bits of a product depend on its number of rows. In bfloat16 a request's text can
        therefore depend on its neighbours where its logits tie. This setting prevents that, unless
        a preempted request is prefilled again. It makes no difference in float32. A request that
        runs alone takes the time of a full batch.
    """

    max_model_len: int = setting(2048, "Tokens a request may hold, prompt included.")
    max_num_seqs: int = setting(8, "Requests that run together.")
    block_size: int = setting(64, "Tokens a KV-cache block.")
    max_num_batched_tokens: int | None = setting(
        None,
        "Tokens of one prefill call, of all requests, rounded up to whole tiles. "
        "[default: 2048, or 4096 if several devices share the models]",
    )
    compilation: Compilation = setting(
        "round", "One program a round, one a draft step, or none: round, step or eager."
    )
    batch_buckets: tuple[int, ...] | None = setting(
        None, "Batch sizes that programs are compiled for. [default: powers of two]"
    )
    rounds_per_step: int | None = setting(
        None,
        "Rounds that one program runs. "
        "[default: on a GPU 4 for a target below 1 GiB, 2 below 6 GiB or shared by GPUs, else 1]",
    )
    kernels: str = setting(
        "auto",
        "reference (plain jnp), mosaic_gpu (Hopper), auto for what runs, or op=name,op=name.",
    )
    gpu_memory_utilization: float = setting(0.9, "Share of the GPU's memory that may be used.")
    num_gpu_blocks_override: int | tuple[int, ...] | None = setting(
        None, "KV-cache blocks of each pool. [default: what fits]"
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "Dtype of keys and values: bfloat16, float32, fp8, or auto: the checkpoint's, else that of "
        "the weights.",
    )
    quantize: Quantize | OwnMethod | None = setting(
        None, "Quantise the target's plain weights while they load: fp8, fp8-block or int4."
    )
    enable_prefix_caching: bool = setting(True, "Share the blocks of equal prefixes.")
    tensor_parallel_size: int = setting(1, "Devices that share each model.")
    data_parallel_size: int = setting(1, "Replicas behind one queue, each on devices of its own.")
    enable_expert_parallel: bool = setting(
        False, "Give each device whole experts instead of a piece of every expert."
    )
    prefill_in_order: bool | None = setting(
        None,
        "Sum the products of prompts in one order for all sizes of prefill calls. "
        "[default: on a GPU for a target below 1 GiB a device, or in int4]",
    )
    batch_invariant: bool = setting(False, "Run programs of one batch size only.")

    def __post_init__(self) -> None:
        _check_share_of_memory(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" or (field.type == "bool | None" and value is not None):
                _check_switch(field.name, value)
            elif field.type == "int":
                check_positive_int(field.name, value)
        if self.max_num_batched_tokens is not None:
            check_positive_int("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_blocks(self.num_gpu_blocks_override)
        _check_compilation(self)
        set_field(
            self, "kv_cache_dtype", settled_kv_cache_dtype("kv_cache_dtype", self.kv_cache_dtype)
        )
        set_field(self, "quantize", settled_quantize("quantize", self.quantize))
        settle_integers(self)
        set_field(self, "batch_buckets", _settled_buckets(self))

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prefill call: max_num_batched_tokens or its default."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return 2048 if self.tensor_parallel_size == 1 else 4096

    def prefill_tiles(self, tile: int) -> int:
        """Return how many tiles of so many rows a prefill call has at most.

        Several devices halve calls of many tiles, so they have an even number.
        """
        tiles = -(-self.prefill_tokens // tile)
        return tiles if self.tensor_parallel_size == 1 or tiles == 1 else tiles + tiles % 2


def _check_share_of_memory(config: EngineConfig) -> None:
    share = config.gpu_memory_utilization
    if not is_number(share) or not 0 < share <= 1:
        raise ConfigError(
            f"gpu_memory_utilization: expected a number in (0, 1], got {shown(share)}"
        )


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {shown(value)}")


def _check_blocks(blocks: Any) -> None:
    """Check num_gpu_blocks_override."""
    if blocks is None:
        return
    numbers = blocks if isinstance(blocks, tuple) else (blocks,)
    if not all(map(is_positive_int, numbers)):
        raise ConfigError(
            "num_gpu_blocks_override: expected an integer of at least 1, a tuple of them "
            f"or None, got {shown(blocks)}"
        )
    for number in numbers:
        check_int32("num_gpu_blocks_override", number)


def _check_compilation(config: EngineConfig) -> None:
    """Check the settings of the compiled programs: compilation, kernels and rounds_per_step."""
    if not is_one_of(config.compilation, get_args(Compilation)):
        raise ConfigError(
            f"compilation: expected one of {', '.join(get_args(Compilation))}, "
            f"got {shown(config.compilation)}"
        )
    if not isinstance(config.kernels, str):
        raise ConfigError(
            f"kernels: expected a name or op=name,op=name, got {shown(config.kernels)}"
        )
    rounds = config.rounds_per_step
    if rounds is None:
        return
    if not is_positive_int(rounds) or (rounds > 1 and config.compilation != "round"):
        raise ConfigError(
            "rounds_per_step: expected None or an integer of at least 1, which is 1 unless "
            f"compilation is 'round', got {shown(rounds)} with compilation {config.compilation!r}"
        )
    if rounds > config.max_model_len:  # a request ends earlier; XLA aborts the process far above
        raise ConfigError(
            f"rounds_per_step: expected at most max_model_len {config.max_model_len}, "
            f"got {shown(rounds)}"
        )


def _settled_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Return the batch sizes in order: batch_buckets or its default."""
    buckets, most = config.batch_buckets, config.max_num_seqs
    if buckets is None:
        if most > 1 << 30:  # the next power of two must fit int32
            raise ConfigError(f"max_num_seqs: expected at most 2**30, got {most}")
        powers = tuple(1 << i for i in range((most - 1).bit_length() + 1))
        return (most,) if config.batch_invariant else powers
    sizes = items_of(buckets) or []
    if not all(map(is_positive_int, sizes)):
        sizes = []
    for size in sizes:
        check_int32("batch_buckets", size)
    sizes = sorted({int(size) for size in sizes})
    if not sizes or sizes[-1] < most:
        raise ConfigError(
            "batch_buckets: expected batch sizes of at least 1 whose largest reaches "
            f"max_num_seqs {most}, got {shown(buckets)}"
        )
    if config.batch_invariant and len(sizes) > 1:
        raise ConfigError(
            f"batch_buckets: expected one batch size with batch_invariant, got {tuple(sizes)}"
        )
    return tuple(sizes)
