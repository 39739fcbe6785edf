"""The start of a process: import, weights, first token and warm-up; then single requests.

`measure` starts a fresh process for each start, since imports, compiled programs and the device's
context last as long as one. That process is this module as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxspec.loading.executables import READ

COMPILE = "/jax/core/compile/"
# Events of jax.monitoring. A program that comes from JAX's persistent cache counts as compiled too.
EVENTS = {
    f"{COMPILE}jaxpr_trace_duration": "traced",
    f"{COMPILE}jaxpr_to_mlir_module_duration": "lowered",
    f"{COMPILE}backend_compile_duration": "compiled",
    "/jax/compilation_cache/cache_retrieval_time_sec": "from disk",
    READ: "loaded",  # without a trace
}
# The programs whose parts are counted: what they call while they are traced is part of them.
LARGE = ("prefill_packed", "decode_round_in_place", "decode_rounds")
STAGES = ("single", "warmup", "rounds")
PAUSE = 0.03  # seconds between two single requests, in which the device finishes what it has
RUNS, ROUNDS = 5, 48  # of a batch, and of each run
SHORT = 30  # tokens of a prompt at most, where rounds are timed
Figures = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """The work of one process.

    model:        a name of MODELS; the weights are random
    max_num_seqs, max_num_batched_tokens, batch_buckets: of the engine
    prompt:       tokens of each prompt
    output:       tokens of each answer
    requests:     single requests that are timed
    batches:      requests that run together where rounds are timed
    stages:       what follows the first answer, in this order: single (requests that come one at a
                  time), warmup, rounds
    dtype:        of the weights
    executables:  whether compiled programs are kept where they are found without a trace
    """

    model: str = "llama-3-8b"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    batch_buckets: tuple[int, ...] | None = None
    prompt: int = 136
    output: int = 64
    requests: int = 40
    batches: tuple[int, ...] = (1, 16, 64)
    stages: tuple[str, ...] = STAGES
    dtype: str = "bfloat16"
    executables: bool = True


class Programs:
    """Counts programs, and the seconds of each part of their making."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}
        self._adding = threading.Lock()

    def count(self, event: str, duration_secs: float, **about: str | int) -> None:
        """Count an event; a listener of jax.monitoring."""
        part, name = EVENTS.get(event), str(about.get("fun_name", ""))
        if part is None:
            return
        name = name.removeprefix("jit_").removeprefix("jit(").removesuffix(")")
        is_large = not name or name in LARGE
        if not is_large and part == "traced":
            return  # often a part of a larger program
        with self._adding:
            kind = part if is_large else f"small {part}"
            number, seconds = self._found.get(kind, (0, 0.0))
            self._found[kind] = [number + 1, seconds + duration_secs]

    def seen(self) -> dict[str, list[float]]:
        """Return [number, seconds] of each part since the last call of taken."""
        with self._adding:
            return dict(self._found)

    def taken(self) -> dict[str, list[float]]:
        """Return what seen returns, and begin anew."""
        found = self.seen()
        with self._adding:
            self._found = {}
        return found


def measure(start: Start, cache: Path, *, timeout: float | None = None) -> Figures:
    """Return the figures of one start, with compiled programs kept in this folder.

    After `timeout` seconds the process is killed; the figures are those that it had by then.
    """
    environment = os.environ | {"JAXSPEC_CACHE": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", __name__, json.dumps(asdict(start)), str(time.time())]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        found: Figures = {}
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            found["killed_after"] = timeout
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if process.returncode != 0 and "killed_after" not in found:
        found["failed"] = process.returncode
    return found


def run(start: Start, began: float) -> None:
    """Go through a start in this process, and print each figure as a line of JSON.

    began: time.time() when the process was started
    """

    def say(**figures: Any) -> None:
        print(json.dumps(figures), flush=True)

    import jax

    from jaxspec.llm import LLM

    say(import_seconds=time.time() - began)
    programs = Programs()
    jax.monitoring.register_event_duration_secs_listener(programs.count)
    at = time.perf_counter()
    device = jax.devices()[0].device_kind
    say(device=device, device_seconds=time.perf_counter() - at)

    from jaxspec.config import EngineConfig, SpeculativeConfig
    from jaxspec.loading import executables, keep_compiled_programs
    from jaxspec.sampling import synthetic
    from jaxspec.sampling.params import SamplingParams
    from jaxspec.tools.benchmark.cases import Case
    from jaxspec.tools.benchmark.dimensions import MODELS, draft_config
    from jaxspec.tools.benchmark.workload import Weights

    executables.allow(start.executables)
    keep_compiled_programs()
    at = time.perf_counter()
    target, draft = jax.block_until_ready(Weights(start.dtype).get(Case(start.model, "eagle3")))
    say(weights_seconds=time.perf_counter() - at)
    programs.taken()
    at = time.perf_counter()
    dimensions = MODELS[start.model]
    llm = LLM(
        (dimensions.target, target),
        (draft_config(dimensions, "eagle3"), draft),
        SpeculativeConfig(method="eagle3", num_speculative_tokens=3),
        config=EngineConfig(
            max_model_len=2048,
            max_num_seqs=start.max_num_seqs,
            max_num_batched_tokens=start.max_num_batched_tokens,
            batch_buckets=start.batch_buckets,
            enable_prefix_caching=False,
        ),
        dtype=start.dtype,
    )
    rates = synthetic.conditional_rates(synthetic.rates_from_length(2.56, 3))
    llm.engine.runner.configs.override(acceptance_rates=rates)
    greedy = SamplingParams(0.0, max_tokens=start.output, ignore_eos=True)

    def prompt(seed: int) -> list[int]:
        vocabulary = dimensions.target.vocab_size
        return [(seed * 7919 + 31 * i) % vocabulary for i in range(start.prompt)]

    stream = llm.stream([prompt(0)], greedy)
    next(stream)
    say(first_token_seconds=time.perf_counter() - at, first_token_programs=programs.seen())
    for _ in stream:
        pass
    say(first_answer_seconds=time.perf_counter() - at, first_answer_programs=programs.taken())
    for stage in start.stages:
        if stage == "single":
            for name, pause in (("single", PAUSE), ("back_to_back", 0.0)):
                say(**{name: single_requests(llm, greedy, prompt, start.requests, pause)})
        elif stage == "warmup":
            programs.taken()
            at = time.perf_counter()
            number = llm.warmup()
            say(
                warmup_seconds=time.perf_counter() - at,
                warmup_programs=programs.taken(),
                warmed=number,
            )
        else:
            programs.taken()
            for batch in start.batches:
                prompts = [prompt(i)[:SHORT] for i in range(batch)]
                say(**{f"round_seconds_{batch}": round_seconds(llm, prompts)})
            say(rounds_programs=programs.taken())


def round_seconds(llm: Any, prompts: list[list[int]]) -> list[float]:
    """Return the seconds of a round while these requests generate, of several runs after one."""
    from jaxspec.sampling.params import SamplingParams

    found: list[float] = []
    for _ in range(1 + RUNS):
        times: list[float] = []
        llm.engine.on_rounds = lambda *_, times=times: times.append(time.perf_counter())
        endless = SamplingParams(0.0, max_tokens=1024, ignore_eos=True)
        requests = llm.make_requests(prompts, endless)
        for request in requests:
            llm.engine.add(request)
        while len(times) < 2 * ROUNDS:
            llm.engine.step()
        for request in requests:
            llm.engine.cancel(request)
        llm.engine.step()
        found.append((times[-1] - times[ROUNDS]) / (ROUNDS - 1))  # the first overlap prefill
    llm.engine.on_rounds = None
    return found[1:]


def single_requests(llm: Any, params: Any, prompt: Any, number: int, pause: float) -> Figures:
    """Return the times of requests that come one at a time, as their callers see them."""
    from jaxspec.engine.metrics import summary

    first: list[float] = []
    between: list[float] = []
    for i in range(number):
        time.sleep(pause)
        at = last = time.perf_counter()
        for increment in llm.stream([prompt(1 + i)], params):
            now = time.perf_counter()
            if increment.token_ids:
                (between if last > at else first).append(now - last)
                last = now
    return {"first_token": summary(first), "between_tokens": summary(between)}


if __name__ == "__main__":
    run(Start(**json.loads(sys.argv[1])), float(sys.argv[2]))
