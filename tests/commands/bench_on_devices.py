"""Print which arrays of a benchmark's rounds do not lie whole on every device of this process.

python -m tests.commands.bench_on_devices; XLA_FLAGS says how many devices.
"""

from __future__ import annotations

import jax

from jaxspec.tools.benchmark import workload
from jaxspec.tools.benchmark.cases import Case


def main() -> None:
    size = len(jax.devices())
    case = Case("tiny", batch=3, context=70, tensor_parallel_size=size)
    load = workload.Workload(case, workload.Weights("float32"), {}, workload.Effort(rounds=8))
    state = load.rewind(load.state)
    arrays = {f"block_tables[{i}]": table for i, table in enumerate(load.block_tables)}
    for name in ("seq_lens", "active", "num_generated", "max_tokens", "next_token"):
        arrays[name] = getattr(state, name)
    for name, array in arrays.items():
        if len(array.sharding.device_set) < size or not array.is_fully_replicated:
            print(name, array.sharding)
    print(f"looked at {len(arrays)} arrays on {size} devices")


if __name__ == "__main__":
    main()
