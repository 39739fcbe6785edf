"""Generated chats are what plain decoding writes, whichever slot and neighbours a request had."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import REFERENCE_OPS, ConfigError
from jaxspec.training.chat_target import ChatFormat, ChatTarget
from jaxspec.training.data import Chats, OverlapFilter
from jaxspec.training.dry_run import HashedWords
from jaxspec.training.generation import (
    GenerationConfig,
    GenerationReport,
    Generator,
    Turn,
    generate_chats,
)
from jaxspec.training.target import target_states
from tests.training.conftest import VOCAB, Pair

CFG = GenerationConfig(
    num_slots=4,
    max_len=32,
    prefill_rows=2,
    steps=3,
    block_size=8,
    max_user_tokens=6,
    max_answer_tokens=9,
)
CHAT = ChatFormat(
    before_user=(1, 4, 5), before_answer=(2, 6, 7), stop_token_ids=(2,), special_token_ids=(0, 1, 2)
)


def chat_target(pair: Pair) -> ChatTarget:
    return ChatTarget("tiny", pair.target_cfg, pair.target, CHAT, HashedWords(VOCAB))


def far() -> float:
    return time.monotonic() + 1e6


def test_greedy_answers_equal_the_argmax_of_the_whole_sequence(pair: Pair) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Turn(rng.integers(3, VOCAB, n).astype(np.int32), 0.0, CFG.max_answer_tokens, False)
        for n in (1, 3, 7, 8, 9, 15, 16, 26)
    ]
    generator = Generator(CFG, pair.target_cfg, pair.target, [2], jnp.float32)
    queue, ended = list(requests), []
    while len(ended) < len(requests):
        generator.refill(lambda: queue.pop(0) if queue else None)
        ended += generator.step()
    assert {id(request) for request, _ in ended} == {id(request) for request in requests}
    forward = jax.jit(
        lambda tokens, length: target_states(pair.target, pair.target_cfg, tokens, length, ())[0]
    )
    for request, sequence in ended:
        prompt, n = request.prompt, len(request.prompt)
        assert sequence[:n].tolist() == prompt.tolist()
        padded = jnp.zeros((1, CFG.max_len), jnp.int32).at[0, : len(sequence)].set(sequence)
        hidden = forward(padded, jnp.asarray([len(sequence)], jnp.int32))
        logits = models.family(pair.target_cfg).logits(
            pair.target, pair.target_cfg, hidden, REFERENCE_OPS
        )
        assert (
            sequence[n:].tolist()
            == np.argmax(logits[0], axis=-1)[n - 1 : len(sequence) - 1].tolist()
        )
        stopped = sequence[-1] == 2
        assert 2 not in sequence[n:-1] and (
            stopped or len(sequence) == min(n + CFG.max_answer_tokens, CFG.max_len)
        )


def test_free_running_chats_follow_the_template(pair: Pair) -> None:
    given = [np.asarray([1, 4, 5, 9, 10, 2, 6, 7], np.int32)]
    chats, report = generate_chats(
        CFG,
        chat_target(pair),
        deadline=far(),
        max_chats=12,
        prompts=given,
        log=lambda line: None,
    )
    assert (
        len(chats) >= 12
        and report.num_chats == len(chats)
        and report.num_answer_tokens == chats.num_answer_tokens
    )
    assert report.num_sampled_tokens >= chats.num_answer_tokens and report.sources["free"] > 0
    turns = set()
    for i, start in enumerate(chats.answer_start):
        sequence = chats.sequence(i).tolist()
        assert sequence[:3] == [1, 4, 5] and sequence[start - 3 : start] == [2, 6, 7]
        turn = tuple(sequence[3 : start - 3])
        assert turn and not {0, 1, 2} & set(turn) and turn not in turns
        turns.add(turn)
        assert 0 < len(sequence) - start <= CFG.max_answer_tokens and 2 not in sequence[start:-1]
    assert (9, 10) in turns
    assert {0.0} < set(chats.temperature.tolist()) and (chats.temperature <= 1).all()


def test_a_user_turn_that_overlaps_the_evaluation_set_is_not_answered(pair: Pair) -> None:
    def run(overlap: OverlapFilter | None) -> tuple[Chats, GenerationReport]:
        return generate_chats(
            CFG,
            chat_target(pair),
            deadline=far(),
            max_chats=6,
            overlap=overlap,
            log=lambda line: None,
        )

    free, _ = run(None)
    banned = free.sequence(0)[3 : free.answer_start[0] - 3]
    chats, report = run(OverlapFilter([" ".join(map(str, banned))], n=len(banned)))
    assert report.removed_by_overlap >= 1

    def text(i: int) -> str:
        return f" {' '.join(map(str, chats.sequence(i)[3 : chats.answer_start[i] - 3]))} "

    assert not any(f" {' '.join(map(str, banned))} " in text(i) for i in range(len(chats)))


def test_generation_ends_at_the_deadline(pair: Pair) -> None:
    chats, _ = generate_chats(
        CFG,
        chat_target(pair),
        deadline=time.monotonic() - 1,
        max_chats=10,
        log=lambda line: None,
    )
    assert len(chats) == 0


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected max_len a multiple of block_size 64"):
        GenerationConfig(max_len=100)
