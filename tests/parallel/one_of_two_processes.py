"""One of two processes that run an engine together, each with one device.

    python -m tests.parallel.one_of_two_processes RANK PORT CASE

CASE: "tokens" (process 0 compares with an engine of its own), "more" (greedy and plain too, other
features, a warm-up), "adaptive" (as many drafts as pay, some of them looked up, and rounds of few
rows), or what a process does in the midst of a text: "stop0" (process 0 gets SIGSTOP), "die1"
(process 1 ends) and so on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import jax
import numpy as np

from jaxspec import LLM, ConfigError, SamplingParams
from jaxspec.engine.resident_state import ResidentState
from jaxspec.parallel.processes import join_processes

RANK, PORT, CASE = sys.argv[1:]
os.environ |= {
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{PORT}",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": RANK,
}
join_processes()
jax.config.update("jax_default_matmul_precision", "highest")

from tests.parallel.engines_on_devices import PROMPTS, all_sampled, sampling  # noqa: E402
from tests.parallel.tiny_pair import make_llm  # noqa: E402
from tests.support.tiny import tiny_model  # noqa: E402

MODEL = tiny_model("eagle3", mapped=True)
PARAMS = all_sampled(sampling({})) if CASE == "tokens" else sampling({})
LONG = SamplingParams(1.0, seed=1, max_tokens=50, ignore_eos=True)


ADAPTIVE = dict(
    adaptive=True, fallback_method="ngram", prompt_lookup_min=1, max_num_verify_tokens=4
)


def make(drafts: bool, **config: Any) -> LLM:
    sizes: dict[str, Any] = dict(max_num_seqs=4, batch_buckets=(4,), num_gpu_blocks_override=40)
    options = ADAPTIVE if CASE == "adaptive" else {}
    return make_llm(MODEL, drafts=drafts, options=options, **sizes, **config)


def compare(llm: LLM, one: LLM) -> None:
    """Requests at once, one that comes late, one that is cancelled, and one with more features."""
    expected = [o.token_ids for o in one.generate(PROMPTS, PARAMS)]
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
    if CASE == "adaptive":  # the K of greedy rounds follows their times
        assert llm.metrics.num_lookups > 0 and llm.scheduling.num_waits > 0
    else:
        assert llm.metrics == one.metrics
    first = llm.stream(PROMPTS[1], PARAMS[1])
    tokens = list(next(first).token_ids)
    cancelled = llm.stream(PROMPTS[2], LONG)
    next(cancelled)
    late: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: late.append(llm.generate([PROMPTS[3]], PARAMS[3])[0].token_ids)
    )
    thread.start()
    tokens += [t for increment in first for t in increment.token_ids]
    cancelled.close()  # type: ignore[attr-defined]
    thread.join()
    assert tokens == expected[1] and late == [expected[3]]
    # A seed that is drawn: ranks that differ would show in the state at the end.
    unseeded = SamplingParams(1.0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate([PROMPTS[0]], unseeded)
    assert len(output.token_ids) == 12
    if CASE != "more":
        return
    more = sampling({"everything": ""})
    found, wanted = (each.generate(PROMPTS, more) for each in (llm, one))
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert llm.warmup_for(PROMPTS, PARAMS) > 0
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


def lose() -> None:
    """One process stops, dies or fails in the midst of a text."""
    usual, rounds = ResidentState.round, 0

    def failing(self: ResidentState, *args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if CASE[-1] == RANK and rounds == 4:
            if CASE.startswith("die"):
                os._exit(9)
            if CASE.startswith("fail"):
                raise RuntimeError("no more rounds here")
            os.kill(os.getpid(), signal.SIGSTOP)
        return usual(self, *args)

    ResidentState.round = failing  # type: ignore[method-assign]
    llm = make(True, tensor_parallel_size=2)
    llm.follow()
    print("generating", flush=True)
    llm.generate([PROMPTS[0]], LONG)


def main() -> None:
    if CASE not in ("tokens", "more", "adaptive"):
        lose()
        return
    for drafts in (True, False) if CASE == "more" else (True,):
        llm = make(drafts, tensor_parallel_size=2)
        if llm.follows:
            try:
                llm.generate([PROMPTS[0]])
            except ConfigError as e:
                assert "expected 0, which alone takes requests, got 1" in str(e)
                print("refused", flush=True)
            llm.follow()
        else:
            compare(llm, make(drafts))
            llm.close()
        rows = np.asarray(llm.runner.resident.state.seq_lens)  # both have run the same
        print("speculative" if drafts else "plain", rows.tolist(), flush=True)


if __name__ == "__main__":
    main()
