"""Run one LLM with two replicas, of a device or of two each, and compare with one device.

    python -m tests.parallel.replicas_on_devices TENSOR_PARALLEL_SIZE

Prints the name of each check that has passed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.engine.runner import ModelRunner
from tests.parallel.engines_on_devices import PROMPTS, all_sampled, sampling
from tests.parallel.tiny_pair import make_llm
from tests.support.compilations import counting_compilations
from tests.support.tiny import tiny_model

SIZE = int(sys.argv[1])
MODEL = tiny_model("eagle3", mapped=True)
PARAMS = sampling({}) if SIZE > 1 else all_sampled(sampling({}))
Tokens = list[list[int]]


def make(**config: Any) -> LLM:
    sizes: dict[str, Any] = dict(max_num_seqs=2, batch_buckets=(2,), num_gpu_blocks_override=20)
    return make_llm(MODEL, **(sizes | config))


def rounds_of_each(llm: LLM) -> list[int]:
    """Count the rounds that each replica runs from here on."""
    counts = [0] * len(llm.engines)
    for i, engine in enumerate(llm.engines):

        def count(*_: object, i: int = i) -> None:
            counts[i] += 1

        engine.on_rounds = count
    return counts


def all_free(llm: LLM) -> bool:
    groups = [group for engine in llm.engines for group in engine.scheduler.groups]
    free = all(group.pool.num_free == group.pool.num_blocks for group in groups)
    return free and not llm.serving.has_requests


def weights_are_copies(one: LLM, llm: LLM, expected: Tokens) -> None:
    first, second = (jax.tree.leaves(weights) for weights in llm.weights)
    states = [engine.runner.resident.state for engine in llm.engines]
    owners = [{d.id for d in state.next_token.devices()} for state in states]
    assert owners == [set(range(SIZE)), set(range(SIZE, 2 * SIZE))], owners
    for mine, other in zip(first, second, strict=True):
        assert {d.id for d in other.devices()} == owners[1]
        assert mine.sharding.spec == other.sharding.spec
        for piece, same in zip(mine.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(piece.data, same.data)
    assert len(set(map(id, first))) == len(set(map(id, second)))  # what is shared is shared again
    again = llm.on_same_weights(max_num_seqs=1, batch_buckets=(1,))
    assert again.weights[1]["target"] is llm.weights[1]["target"]
    assert "2 replicas" in llm.describe()


def tokens_and_counts_are_those_of_one_device(one: LLM, llm: LLM, expected: Tokens) -> None:
    counts = rounds_of_each(llm)
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
    assert min(counts) > 0.25 * sum(counts), counts
    assert llm.metrics == one.metrics
    assert llm.timings.num_output_tokens == one.timings.num_output_tokens
    assert llm.latency.num_requests == len(PROMPTS)
    assert all_free(llm)


def pools_are_those_of_the_least_memory(one: LLM, llm: LLM, expected: Tokens) -> None:
    sized = make(data_parallel_size=2, tensor_parallel_size=SIZE, num_gpu_blocks_override=None)
    memories: list[Any] = [engine.runner.memory for engine in sized.engines]
    memories[1]._free_bytes = lambda: (23 * sum(memories[1].block_bytes), "a test")
    assert [memory.num_blocks for memory in memories] == [(23,), (23,)]


def nothing_compiles_after_warmup(one: LLM, llm: LLM, expected: Tokens) -> None:
    again = [o.token_ids for o in one.generate(PROMPTS, PARAMS)]
    assert again == expected
    assert llm.warmup_for(PROMPTS, PARAMS) > 0
    with counting_compilations() as compiled:
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
    assert not compiled, compiled


def calls_of_threads_have_their_own_tokens(one: LLM, llm: LLM, expected: Tokens) -> None:
    errors: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            for i in np.random.default_rng(seed).permutation(len(PROMPTS)):
                stream = llm.stream(PROMPTS[i], PARAMS[i])
                if (i + seed) % 4 == 0:
                    next(stream)
                    stream.close()  # type: ignore[attr-defined]
                    continue
                assert [t for part in stream for t in part.token_ids] == expected[i]
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all_free(llm)


def a_fault_in_one_request_ends_it_alone(one: LLM, llm: LLM, expected: Tokens) -> None:
    usual = ModelRunner.round

    def failing(self: Any, features: Any, requests: Any, **more: Any) -> Any:
        if any(request.prompt_token_ids == PROMPTS[2] for request in requests):
            raise ValueError("the victim's")
        return usual(self, features, requests, **more)

    ModelRunner.round = failing  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, PARAMS)
    ModelRunner.round = usual  # type: ignore[method-assign]
    for i, output in enumerate(outputs):
        if i == 2:
            assert output.finish_reason == "error" and str(output.error) == "the victim's"
        else:
            assert output.error is None and output.token_ids == expected[i]
    assert all_free(llm)


def a_preempted_request_goes_on(one: LLM, llm: LLM, expected: Tokens) -> None:
    params = [SamplingParams(1.0, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    prompts = [[i + 1] * 20 for i in range(4)]
    found = [o.token_ids for o in llm.generate(prompts, params)]
    assert llm.scheduling.num_preemptions > 0
    assert found == [o.token_ids for o in one.generate(prompts, params)]


CHECKS: tuple[Callable[[LLM, LLM, Tokens], None], ...] = (
    tokens_and_counts_are_those_of_one_device,
    weights_are_copies,
    pools_are_those_of_the_least_memory,
    nothing_compiles_after_warmup,
    calls_of_threads_have_their_own_tokens,
    a_fault_in_one_request_ends_it_alone,
    a_preempted_request_goes_on,
)


def main() -> None:
    one, llm = make(), make(data_parallel_size=2, tensor_parallel_size=SIZE)
    expected = [o.token_ids for o in one.generate(PROMPTS, PARAMS)]
    for check in CHECKS:
        check(one, llm, expected)
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
