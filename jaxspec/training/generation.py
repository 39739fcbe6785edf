"""The target writes the training data: turns of chats in the engine's slots, refilled as they end.

Free-running chats (2406.08464, "Magpie"): the chat template up to where the user speaks is the
prompt. The target samples a user's turn, then answers it. Opened chats are the same with the turn's
first words given (jaxspec/training/openings.py). Prompts of files are answered the same way.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxspec import models
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.config.settings import setting
from jaxspec.engine.request import Request
from jaxspec.layers.params import Params
from jaxspec.llm import LLM
from jaxspec.sampling.params import SamplingParams
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.data import Chats, OverlapFilter, pack, token_dtype

PREFILL_TOKENS = 64  # tokens of a prefill call for each slot: most turns fit into one call
LOG_SECONDS = 15.0


@dataclass(frozen=True)
class GenerationConfig:
    """How chats are generated.

    num_slots:    turns that decode together, each up to max_len tokens
    prefill_rows: slots that are refilled together, once so many are idle
    steps:        decode steps of one dispatched program
    greedy_share: share of the answers that are greedy
    file_share:   share of new chats that begin with a prompt of a file, while these last
    chat_turns:   turns of a chat at most, each chat's number drawn; a further turn's user text is
                  written by the target too, and counts as part of the answer
    opened_share: share of the other chats whose user's turn has an opening
    temperatures, user_temperatures: (lowest, highest) of sampled answers and of users' turns
    seed:         of all draws, below 2**32
    """

    num_slots: int = setting(1024, "Turns that decode together.")
    max_len: int = setting(512, "Tokens of a turn with its chat, at most.")
    prefill_rows: int = setting(128, "Slots that are refilled together.")
    steps: int = 16
    block_size: int = 64
    max_user_tokens: int = setting(160, "Tokens of a user's turn, at most.")
    max_answer_tokens: int = setting(320, "Tokens of an answer, at most.")
    greedy_share: float = setting(
        0.6, "Share of answers decoded greedily; the rest at temperatures 0.6 to 1."
    )
    file_share: float = setting(
        0.25, "Share of new chats that begin with a prompt of --prompts, while these last."
    )
    chat_turns: int = setting(1, "Turns of a chat, at most: more make long chats.")
    opened_share: float = setting(
        0.5, "Share of user's turns that begin with one of jaxspec's openings."
    )
    temperatures: tuple[float, float] = (0.6, 1.0)
    user_temperatures: tuple[float, float] = (0.8, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chat_turns < 1 or not 0 <= self.file_share <= 1:
            raise ConfigError(
                "generation: expected chat_turns from 1 and a file_share from 0 to 1, "
                f"got {self.chat_turns} and {self.file_share}"
            )
        if self.max_len % self.block_size or self.num_slots % self.prefill_rows:
            raise ConfigError(
                f"generation: expected max_len a multiple of block_size {self.block_size} and "
                f"num_slots one of prefill_rows {self.prefill_rows}, got {self.max_len} and "
                f"{self.num_slots}"
            )

    @property
    def engine(self) -> EngineConfig:
        """Settings of the engine that the turns run in."""
        pages = self.max_len // self.block_size
        return EngineConfig(
            max_model_len=self.max_len,
            max_num_seqs=self.num_slots,
            batch_buckets=(self.num_slots,),
            block_size=self.block_size,
            max_num_batched_tokens=self.num_slots * PREFILL_TOKENS,
            rounds_per_step=self.steps,
            # A block more than a turn fills: admission keeps one free for each that runs.
            num_gpu_blocks_override=self.num_slots * (pages + 1),
            enable_prefix_caching=False,
        )


@dataclass(frozen=True)
class Answered:
    """The finished part of a chat that goes on.

    answer_start: where its first answer begins
    length:       tokens up to the end of its last answer
    temperature:  of the first answer
    """

    answer_start: int
    length: int
    temperature: float


@dataclass(frozen=True)
class Turn:
    """A part of a chat to generate: a user's turn, or the rest of one, or an answer.

    prompt:     int32 [n], the tokens to continue
    is_user:    whether an answer to the turn follows
    begin:      where the text of a user's turn begins in the prompt
    chat:       the chat's turns before this one; None in its first turn
    turns_left: turns that the chat may have behind this one
    """

    prompt: np.ndarray
    temperature: float
    max_tokens: int
    is_user: bool
    begin: int = 0
    chat: Answered | None = None
    turns_left: int = 0


@dataclass
class GenerationReport:
    """Counts for the head's card."""

    num_chats: int = 0
    num_answer_tokens: int = 0
    num_sampled_tokens: int = 0
    dropped_user_turns: int = 0
    removed_by_overlap: int = 0
    seconds: float = 0.0
    sources: dict[str, int] = field(default_factory=lambda: {"file": 0, "opened": 0, "free": 0})

    @property
    def tokens_per_second(self) -> float:
        return self.num_sampled_tokens / max(self.seconds, 1e-9)


class Generator:
    """Turns in slots: each runs in the engine until it ends, and leaves its slot to another.

    Turns are handed back in the order of their slots, whichever round of a step each ended in. With
    a seed for each turn, the data of a seed then depends on the tokens alone.

    An H100 takes 3.1 ms for a round of 1,024 full slots of SmolLM2-135M, 3 us a token. The host's
    work to schedule, admit and hand out overlaps with it, and takes longer
    (docs/notes/many-requests-on-the-host.md).
    """

    def __init__(
        self,
        cfg: GenerationConfig,
        target: models.TargetConfig,
        params: Params,
        stop_token_ids: Iterable[int],
        dtype: jax.typing.DTypeLike,
    ) -> None:
        self.cfg = cfg
        self.llm = LLM(
            (target, params), eos_token_ids=tuple(stop_token_ids), config=cfg.engine, dtype=dtype
        )
        self._slots: list[tuple[Turn, Request] | None] = [None] * cfg.num_slots
        self._num_started = 0

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return self.llm.timings.num_output_tokens

    def refill(self, next_turn: Callable[[], Turn | None]) -> None:
        """Start turns in idle slots, prefill_rows at a time, while so many are idle."""
        rows = self.cfg.prefill_rows
        idle = [i for i, running in enumerate(self._slots) if running is None]
        for slot in idle[: len(idle) // rows * rows]:
            turn = next_turn()
            if turn is None:
                return
            self._start(slot, turn)

    def _start(self, slot: int, turn: Turn) -> None:
        seed = (self.cfg.seed << 32) + self._num_started
        self._num_started += 1
        params = SamplingParams(turn.temperature, max_tokens=turn.max_tokens, seed=seed)
        [request] = self.llm.make_requests([turn.prompt.tolist()], params)
        self._slots[slot] = turn, request
        self.llm.engine.add(request)

    def step(self) -> list[tuple[Turn, np.ndarray]]:
        """Run one step: the turns that ended, each with its whole token sequence int32."""
        self.llm.engine.step()
        ended = []
        for slot, running in enumerate(self._slots):
            if running is not None and running[1].finish_reason is not None:
                turn, request = running
                ended.append((turn, np.asarray(request.all_token_ids, np.int32)))
                self._slots[slot] = None
        return ended


class ChatWriter:
    """The chats of a run: chooses the next turn, and collects what finished turns become.

    prompts: token ids up to the answer, from files. openings: token ids of the first words of a
    user's turn. overlap: refuses users' turns that overlap prompts which are kept out.
    """

    def __init__(
        self,
        cfg: GenerationConfig,
        target: ChatTarget,
        *,
        prompts: Iterable[np.ndarray] = (),
        openings: Sequence[np.ndarray] = (),
        overlap: OverlapFilter | None = None,
    ) -> None:
        self.cfg, self.target, self.openings, self.overlap = cfg, target, openings, overlap
        self.report = GenerationReport()
        self.sequences: list[np.ndarray] = []
        self._answer_start: list[int] = []
        self._temperature: list[float] = []
        self._rng = np.random.default_rng(cfg.seed)
        self._waiting, self._prompts = deque[Turn](), deque(prompts)
        self._seen: set[bytes] = set()
        self._before_user = np.asarray(target.chat.before_user, np.int32)
        self._before_answer = np.asarray(target.chat.before_answer, np.int32)
        longest = len(self._before_user) + max(map(len, openings), default=0)
        if longest >= cfg.max_len:
            raise ConfigError(
                f"max_len: expected more than {longest}, the tokens before a user's turn with the "
                f"longest opening, got {cfg.max_len}"
            )

    @property
    def chats(self) -> Chats:
        """All finished chats."""
        dtype = token_dtype(self.target.cfg.vocab_size)
        return pack(self.sequences, self._answer_start, self._temperature, dtype)

    def next_turn(self) -> Turn:
        """A turn of a chat that goes on; else a prompt of a file, or a user's first turn."""
        cfg, rng = self.cfg, self._rng
        if self._waiting:
            return self._waiting.popleft()
        turns_left = int(rng.integers(cfg.chat_turns)) if cfg.chat_turns > 1 else 0
        if self._prompts and rng.random() < cfg.file_share:
            self.report.sources["file"] += 1
            return self._answer(self._prompts.popleft(), None, turns_left)
        kind, prompt = "free", self._before_user
        if self.openings and rng.random() < cfg.opened_share:
            opening = self.openings[int(rng.integers(len(self.openings)))]
            kind, prompt = "opened", np.concatenate([self._before_user, opening])
        self.report.sources[kind] += 1
        return self._user_turn(prompt, len(self._before_user), None, turns_left)

    def take(self, turn: Turn, sequence: np.ndarray) -> None:
        """Take a finished turn: an answer ends a chat, a complete user's turn gets an answer."""
        if turn.is_user:
            self._take_user_turn(turn, sequence)
            return
        first = turn.chat or Answered(len(turn.prompt), 0, turn.temperature)
        chat = dataclasses.replace(first, length=len(sequence))
        between = self.target.chat.before_next_user
        ended = int(sequence[-1]) in self.target.chat.stop_token_ids
        if turn.turns_left and between is not None and ended:
            prompt = np.concatenate([sequence, np.asarray(between, np.int32)])
            if len(prompt) + self.cfg.max_user_tokens < self.cfg.max_len:
                self._waiting.append(
                    self._user_turn(prompt, len(prompt), chat, turn.turns_left - 1)
                )
                return
        self._finish(sequence, chat)

    def _finish(self, sequence: np.ndarray, chat: Answered) -> None:
        """Keep a chat without what follows its last answer."""
        dtype = token_dtype(self.target.cfg.vocab_size)
        self.sequences.append(sequence[: chat.length].astype(dtype))
        self._answer_start.append(chat.answer_start)
        self._temperature.append(chat.temperature)

    def _user_turn(
        self, prompt: np.ndarray, begin: int, chat: Answered | None, turns_left: int
    ) -> Turn:
        cfg = self.cfg
        return Turn(
            prompt,
            float(self._rng.uniform(*cfg.user_temperatures)),
            cfg.max_user_tokens,
            is_user=True,
            begin=begin,
            chat=chat,
            turns_left=turns_left,
        )

    def _answer(self, prompt: np.ndarray, chat: Answered | None, turns_left: int) -> Turn:
        cfg, rng = self.cfg, self._rng
        greedy = rng.random() < cfg.greedy_share
        return Turn(
            prompt,
            0.0 if greedy else float(rng.uniform(*cfg.temperatures)),
            cfg.max_answer_tokens,
            is_user=False,
            chat=chat,
            turns_left=turns_left,
        )

    def _take_user_turn(self, turn: Turn, sequence: np.ndarray) -> None:
        tokens, chat = sequence[turn.begin :], self.target.chat
        body = tokens[:-1]
        prompt = np.concatenate([sequence[: turn.begin], body, self._before_answer])
        complete = (
            int(tokens[-1]) in chat.stop_token_ids
            and len(body) > 0
            and len(prompt) < self.cfg.max_len
            and not np.isin(body, chat.special_token_ids).any()
            and body.tobytes() not in self._seen
        )
        if not complete:
            self.report.dropped_user_turns += 1
            self._end(turn, sequence)
        elif self.overlap is not None and not self.overlap.admits(self.target.words.decode(body)):
            self.report.removed_by_overlap += 1
            self._end(turn, sequence)
        else:
            self._seen.add(body.tobytes())
            self._waiting.append(self._answer(prompt, turn.chat, turn.turns_left))

    def _end(self, turn: Turn, sequence: np.ndarray) -> None:
        """Keep the turns before a user's turn that nothing answers, if there are any."""
        if turn.chat is not None:
            self._finish(sequence, turn.chat)


def generate_chats(
    cfg: GenerationConfig,
    target: ChatTarget,
    *,
    deadline: float,
    max_chats: int,
    prompts: Iterable[np.ndarray] = (),
    openings: Sequence[np.ndarray] = (),
    overlap: OverlapFilter | None = None,
    log: Callable[[str], None] = print,
    keep: Callable[[Chats, GenerationReport], None] | None = None,
) -> tuple[Chats, GenerationReport]:
    """Generate chats until deadline (time.monotonic) or max_chats.

    prompts, openings, overlap: see ChatWriter. Chats that begin with a prompt alternate with opened
    and free-running ones. A chat that is unfinished at the end is left out.

    keep: gets the finished chats if an error or Ctrl-C ends the writing, which is then raised
    """
    writer = ChatWriter(cfg, target, prompts=prompts, openings=openings, overlap=overlap)
    generator = Generator(cfg, target.cfg, target.params, target.chat.stop_token_ids, target.dtype)
    start = last_log = time.monotonic()

    def finished() -> tuple[Chats, GenerationReport]:
        chats = writer.chats
        return chats, dataclasses.replace(
            writer.report,
            seconds=time.monotonic() - start,
            num_chats=len(chats),
            num_answer_tokens=chats.num_answer_tokens,
            num_sampled_tokens=generator.num_sampled,
        )

    try:
        while len(writer.sequences) < max_chats and time.monotonic() < deadline:
            generator.refill(writer.next_turn)
            for turn, sequence in generator.step():
                writer.take(turn, sequence)
            now = time.monotonic()
            if now - last_log > LOG_SECONDS:
                last_log, count = now, generator.num_sampled
                log(
                    f"generate: {now - start:5.0f} s  {len(writer.sequences)} chats  "
                    f"{count} tokens  {count / (now - start):.0f} tokens/s"
                )
    except BaseException as e:
        if keep is not None and writer.sequences:
            log(f"generate: {type(e).__name__} after {len(writer.sequences)} chats, which are kept")
            try:
                keep(*finished())
            except Exception as failure:  # raised beside what ended the writing
                log(f"generate: the chats could not be kept: {failure}")
        raise
    return finished()
