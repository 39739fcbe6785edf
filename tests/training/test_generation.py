"""Generated chats are what plain decoding writes, whichever slot and neighbours a request had."""

from __future__ import annotations

import dataclasses
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
    ChatWriter,
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
    return ChatTarget("tiny", pair.target_cfg, pair.target, CHAT, HashedWords(VOCAB), ())


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


def test_a_chat_of_several_turns_is_kept_once_up_to_its_last_answer(pair: Pair) -> None:
    cfg = dataclasses.replace(CFG, max_len=40, chat_turns=4, max_user_tokens=6)
    chat = dataclasses.replace(CHAT, before_next_user=(4, 5))
    target = dataclasses.replace(chat_target(pair), chat=chat)

    def write(turns: list[list[int]], most: int) -> tuple[ChatWriter, list[Turn]]:
        """A chat of at most `most` turns, whose target writes these."""
        writer, seen = ChatWriter(cfg, target), []
        turn = dataclasses.replace(writer.next_turn(), turns_left=most - 1)
        for written in turns:
            seen.append(turn)
            writer.take(turn, np.asarray([*turn.prompt, *written], np.int32))
            turn = writer.next_turn()
        return writer, seen

    first, second = [11, 12, 2], [13, 14, 15, 2]  # a user's turn and an answer
    again, last = [16, 2], [17, 18, 2]
    whole = [1, 4, 5, 11, 12, 2, 6, 7, *second, 4, 5, 16, 2, 6, 7, *last]
    writer, seen = write([first, second, again, last], most=2)
    assert [turn.is_user for turn in seen] == [True, False, True, False]
    assert [sequence.tolist() for sequence in writer.sequences] == [whole]
    assert writer.chats.answer_start.tolist() == [8]
    assert writer.chats.temperature.tolist() == [np.float32(seen[1].temperature)]

    cut_short = whole[: 8 + len(second)]
    for case in (
        [first, second, [16, 16, 16]],  # a user's turn without an end
        [first, second, first],  # and one that is known
        [first, second, [1, 2]],  # and one with a special token
    ):
        writer, _ = write(case, most=3)
        assert [sequence.tolist() for sequence in writer.sequences] == [cut_short]
        assert writer.chats.answer_start.tolist() == [8]
    writer, _ = write([first, second], most=1)
    assert [sequence.tolist() for sequence in writer.sequences] == [cut_short]
    writer, _ = write([first, [13] * 9], most=3)  # an answer that was cut
    assert len(writer.sequences) == 1 and len(writer.sequences[0]) == 17
    long_answer = [13] * 24 + [2]  # no room for another turn
    writer, _ = write([first, long_answer], most=3)
    assert len(writer.sequences) == 1 and len(writer.sequences[0]) == 33


def test_chats_have_as_many_turns_as_are_drawn(pair: Pair) -> None:
    writer = ChatWriter(dataclasses.replace(CFG, chat_turns=3), chat_target(pair))
    assert {writer.next_turn().turns_left for _ in range(40)} == {0, 1, 2}
    assert {ChatWriter(CFG, chat_target(pair)).next_turn().turns_left for _ in range(9)} == {0}
    with pytest.raises(ConfigError, match="expected chat_turns from 1"):
        dataclasses.replace(CFG, chat_turns=0)


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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), jax.errors.JaxRuntimeError("launch")])
def test_finished_chats_are_kept_if_the_writing_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    kept: list[tuple[Chats, GenerationReport]] = []
    lines: list[str] = []
    step = Generator.step

    def failing(generator: Generator) -> list[tuple[Turn, np.ndarray]]:
        if generator.num_sampled > 60:
            raise error
        return step(generator)

    monkeypatch.setattr(Generator, "step", failing)
    with pytest.raises(type(error)):
        generate_chats(
            dataclasses.replace(CFG, file_share=1.0),
            chat_target(pair),
            deadline=far(),
            max_chats=10**6,
            prompts=[np.asarray([1, 4, 5, 9, 2, 6, 7], np.int32)] * 99,
            log=lines.append,
            keep=lambda *found: kept.append(found),
        )
    [(chats, report)] = kept
    assert len(chats) == report.num_chats > 0 and report.num_sampled_tokens > 60
    assert lines[-1] == (
        f"generate: {type(error).__name__} after {len(chats)} chats, which are kept"
    )


def test_an_opening_that_fills_the_turn_is_refused(pair: Pair) -> None:
    """Three tokens come before a user's turn of up to 32."""
    ChatWriter(CFG, chat_target(pair), openings=[np.arange(28), np.arange(2)])
    with pytest.raises(ConfigError, match="^max_len: expected more than 32, .* got 32$"):
        ChatWriter(CFG, chat_target(pair), openings=[np.arange(29), np.arange(2)])


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected max_len a multiple of block_size 64"):
        GenerationConfig(max_len=100)
