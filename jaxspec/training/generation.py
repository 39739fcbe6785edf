"""The target writes the training data: its own decode step over many rows, finished rows refilled as they end.

Free-running chats (2406.08464, "Magpie"): the chat template up to where the user speaks is the prompt, the target samples
a user's turn, then answers it. Opened chats are the same with the turn's first words given (jaxspec/training/openings.py).
Prompts of files are answered the same way.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import models
from jaxspec.config import ConfigError, RoundConfig
from jaxspec.decode import prefill
from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.decode.state import DecodeState
from jaxspec.layers.params import Params
from jaxspec.sampling.state import SamplingState
from jaxspec.training.data import Chats, OverlapFilter, pack, token_dtype


@dataclass(frozen=True)
class GenerationConfig:
    """num_slots rows decode together, each up to max_len tokens; a refill prefills prefill_rows of them; steps decode steps a dispatch.

    file_share: of new chats, while prompts from files last; opened_share: of the rest, those whose user's turn has an opening.
    """

    num_slots: int = 1024
    max_len: int = 512
    prefill_rows: int = 128
    steps: int = 16
    block_size: int = 64
    max_user_tokens: int = 160
    max_answer_tokens: int = 320
    greedy_share: float = 0.6
    file_share: float = 0.25
    opened_share: float = 0.5
    temperatures: tuple[float, float] = (0.6, 1.0)
    user_temperatures: tuple[float, float] = (0.8, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_len % self.block_size or self.num_slots % self.prefill_rows:
            raise ConfigError(
                f"generation: expected max_len a multiple of block_size {self.block_size} and num_slots one of prefill_rows "
                f"{self.prefill_rows}, got {self.max_len} and {self.num_slots}"
            )


@dataclass(frozen=True)
class ChatFormat:
    """The target's chat template as token ids: before_user, the user's text, before_answer, the answer, a stop token."""

    before_user: tuple[int, ...]
    before_answer: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatFormat:
        """From jaxspec.loading's Tokenizer, by rendering a chat around a marker."""
        marker = "@@USER@@"
        text = tokenizer.hf.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        if text.count(marker) != 1:
            raise ConfigError(
                "chat template: expected the user's text once in a rendered chat, got another number of times"
            )
        before, after = (
            tuple(tokenizer.hf.encode(part, add_special_tokens=False))
            for part in text.split(marker)
        )
        return cls(before, after, tokenizer.eos_token_ids, tuple(tokenizer.hf.all_special_ids))


@dataclass(frozen=True)
class Request:
    """A prompt (int32 [n]) to continue; is_user: what comes is a user's turn, or the rest of one, to be answered next."""

    prompt: np.ndarray
    temperature: float
    max_tokens: int
    is_user: bool


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


# --- the device side: the project's own prefill and round, over many slots ---------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode_steps(
    cfg: RoundConfig, params: Params, state: DecodeState, block_table: jax.Array, steps: int
) -> tuple[jax.Array, DecodeState]:
    """steps rounds of plain decoding as one program: tokens int32 [batch, steps], -1 where a row was idle, and the state."""

    def step(state: DecodeState, _: None) -> tuple[DecodeState, jax.Array]:
        verification, state = decode.decode_round(cfg, params, state, block_table)
        return state, verification.output_tokens[:, 0]

    state, tokens = lax.scan(step, state, None, length=steps)
    return tokens.T, state


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def admit(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_table: jax.Array,
    slots: jax.Array,
    tokens: jax.Array,
    num_tokens: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    max_tokens: jax.Array,
) -> tuple[jax.Array, DecodeState]:
    """Prefill some slots [rows] (num_slots or more: none) with prompts tokens [rows, width]; the first token of each, -1 for none.

    The cache is paged, so a prefill over these slots' rows of the block table costs what these rows cost, not the batch.
    """
    rows = slots.shape[0]
    zeros = jnp.zeros(rows, jnp.int32)
    pick = lambda x: x.at[slots].get(mode="clip")  # noqa: E731
    sampling = SamplingState(keys, temperature)
    part = dataclasses.replace(
        state,
        seq_lens=zeros,
        next_token=zeros,
        active=jnp.zeros(rows, bool),
        num_generated=zeros,
        max_tokens=max_tokens,
        stop_token_ids=pick(state.stop_token_ids),
        sampling=sampling,
    )
    verification, part = prefill.prefill(
        cfg, params, part, pick(block_table), tokens, zeros, num_tokens, zeros - 1
    )
    put = lambda whole, rows: whole.at[slots].set(rows, mode="drop")  # noqa: E731
    state = dataclasses.replace(
        state,
        target_caches=part.target_caches,
        sampling=dataclasses.replace(
            state.sampling,
            keys=put(state.sampling.keys, keys),
            temperature=put(state.sampling.temperature, temperature),
        ),
        seq_lens=put(state.seq_lens, part.seq_lens),
        next_token=put(state.next_token, part.next_token),
        active=put(state.active, part.active),
        num_generated=put(state.num_generated, part.num_generated),
        max_tokens=put(state.max_tokens, part.max_tokens),
    )
    return verification.output_tokens[:, 0], state


class Generator:
    """The slots: which request each works on, and what it has written. The only state on the host."""

    def __init__(
        self,
        cfg: GenerationConfig,
        target: models.TargetConfig,
        params: Params,
        stop_token_ids: Iterable[int],
        dtype: Any,
    ) -> None:
        self.cfg, self.params = cfg, {"target": params}
        self.round = RoundConfig.of_pair(
            target, block_size=cfg.block_size, max_model_len=cfg.max_len
        )
        pages = cfg.max_len // cfg.block_size
        self.block_table = jnp.arange(cfg.num_slots * pages, dtype=jnp.int32).reshape(
            cfg.num_slots, pages
        )
        zeros = lambda dtype: jnp.zeros(cfg.num_slots, dtype)  # noqa: E731
        sampling = SamplingState(jnp.zeros((cfg.num_slots, 2), jnp.uint32), zeros(jnp.float32))
        stops = jnp.tile(jnp.asarray(list(stop_token_ids), jnp.int32), (cfg.num_slots, 1))
        self.state = decode_state.init_state(
            self.round, sampling, zeros(jnp.int32), stops, cfg.num_slots * pages, dtype
        )
        self.requests: list[Request | None] = [None] * cfg.num_slots
        self.text = np.zeros((cfg.num_slots, cfg.max_len + 1), np.int32)
        self.written = np.zeros(cfg.num_slots, np.int64)
        self.num_admitted = self.num_sampled = 0

    @property
    def idle(self) -> list[int]:
        return [slot for slot, request in enumerate(self.requests) if request is None]

    def refill(self, next_request: Callable[[], Request | None]) -> None:
        """Fill idle slots, prefill_rows at a time, while that many are idle (or nothing runs) and requests come."""
        cfg = self.cfg
        while len(idle := self.idle) >= cfg.prefill_rows:
            group = [
                request for _ in range(cfg.prefill_rows) if (request := next_request()) is not None
            ]
            if not group:
                return
            longest = max(len(request.prompt) for request in group)
            width = next(
                w for w in (64, 256, cfg.max_len) if longest <= w or w == cfg.max_len
            )  # few widths, few compilations
            width = min(width, cfg.max_len)
            tokens = np.zeros((cfg.prefill_rows, width), np.int32)
            num_tokens, max_tokens = (
                np.zeros(cfg.prefill_rows, np.int32),
                np.ones(cfg.prefill_rows, np.int32),
            )
            slots = np.full(cfg.prefill_rows, cfg.num_slots, np.int32)
            temperature = np.zeros(cfg.prefill_rows, np.float32)
            keys = np.zeros((cfg.prefill_rows, 2), np.uint32)
            for row, request in enumerate(group):
                n = len(request.prompt)
                tokens[row, :n], num_tokens[row], slots[row] = request.prompt, n, idle[row]
                max_tokens[row], temperature[row] = (
                    min(request.max_tokens, cfg.max_len - n),
                    request.temperature,
                )
                keys[row] = cfg.seed, self.num_admitted
                self.num_admitted += 1
            first, self.state = admit(
                self.round,
                self.params,
                self.state,
                self.block_table,
                *map(jnp.asarray, (slots, tokens, num_tokens, keys, temperature, max_tokens)),
            )
            first = np.asarray(first)
            for row, request in enumerate(group):
                slot, n = idle[row], len(request.prompt)
                self.requests[slot] = request
                self.text[slot, :n], self.text[slot, n], self.written[slot] = (
                    request.prompt,
                    first[row],
                    n + 1,
                )
            self.num_sampled += len(group)

    def step(self) -> list[tuple[Request, np.ndarray]]:
        """One dispatch of decode steps; the requests that ended, each with its whole token sequence int32."""
        tokens, self.state = decode_steps(
            self.round, self.params, self.state, self.block_table, self.cfg.steps
        )
        tokens, active = jax.device_get((tokens, self.state.active))
        slot, step = np.nonzero(tokens >= 0)  # a row's tokens are a prefix of the dispatch
        self.text[slot, self.written[slot] + step] = tokens[slot, step]
        self.written += (tokens >= 0).sum(axis=1)
        self.num_sampled += len(slot)
        ended = []
        for slot, request in enumerate(self.requests):
            if request is not None and not active[slot]:
                ended.append((request, self.text[slot, : self.written[slot]].copy()))
                self.requests[slot] = None
        return ended


def generate_chats(
    cfg: GenerationConfig,
    target: models.TargetConfig,
    params: Params,
    chat: ChatFormat,
    *,
    dtype: Any,
    deadline: float,
    max_chats: int,
    prompts: Iterable[np.ndarray] = (),
    openings: Sequence[np.ndarray] = (),
    decode_text: Callable[[np.ndarray], str] | None = None,
    overlap: OverlapFilter | None = None,
    log: Callable[[str], None] = print,
) -> tuple[Chats, GenerationReport]:
    """Chats until deadline (time.monotonic) or max_chats: prompts (token ids up to the answer) in turn with opened and free-running ones.

    openings: token ids of the first words of a user's turn. decode_text turns a user's turn into text for the overlap filter.
    A chat that is unfinished at the deadline is left out.
    """
    rng = np.random.default_rng(cfg.seed)
    waiting, given = deque[Request](), deque(prompts)
    generator = Generator(cfg, target, params, chat.stop_token_ids, dtype)
    before_user = np.asarray(chat.before_user, np.int32)
    stops, special = set(chat.stop_token_ids), np.asarray(chat.special_token_ids)
    report, seen = GenerationReport(), set[bytes]()
    sequences: list[np.ndarray] = []
    answer_start: list[int] = []
    temperature: list[float] = []

    def answer(prompt: np.ndarray) -> Request:
        greedy = rng.random() < cfg.greedy_share
        return Request(
            prompt,
            0.0 if greedy else float(rng.uniform(*cfg.temperatures)),
            cfg.max_answer_tokens,
            False,
        )

    def next_request() -> Request | None:
        if waiting:
            return waiting.popleft()
        if given and rng.random() < cfg.file_share:
            report.sources["file"] += 1
            return answer(given.popleft())
        kind, prompt = "free", before_user
        if openings and rng.random() < cfg.opened_share:
            kind, prompt = (
                "opened",
                np.concatenate([before_user, openings[int(rng.integers(len(openings)))]]),
            )
        report.sources[kind] += 1
        return Request(
            prompt, float(rng.uniform(*cfg.user_temperatures)), cfg.max_user_tokens, True
        )

    def take_user_turn(sequence: np.ndarray) -> None:
        turn = sequence[len(before_user) :]
        body = turn[:-1]
        complete = (
            int(turn[-1]) in stops
            and len(body) > 0
            and not np.isin(body, special).any()
            and body.tobytes() not in seen
        )
        if (
            complete
            and overlap is not None
            and decode_text is not None
            and not overlap.admits(decode_text(body))
        ):
            report.removed_by_overlap += 1
        elif complete:
            seen.add(body.tobytes())
            waiting.append(
                answer(
                    np.concatenate([before_user, body, np.asarray(chat.before_answer, np.int32)])
                )
            )
        else:
            report.dropped_user_turns += 1

    start = last_log = time.monotonic()
    while len(sequences) < max_chats and time.monotonic() < deadline:
        generator.refill(next_request)
        for request, sequence in generator.step():
            if request.is_user:
                take_user_turn(sequence)
            else:
                sequences.append(sequence.astype(token_dtype(target.vocab_size)))
                answer_start.append(len(request.prompt))
                temperature.append(request.temperature)
        now = time.monotonic()
        if now - last_log > 15:
            last_log = now
            rate = generator.num_sampled / (now - start)
            log(
                f"generate: {now - start:5.0f} s  {len(sequences)} chats  {generator.num_sampled} tokens  {rate:.0f} tokens/s"
            )
    chats = pack(sequences, answer_start, temperature, token_dtype(target.vocab_size))
    report.seconds = time.monotonic() - start
    return chats, dataclasses.replace(
        report,
        num_chats=len(chats),
        num_answer_tokens=chats.num_answer_tokens,
        num_sampled_tokens=generator.num_sampled,
    )
