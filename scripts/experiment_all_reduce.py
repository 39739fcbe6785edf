"""Measure and test the all-reduce kernel on the GPUs of one host (docs/notes/all-reduce.md).

python scripts/experiment_all_reduce.py --output-json all-reduce.json
python scripts/experiment_all_reduce.py --cases time --rows 4,64 --seconds 60
python scripts/experiment_all_reduce.py --cpu     # a dry run of the reference on CPU devices

Each case is a process of its own with a time limit:

    check        its results against the reference, to the bit but for the norm; the all-gather's
    time         microseconds of an all-reduce in chains of 64, with XLA's and a launch beside it
    threads      the same by the number of warpgroups
    soak         rounds of 64 all-reduces of many shapes, and 8 all-gathers; every value is
                 compared on each device
    independent  two chains in one program that do not depend on each other
    stopped      a rank that leaves out one all-reduce: how long the others wait, and what they say
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from jaxspec.tools.cli import run_program
from jaxspec.tools.flags import flag

# The seconds that each may take.
CASES = {"check": 60, "time": 120, "threads": 60, "stopped": 60, "independent": 60, "soak": 110}
AXIS, CHAIN, LOOPS, WIDTH, EPS = "model", 64, 16, 4096, 1e-5
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
# Rows, width and dtype of the soak's successive calls.
SOAK_SHAPES = (
    (4, 4096, "bfloat16"),
    (1, 4096, "float32"),
    (16, 2048, "bfloat16"),
    (64, 4096, "bfloat16"),
    (2, 8192, "float32"),
    (8, 4096, "bfloat16"),
    (33, 256, "bfloat16"),
    (4, 4096, "bfloat16"),
)
SOAK_WORDS = (2, 24, 1536, 16_000)  # of all-gathers between them


@dataclass(frozen=True)
class Options:
    """What is run, and where."""

    cases: tuple[str, ...] = flag(tuple(CASES), "What to run.", among=tuple(CASES))
    devices: int = flag(2, "GPUs, or CPU devices.")
    rows: tuple[int, ...] = flag((4, 16, 64, 128, 256), "Of the timed calls.", least=1)
    rounds: int = flag(100_000, "Of the soak.")
    seconds: float = flag(70.0, "Of the soak, at most.")
    cpu: bool = flag(False, "Run the reference on forced CPU devices.")
    output_json: Path | None = flag(None, "Write the lines to this file, after each of them.")
    child: str | None = flag(None, "A case to run in this process, for the script's own calls.")


def main(args: Options) -> None:
    """Measure and test the all-reduce kernel."""
    if args.child:
        Experiment(args).run(args.child)
        return
    found, failed = [], False
    for case in args.cases:
        for line in in_a_process(case, args):
            found.append(line)
            failed = failed or bool(line.get("failed"))
            print("  ".join(f"{name} {shown(value)}" for name, value in line.items()), flush=True)
            if args.output_json:
                args.output_json.write_text(json.dumps(found, indent=1))
    if failed:
        raise typer.Exit(1)


def shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def in_a_process(case: str, args: Options) -> Iterator[dict[str, Any]]:
    """Run a case; yield what it prints as JSON lines, and a last line if it fails."""
    # NVLink's multicast is not used.
    env = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    if args.cpu:
        flags = f"--xla_force_host_platform_device_count={args.devices}"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, os.path.abspath(__file__), "--child", case, *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        limit = threading.Timer(CASES[case], child.kill)
        limit.start()
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        status = child.wait()
        limit.cancel()
        if status:
            late = f"no end after {CASES[case]} s: " if status == -signal.SIGKILL else ""
            errors.seek(0)
            yield {"case": case, "failed": f"{late}exit {status}: {errors.read()[-3000:]}"}


class Experiment:
    """One process: devices, mailboxes, and programs under shard_map."""

    def __init__(self, args: Options) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from pallas_kernels.peers import Peers, mailbox

        self.args, self.size = args, args.devices
        self.implementation = "reference" if args.cpu else "mosaic_gpu"
        devices = jax.devices()[: self.size]
        self.mesh = Mesh(devices, (AXIS,))
        self.each, self.everywhere = PartitionSpec(AXIS), PartitionSpec()
        self.shard = partial(NamedSharding, self.mesh)
        self.mailboxes = None
        self.addresses = jax.numpy.zeros(2 * self.size, jax.numpy.uint32)
        if not args.cpu:
            self.mailboxes, self.addresses = mailbox.make_mailboxes(devices)
        self.addresses = jax.device_put(self.addresses, self.shard(self.everywhere))
        self.peers = partial(Peers, axis=AXIS, size=self.size)

    def run(self, case: str) -> None:
        {
            "check": self.check,
            "time": self.time,
            "threads": self.threads,
            "soak": self.soak,
            "independent": self.independent,
            "stopped": self.stopped,
        }[case]()

    def program(self, body: Callable, options: dict[str, Any] | None = None) -> Callable:
        """Return body(addresses, *arrays of this device) as a program.

        The arrays have a leading axis of the devices, in and out.
        """
        import jax

        def local(addresses: jax.Array, *arrays: jax.Array) -> Any:
            results = body(addresses, *(array[0] for array in arrays))
            return jax.tree.map(lambda x: x[None], results)

        def whole(addresses: jax.Array, *arrays: jax.Array) -> Any:
            specs = (self.everywhere, *[self.each] * len(arrays))
            call = jax.shard_map(
                local, mesh=self.mesh, in_specs=specs, out_specs=self.each, check_vma=False
            )
            return call(addresses, *arrays)

        return partial(
            jax.jit(whole, compiler_options=None if self.args.cpu else options), self.addresses
        )

    def error(self) -> str | None:
        from pallas_kernels.peers import mailbox

        return None if self.mailboxes is None else mailbox.mailbox_error(self.mailboxes)

    def check(self) -> None:
        for rows in (1, 4, 64):
            for kind in ("kernel", "kernel float32", "kernel + norm", "kernel + norm float32"):
                self.compare(rows, kind)
        for count in (1, 2, 24, 513, 16_000, 256_000):
            self.compare_words(count)

    def compare_words(self, count: int) -> None:
        """Compare the all-gather of random words with what was sent."""
        import jax
        import numpy as np

        from pallas_kernels.all_gather import all_gather
        from pallas_kernels.all_gather.shapes import make_inputs

        gather = self.program(
            lambda addresses, words: all_gather(
                words, self.peers(addresses=addresses), implementation=self.implementation
            )
        )
        wrong = 0
        for seed in range(3):  # both buffers, and the first once more
            sent = make_inputs(count, self.size, seed)
            found = np.asarray(gather(jax.device_put(sent, self.shard(self.each))))
            wrong += int((found != np.asarray(sent)[None]).sum())
        self.say(
            case="check",
            kind="all-gather",
            words=count,
            wrong_words=wrong,
            failed=(f"all-gather of {count} words: {wrong} wrong" if wrong else "") or self.error(),
        )

    def time(self) -> None:
        for rows in self.args.rows:
            kinds = ("launch", "kernel", "kernel float32", "kernel + norm")
            for kind in (*kinds, "kernel + norm all float32"):
                self.time_one(rows, kind, {})
            if rows == 4:
                self.time_one(rows, "kernel + norm", NO_GRAPHS)
            for kind in ("psum", "psum + norm"):
                self.time_one(rows, kind, {})

    def step(self, kind: str, implementation: str, addresses: Any, x: Any, res: Any, gain: Any):
        """Return (next x, residual, result) of one all-reduce."""
        import jax

        from pallas_kernels.all_reduce import all_reduce
        from pallas_kernels.rms_norm import rms_norm

        peers = self.peers(addresses=addresses)
        call = partial(all_reduce, x, peers, implementation=implementation)
        norms = "norm" in kind
        if kind == "launch":
            total = rms_norm(x, gain, eps=EPS, implementation=implementation)
            return total, res, total
        if kind.startswith("psum"):
            total = jax.lax.psum(x, AXIS)
            if not norms:
                return total, res, total
            res = res + total
            normed = rms_norm(res, gain, eps=EPS, implementation=implementation)
            return normed, res, (res, normed)
        if not norms:
            total = call()
            return total, res, total
        res, normed = call(residual=res, gain=gain, eps=EPS)
        return normed, res, (res, normed)

    def inputs(self, rows: int, kind: str) -> tuple[Any, Any, Any]:
        import jax
        import jax.numpy as jnp

        from pallas_kernels.all_reduce.shapes import Shape, make_inputs

        dtype = jnp.float32 if "float32" in kind else jnp.bfloat16
        made = make_inputs(Shape(rows, WIDTH, dtype), self.size, seed=rows)
        copies = [jnp.stack([made[name]] * self.size) for name in ("residual", "gain")]
        if "all float32" in kind:  # so that a result is the next share
            copies[0] = copies[0].astype(jnp.float32)
        return tuple(jax.device_put(array, self.shard(self.each)) for array in (made["x"], *copies))

    def compare(self, rows: int, kind: str) -> None:
        """Compare one all-reduce with the reference, and the ranks with each other."""
        import jax
        import numpy as np

        arrays = self.inputs(rows, kind)
        results = []
        for implementation in (self.implementation, "reference"):
            one = self.program(
                lambda addresses, *a, name=implementation: self.step(kind, name, addresses, *a)[2]
            )
            for _ in range(3):  # both buffers, and the first once more
                results.append(jax.tree.leaves(jax.tree.map(np.asarray, one(*arrays))))
        found, reference = results[1], results[-1]
        exact = self.in_numpy(arrays, kind)
        differing = [
            [
                int((a.astype(np.float32) != b.astype(np.float32)).sum())
                for a, b in zip(*pair, strict=True)
            ]
            for pair in ((found, exact), (found, reference), (reference, exact))
        ]
        same = all((a[0] == a[r]).all() for got in results for a in got for r in range(self.size))
        repeated = all(
            (a == b).all() for got in results[:3] for a, b in zip(got, results[0], strict=True)
        )
        # Sums have no freedom. The kernel, XLA and numpy sum a row's squares in orders of their
        # own, so one normed value in a thousand may round apart.
        wrong = any(counts[0] for counts in differing) or differing[0][-1] > exact[-1].size / 1000
        self.say(
            case="check",
            kind=kind,
            rows=rows,
            ranks_equal=same,
            repeated=repeated,
            values=exact[0].size,
            kernel_not_numpy=differing[0],
            kernel_not_reference=differing[1],
            reference_not_numpy=differing[2],
            failed=(f"{kind}, {rows} rows: wrong" if wrong or not same or not repeated else "")
            or self.error(),
        )

    def in_numpy(self, arrays: tuple[Any, ...], kind: str) -> list[Any]:
        """Return what the op's docstring says, for each rank."""
        import jax.numpy as jnp
        import numpy as np

        def rounded(values: Any, dtype: Any) -> Any:
            return values.astype(dtype).astype(np.float32)

        x, residual, gain = (np.asarray(a).astype(np.float32) for a in arrays)
        dtype = jnp.bfloat16 if "norm" in kind else arrays[0].dtype
        total = x[0]
        for share in x[1:]:
            total = total + share
        total = rounded(total, dtype)
        results = [total]
        if "norm" in kind:
            total = rounded(residual[0] + total, dtype)
            mean = np.mean(total.astype(np.float64) ** 2, axis=1, keepdims=True)
            scale = (1 / np.sqrt(mean + EPS)).astype(np.float32)
            results = [total, rounded(rounded(total * scale, dtype) * gain[0], dtype)]
        return [np.stack([result] * self.size) for result in results]

    def time_one(self, rows: int, kind: str, options: dict[str, Any], **more: Any) -> None:
        import jax
        import jax.numpy as jnp

        from pallas_kernels.all_reduce import unsupported

        x, residual, gain = self.inputs(rows, kind)
        reason = unsupported(rows, WIDTH, x.dtype, self.size)
        if kind.startswith("kernel") and reason:
            self.say(case="time", kind=kind, rows=rows, unsupported=reason, failed=None)
            return

        def chain(_: Any, state: Any, addresses: Any, gain: Any) -> Any:
            x, residual = (jnp.clip(array, -1.0, 1.0) for array in state)
            for _ in range(CHAIN):
                x, residual, _ = self.step(kind, self.implementation, addresses, x, residual, gain)
            return x, residual

        def body(addresses: Any, x: Any, residual: Any, gain: Any) -> Any:
            step = partial(chain, addresses=addresses, gain=gain)
            return jax.lax.fori_loop(0, loops, step, (x, residual))

        # The host needs 0.4 ms to dispatch a program to two devices: as long as 100 all-reduces.
        loops = 1 if self.args.cpu else LOOPS
        call = self.program(body, options)
        out = call(x, residual, gain)
        for _ in range(4):
            out = call(x, residual, gain)
        jax.block_until_ready(out)
        count, samples, host = 3, [], []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(count):
                out = call(x, residual, gain)
            host.append(time.perf_counter() - begin)
            jax.block_until_ready(out)
            samples.append(time.perf_counter() - begin)
        count *= loops
        each = [1e6 * sample / count / CHAIN for sample in samples]
        self.say(
            case="time",
            kind=kind,
            rows=rows,
            graphs=not options,
            us=statistics.median(each),
            best_us=min(each),
            host_us=1e6 * statistics.median(host) / count / CHAIN,
            failed=self.error(),
            **more,
        )

    def threads(self) -> None:
        import jax

        from pallas_kernels.all_reduce import mosaic_gpu

        for most in (1, 2, 4):
            mosaic_gpu.MAX_WARPGROUPS = most
            jax.clear_caches()
            for rows in (4, 64):
                for kind in ("kernel + norm", "kernel + norm all float32"):
                    self.time_one(rows, kind, {}, warpgroups=most)

    def soak(self) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from pallas_kernels.all_gather import all_gather
        from pallas_kernels.all_reduce import all_reduce

        def share(rank: Any, rows: int, width: int, salt: Any) -> jax.Array:
            """Return small integers, whose sums are exact, of a rank in one call."""
            row = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
            column = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
            return ((row * 131 + column * 7 + salt * 29) * (2 * rank + 1) & 31) - 16

        def round_of(addresses: Any, number: Any, wrong: Any) -> Any:
            peers, rank = self.peers(addresses=addresses), jax.lax.axis_index(AXIS)
            for i in range(CHAIN):
                rows, width, dtype = SOAK_SHAPES[i % len(SOAK_SHAPES)]
                # XLA does not know that `wrong` is at least 0: the call depends on the last one.
                salt = number * CHAIN + i + jnp.minimum(wrong, 0)
                mine = share(rank, rows, width, salt).astype(dtype)
                total = all_reduce(mine, peers, implementation=self.implementation)
                expected = share(0, rows, width, salt)
                for other in range(1, self.size):
                    expected += share(other, rows, width, salt)
                wrong += (total.astype(jnp.float32) != expected.astype(jnp.float32)).sum(
                    dtype=jnp.int32
                )
                if i % len(SOAK_SHAPES):
                    continue
                count = SOAK_WORDS[i // len(SOAK_SHAPES) % len(SOAK_WORDS)]
                words = share(rank, 1, count, salt + jnp.minimum(wrong, 0))[0]
                found = all_gather(words, peers, implementation=self.implementation)
                sent = [share(other, 1, count, salt)[0] for other in range(self.size)]
                wrong += (found != jnp.stack(sent)).sum(dtype=jnp.int32)
            return number + 1, wrong

        def rounds_of(addresses: Any, number: Any, wrong: Any) -> Any:
            step = lambda _, state: round_of(addresses, *state)  # noqa: E731
            return jax.lax.fori_loop(0, loops, step, (number, wrong))

        loops = 1 if self.args.cpu else LOOPS
        step = self.program(rounds_of)
        zeros = jax.device_put(jnp.zeros(self.size, jnp.int32), self.shard(self.each))
        state = step(zeros, zeros)
        jax.block_until_ready(state)
        begin, rounds = time.perf_counter(), loops
        batch = 1 if self.args.cpu else 10
        while rounds < self.args.rounds and time.perf_counter() - begin < self.args.seconds:
            for _ in range(batch):
                state = step(*state)
            rounds += batch * loops
            jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        number, wrong = np.asarray(state[0]), np.asarray(state[1])
        self.say(
            case="soak",
            rounds=rounds,
            all_reduces=rounds * CHAIN,
            counted=number.tolist(),
            wrong_values=wrong.tolist(),
            seconds=seconds,
            failed=(f"wrong values: {wrong.tolist()}" if wrong.any() else "") or self.error(),
        )

    def independent(self) -> None:
        import jax
        import numpy as np

        from pallas_kernels.all_reduce import all_reduce

        x = self.inputs(4, "kernel")[0]
        other = self.inputs(16, "kernel")[0] * 0.5

        def two(name: str, addresses: Any, x: Any, y: Any) -> Any:
            peers = self.peers(addresses=addresses)
            for _ in range(8):
                x = (all_reduce(x, peers, implementation=name) * 0.5).astype(x.dtype)
                y = (all_reduce(y, peers, implementation=name) * 0.5).astype(y.dtype)
            return x, y

        def looped(name: str, addresses: Any, x: Any, y: Any) -> Any:
            step = lambda _, state: two(name, addresses, *state)  # noqa: E731
            return jax.lax.fori_loop(0, 5, step, (x, y))

        for title, body in (("two chains", two), ("two chains in a loop", looped)):
            expected = self.program(partial(body, "reference"))(x, other)
            call = self.program(partial(body, self.implementation))
            wrong, count = 0, 3 if self.args.cpu else 1000
            for i in range(count):
                found = call(x, other)
                if i % 50 == 0:
                    wrong += sum(
                        int((np.asarray(a) != np.asarray(b)).sum())
                        for a, b in zip(found, expected, strict=True)
                    )
            self.say(
                case="independent",
                kind=title,
                calls=count,
                wrong_values=wrong,
                failed=(f"{title}: {wrong} values" if wrong else "") or self.error(),
            )

    def stopped(self) -> None:
        import jax

        from pallas_kernels.all_reduce import all_reduce

        if self.args.cpu:
            return  # XLA's own collectives do not end
        x, _, _ = self.inputs(4, "kernel")
        last = self.size - 1

        def all_take_part(addresses: Any, x: Any) -> Any:
            return all_reduce(
                x, self.peers(addresses=addresses), implementation=self.implementation
            )

        def last_leaves_out(addresses: Any, x: Any) -> Any:
            return jax.lax.cond(
                jax.lax.axis_index(AXIS) == last,
                lambda: x,
                lambda: all_take_part(addresses, x),
            )

        whole, missing = self.program(all_take_part), self.program(last_leaves_out)
        jax.block_until_ready(whole(x))
        sentences = []
        for title, call in (
            ("all", whole),
            ("one leaves out", missing),
            ("all, after the error", whole),
            ("all, once more", whole),
        ):
            begin = time.perf_counter()
            jax.block_until_ready(call(x))
            seconds = time.perf_counter() - begin
            sentences.append(self.error())
            self.say(case="stopped", kind=title, seconds=seconds, error=sentences[-1], failed=None)
        expected = f"rank {last} did not answer rank 0"
        if sentences[0] is not None or not all(
            (sentence or "").startswith(expected) for sentence in sentences[1:]
        ):
            self.say(case="stopped", failed=f"expected None, then {expected!r}, got {sentences}")
        Experiment(self.args).compare(4, "kernel + norm")  # new mailboxes work again

    def say(self, **line: Any) -> None:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_program(main)
