"""Play the rounds of test_distribution.py on two devices, each with half of the vocabulary.

    python -m tests.decode.distribution_on_devices CASE...

Prints a line for each case: its trials, the number of positions that do not follow the target, and
whether the first tokens do together. "own noise" and "swapped shards" play devices that make this
mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxspec import drafts, models
from jaxspec.config import RoundConfig
from jaxspec.decode.round import decode_round
from pallas_kernels.vocab_shards import VocabShards
from tests.decode.test_distribution import K, Trials, V, biased_steps, joint_statistic, play
from tests.support import toys
from tests.support.statistics import within_limit
from tests.support.toys import ToyDraft, toy_config

SHARDS = VocabShards("model", 2)
CUT, WHOLE = PartitionSpec(None, "model"), PartitionSpec()


def on_two_devices(cfg: RoundConfig, cut: PartitionSpec = CUT) -> Callable[..., Any]:
    """Return the program of a round in which each device has half of every table's columns."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))

    def one_round(params: Any, state: Any, tables: Any) -> Any:
        return decode_round(replace(cfg, vocab_shards=SHARDS), params, state, tables)

    def program(params: Any, state: Any, tables: Any) -> Any:
        specs = jax.tree.map(lambda _: WHOLE, params)
        for model in specs.values():
            model["table"] = cut
        mapped = jax.shard_map(
            one_round, mesh=mesh, in_specs=(specs, WHOLE, WHOLE), out_specs=WHOLE, check_vma=False
        )
        return mapped(params, state, tables)

    return jax.jit(program)


def own_noise(shards: VocabShards, size: int) -> Any:
    """As VocabShards.ids, but numbered on each device anew: both draw the same noise."""
    return jax.numpy.arange(size, dtype=jax.numpy.int32)


def main() -> None:
    models.FAMILIES.update(toys.TARGET_FAMILIES)  # type: ignore[arg-type]
    drafts.FAMILIES.update(toys.DRAFT_FAMILIES)  # type: ignore[arg-type]
    mapped = ToyDraft(V, own_vocab_size=V * 3 // 4)
    cases = {
        "strict": (toy_config(V, K, "strict"), "independent", 0.6, 1),
        "probabilistic": (toy_config(V, K), "negative", 0.6, 1),
        "mapped": (toy_config(V, K, draft=mapped), "independent", 1.0, 1),
        "block": (toy_config(V, K, "block"), "alike", 1.0, 4),
    }
    for name in sys.argv[1:]:
        if name in MISTAKES:
            biased = biased_steps(MISTAKES[name](toy_config(V, K)), "independent", 1.0)
            print(name, len(biased), flush=True)
            continue
        cfg, chain, temperature, rounds = cases[name]
        played = play(cfg, chain, temperature, rounds, program=on_two_devices(cfg))
        statistic = joint_statistic(played, chain, temperature) if rounds > 1 else (0.0, 1)
        biased = len(biased_steps(played, chain, temperature))
        print(name, played.counts.shape[1], biased, within_limit(*statistic), flush=True)


def with_own_noise(cfg: RoundConfig) -> Trials:
    ids = VocabShards.ids
    VocabShards.ids = own_noise  # type: ignore[method-assign]
    wrong = play(cfg, "independent", 1.0, 1, program=on_two_devices(cfg))
    VocabShards.ids = ids  # type: ignore[method-assign]
    return wrong


def with_swapped_shards(cfg: RoundConfig) -> Trials:
    """Each device has the logits of the other one's tokens."""
    half = np.roll(np.arange(V), V // 2)
    swapped = on_two_devices(cfg)

    def swap(params: Any, state: Any, tables: Any) -> Any:
        target = {"table": params["target"]["table"][:, half]}
        return swapped(params | {"target": target}, state, tables)

    return play(cfg, "independent", 1.0, 1, program=swap)


MISTAKES = {"own noise": with_own_noise, "swapped shards": with_swapped_shards}


if __name__ == "__main__":
    main()
