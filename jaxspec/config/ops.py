"""Ops: the implementation of each op, the devices that share the work, and the consequences."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flax import struct

from jaxspec.parallel.group import ONE_DEVICE, Group

XlaFlags = tuple[tuple[str, str | bool | int], ...]

# XLA's own kernels for matrix products alone: YNNPACK's fused sums, softmax and products add in an
# order that depends on their shapes. docs/notes/rows-on-a-cpu.md has what was measured.
CPU_FLAGS: XlaFlags = (
    ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
)
# In each program XLA would compile several versions of each small fusion, and time them on a GPU.
# For its model of latencies it would read tables of collectives, of which most programs have none.
# Without a GPU both take half of the compilation of a round whose kernels are known
# (docs/notes/startup.md).
NO_MODEL_OF_LATENCIES: XlaFlags = (("xla_gpu_enable_analytical_sol_latency_estimator", False),)
QUICK_TO_COMPILE: XlaFlags = (
    ("xla_gpu_experimental_enable_fusion_autotuner", False),
    *NO_MODEL_OF_LATENCIES,
)
# A schedule that starts an exchange early and ends it late, so that it runs beside products. XLA's
# model of latencies would end it after one short kernel. Its passes that join products by one
# weight, and exchanges, would join the halves of a prompt, of which one hides the other's exchange.
HIDING: XlaFlags = (
    *NO_MODEL_OF_LATENCIES,
    ("xla_gpu_enable_latency_hiding_scheduler", True),
    ("xla_gpu_dot_merger_threshold_mb", 0),
    ("xla_gpu_all_reduce_combine_threshold_bytes", 0),
    ("xla_gpu_all_gather_combine_threshold_bytes", 0),
    ("xla_gpu_collective_permute_combine_threshold_bytes", 0),
)
# Two devices that reach each other's memory exchange by copy engines. NCCL's kernels would hold
# multiprocessors, which the products beside them need.
COPYING: XlaFlags = (("xla_gpu_collective_permute_mode", "COLLECTIVES_PEER_MEMORY"),)


def _name() -> Any:
    return struct.field(pytree_node=False, default="reference")


@struct.dataclass
class Ops:
    """The implementation of each op, by name, and the devices that share the products.

    jaxspec.layers.op_choice chooses the names once, when the engine is built. Other code reads the
    properties that follow from a choice, and compares no names.

    layers:     the devices whose pieces of a layer's product add up to the whole
    vocabulary: the devices that share embedding and head
    is_prefill: whether the pass reads prompts
    prefill_in_order: sum the products of such a pass in one order for any number of rows
    in_halves:  whether it reads one half of the rows, while the other half's sums are exchanged
    rows_alike: on a CPU, give a row the same bits beside few other rows as beside many. A last bit
                may move a number to the next fp8 code, and then texts differ. Products have at
                least 8 rows; attention, routers and experts run in tiles of 8
    full_float32: multiply float32 matrices in float32, where a GPU would take TF32. Texts with and
                without speculation would differ by its rounding
    """

    attention: str = _name()
    matmul: str = _name()
    rms_norm: str = _name()
    rope_cache: str = _name()
    step_metadata: str = _name()
    rejection_sampling: str = _name()
    gumbel_sample: str = _name()
    moe: str = _name()
    all_reduce: str = _name()
    layers: Group = ONE_DEVICE
    vocabulary: Group = ONE_DEVICE
    is_prefill: bool = struct.field(pytree_node=False, default=False)
    prefill_in_order: bool = struct.field(pytree_node=False, default=False)
    in_halves: bool = struct.field(pytree_node=False, default=False)
    rows_alike: bool = struct.field(pytree_node=False, default=False)
    full_float32: bool = struct.field(pytree_node=False, default=False)

    def names(self) -> dict[str, str]:
        """Return the implementation of each op."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {op: name for op, name in values.items() if isinstance(name, str)}

    @property
    def prefill_tile(self) -> int:
        """Tokens of a prefill tile: a whole number of the attention kernel's row tiles (48 rows).

        The reference gathers a request's keys for each tile, so its tiles are smaller.
        """
        return 32 if self.attention == "reference" else 48

    @property
    def pads_latent_heads(self) -> bool:
        """Whether latent attention takes queries padded to whole row tiles of its kernel."""
        return self.attention != "reference"

    @property
    def shares_norms(self) -> bool:
        """Whether a product may prepare the norm of the product that follows it."""
        return "reference" not in (self.matmul, self.rms_norm)

    def compiler_options(self, *, cuda_graphs: bool, hiding: XlaFlags = ()) -> XlaFlags:
        """Return XLA flags for programs with these ops, on GPUs as measured on an H200 or H100.

        cuda_graphs: False launches kernel by kernel
        hiding:      HIDING, with COPYING or alone, for a program whose sums XLA exchanges

        For the products that the matmul kernel leaves to XLA (prefill, large batches), cuBLAS is
        faster than the Triton products that XLA's autotuner picks. The small fusions beside them
        run as fast without being timed (QUICK_TO_COMPILE). XLA would launch a kernel whose
        result goes into one column a second time, as a "dynamic slice fusion". The figures are in
        docs/performance.md.
        """
        if self.matmul == "reference":
            return CPU_FLAGS if self.rows_alike else ()
        graphs = () if cuda_graphs else (("xla_gpu_enable_command_buffer", ""),)
        return (
            ("xla_gpu_enable_triton_gemm", False),
            ("xla_gpu_enable_dynamic_slice_fusion", False),
            *QUICK_TO_COMPILE,
            *graphs,
            *hiding,
        )

    def __str__(self) -> str:
        """Return the commonest name, then the other ops: "mosaic_gpu (rms_norm reference)"."""
        chosen = self.names()
        names = list(chosen.values())
        most = max(dict.fromkeys(names), key=names.count)
        others = ", ".join(f"{op} {name}" for op, name in chosen.items() if name != most)
        return f"{most} ({others})" if others else most


REFERENCE_OPS = Ops()
