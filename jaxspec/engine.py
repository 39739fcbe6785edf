"""The engine: tokenise, batch, run rounds, detokenise. The only place with a Python loop over rounds."""

from __future__ import annotations

import contextlib
import logging
import numbers
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode, kernels, synthetic
from jaxspec.config import CacheGroup, ConfigError, EngineConfig, RoundConfig, SpeculativeConfig
from jaxspec.decode import DecodeState
from jaxspec.loading import Tokenizer, load_tokenizer, resolve
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.tokenizer import eos_token_ids, has_tokenizer
from jaxspec.metrics import SpecDecodeMetrics, Timings
from jaxspec.params import Params
from jaxspec.sampling import SamplingState
from jaxspec.sampling_params import SamplingParams
from jaxspec.verify import Verification

logger = logging.getLogger(__name__)

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]  # the last: vLLM's {"prompt": ...}, {"prompt_token_ids": ...}
MIN_PAGES_TOKENS = 128  # page tables are bucketed in powers of two from here up: attention reads all of a table
MIN_CHUNK = 16
MIN_STOPS = 4
GRAPHS_BELOW_BYTES = 4 << 30  # a target whose round lasts longer than the host takes to launch its kernels does without CUDA graphs
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass
class RequestOutput:
    """One request's result. token_ids: what was generated, the stop token included; text: without special tokens;
    finish_reason: "stop" (an end-of-text or stop token) or "length"."""

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: SpecDecodeMetrics


@dataclass
class _Request:
    """A request while it runs."""

    prompt: Prompt
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    metrics: SpecDecodeMetrics
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Take over a round's tokens up to where the request ends; what lies past that is dropped."""
        for token in tokens:
            self.token_ids.append(int(token))
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return


@dataclass(frozen=True)
class _Shape:
    """The bucket that a batch runs in; one set of compiled programs each (and per RoundConfig)."""

    batch: int
    pages: int
    chunk: int
    stops: int


class LLM:
    """A target, perhaps with a draft, that turns prompts into text.

    >>> llm = LLM.from_pretrained(speculative=SpeculativeConfig(model="smollm2-135m-instruct-eagle3"))
    >>> llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0))[0].text  # doctest: +SKIP

    metrics sums up the drafts' acceptance over all requests so far, timings the wall clock.
    """

    def __init__(
        self,
        target: tuple[Any, Params],
        draft: tuple[Any, Params] | None = None,
        speculative: SpeculativeConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
        config: EngineConfig | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """From loaded (config, params) pairs; from_pretrained is the usual way in. draft and speculative go together.

        Without a tokenizer prompts are token ids and texts stay empty. eos_token_ids: None for the tokenizer's.
        """
        if (draft is None) != (speculative is None):
            raise ConfigError("draft and speculative: expected both or neither")
        self.config = config or EngineConfig()
        self.target_config, target_params = target
        if self.config.max_model_len > self.target_config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len: expected at most the target's max_position_embeddings {self.target_config.max_position_embeddings}, "
                f"got {self.config.max_model_len}"
            )
        self.draft_config: Any = draft[0] if draft else None
        self.speculative = speculative
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids if eos_token_ids is not None else tokenizer.eos_token_ids if tokenizer else ())
        self.dtype = jnp.dtype(dtype)
        self.kernels = kernels.choose(
            self.config.kernels, self.target_config, self.draft_config, block_size=self.config.block_size, dtype=self.dtype
        )
        self._target_bytes = sum(a.nbytes for a in jax.tree.leaves(target_params))
        self.params: Params = {"target": target_params, "draft": draft[1] if draft else {}}
        self._rates = _acceptance_rates(speculative) if speculative else None
        self.reset_metrics()
        logger.info("%s", self.describe())

    @classmethod
    def from_pretrained(
        cls,
        target: str | None = None,
        *,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        block_size: int = 64,
        max_num_batched_tokens: int = 2048,
        compilation: str = "round",
        batch_buckets: Sequence[int] | None = None,
        kernels: str = "auto",
    ) -> LLM:
        """Load a target and, with speculative, its draft.

        target: a folder in Hugging Face's format, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct.
        speculative: a SpeculativeConfig or its keys; None decodes plainly.
        dtype: "bfloat16", "float32", or "auto" (bfloat16 on a GPU, float32 on a CPU). max_model_len: None for 2048, or what
        the target was made for if that is less. The rest: see EngineConfig. A folder without a tokenizer takes token ids.
        Raises ConfigError, one sentence, for anything that cannot be loaded or does not fit.
        """
        if isinstance(speculative, Mapping):
            speculative = SpeculativeConfig.from_dict(speculative)
        if speculative is not None:
            if speculative.model is None:
                raise ConfigError("speculative model: expected a folder, a name under checkpoints/ or a hub id of a draft head, got none")
            _acceptance_rates(speculative)  # found wrong before the weights are read, not after
        if dtype != "auto" and dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
        resolved = DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"] if dtype == "auto" else DTYPES[dtype]
        folder = resolve(target, kind="target")
        loaded = load_target(folder, resolved)
        config = EngineConfig(
            max_model_len=min(2048, loaded[0].max_position_embeddings) if max_model_len is None else max_model_len,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            compilation=compilation,  # type: ignore[arg-type]  (EngineConfig checks it)
            batch_buckets=None if batch_buckets is None else tuple(batch_buckets),
            kernels=kernels,
        )
        draft = None
        if speculative is not None:
            draft = load_draft(resolve(speculative.model, kind="draft"), *loaded, speculative, resolved)
        tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        eos = tokenizer.eos_token_ids if tokenizer else eos_token_ids(folder, None)
        return cls(loaded, draft, speculative, tokenizer=tokenizer, eos_token_ids=eos, config=config, dtype=resolved)

    def describe(self) -> str:
        """What runs, with the draft's aux layers and norm switches as they were resolved, in a line or two."""
        t = self.target_config
        lines = [
            f"target: {t.model_type}, {t.num_layers} layers, hidden size {t.hidden_size}, vocabulary {t.vocab_size}, {self.dtype.name} on "
            f"{jax.devices()[0].device_kind}, kernels: {self.kernels}"
        ]
        if self.speculative:
            s, d = self.speculative, self.draft_config
            lines.append(
                f"draft: {d.method}, vocabulary {d.draft_vocab_size}, K = {s.num_speculative_tokens}, "
                f"rejection {s.rejection_sample_method}, drafts {s.draft_sample_method}, compilation {self.config.compilation}"
            )
            switches = [
                f"{n} {getattr(d, n)}" for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if hasattr(d, n)
            ]
            if d.aux_layers:
                lines.append(f"aux layers (boundary ids) {list(d.aux_layers)}, {', '.join(switches)}")
        return "\n".join(lines)

    def reset_metrics(self) -> None:
        """Start counting anew."""
        self.metrics = SpecDecodeMetrics(self._num_speculative_tokens)
        self.timings = Timings()

    @property
    def _num_speculative_tokens(self) -> int:
        return self.speculative.num_speculative_tokens if self.speculative else 0

    @property
    def _label(self) -> str:
        return "speculative decoding" if self.speculative else "plain decoding"

    # --- requests ---------------------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """generate for one chat (a list of {"role", "content"}) or several."""
        return self.generate(messages, sampling_params, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: texts, lists of token ids, or chats (lists of {"role", "content"}, put through the chat template); one or
        a list of them; vLLM's {"prompt": text} and {"prompt_token_ids": ids} work too. sampling_params: for all, or one
        each. Every prompt is checked before anything runs; ConfigError says which one is wrong. progress shows a bar on
        standard error.
        """
        requests = self._admit_all(prompts, sampling_params)
        with _progress_bar(self._label, len(requests)) if progress else contextlib.nullcontext(_ignore) as advance:
            for batch in self._batches(requests):
                self._run(batch, advance)
        return [
            RequestOutput(r.prompt, r.prompt_token_ids, r.token_ids, self._decode(r.token_ids), r.finish_reason or "length", r.metrics)
            for r in requests
        ]

    def _admit_all(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Request]:
        listed = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(listed)
        if len(sampling_params) != len(listed):
            raise ConfigError(f"sampling_params: expected one for all or one for each of {len(listed)} prompts, got {len(sampling_params)}")
        return [self._admit(i, prompt, params) for i, (prompt, params) in enumerate(zip(listed, sampling_params, strict=True))]

    def _batches(self, requests: list[_Request]) -> list[list[_Request]]:
        """Which requests run together: in their order, max_num_seqs at a time."""
        most = self.config.max_num_seqs
        return [requests[i : i + most] for i in range(0, len(requests), most)]

    def _admit(self, index: int, prompt: Prompt, params: SamplingParams) -> _Request:
        """Tokenise and check one prompt."""
        token_ids = self._encode(index, prompt)
        vocab, limit = self.target_config.vocab_size, self.config.max_model_len
        if not token_ids:
            raise ConfigError(f"prompt {index}: expected at least one token, got an empty prompt")
        bad = [t for t in token_ids if not 0 <= t < vocab]
        if bad:
            raise ConfigError(f"prompt {index}: expected token ids in 0..{vocab - 1}, got {bad[0]}")
        if len(token_ids) >= limit:
            raise ConfigError(f"prompt {index}: expected fewer tokens than max_model_len {limit}, got {len(token_ids)}")
        eos = () if params.ignore_eos else self.eos_token_ids
        return _Request(
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=min(params.max_tokens, limit - len(token_ids)),
            stop_token_ids=tuple(sorted({*eos, *params.stop_token_ids})),
            metrics=SpecDecodeMetrics(self._num_speculative_tokens),
        )

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", prompt)
        listed = isinstance(prompt, Iterable) and not isinstance(prompt, str | Mapping)
        items: list[Any] = list(prompt) if listed else []
        if items and all(isinstance(t, numbers.Integral) and not isinstance(t, bool) for t in items):
            return [int(t) for t in items]
        is_chat = bool(items) and all(isinstance(m, Mapping) for m in items)
        if not is_chat and not isinstance(prompt, str):
            if listed and not items:
                return []
            raise ConfigError(f"prompt {index}: expected a text, token ids or a list of chat messages, got {prompt!r:.200}")
        if self.tokenizer is None:
            raise ConfigError(f"prompt {index}: expected token ids (the target comes without a tokenizer), got text")
        return self.tokenizer.encode_chat(items) if is_chat else self.tokenizer.encode(str(prompt))

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids) if self.tokenizer else ""

    # --- running a batch --------------------------------------------------------------------------------------------------------

    def _run(self, requests: list[_Request], advance: Callable[[int], None]) -> None:
        """Prefill, then rounds until every request has ended."""
        shape = self._bucket(requests)
        cfg = self._round_config(requests, shape)
        began = time.perf_counter()
        state = _init_state(cfg, *_host_state(requests, shape), num_blocks=shape.batch * shape.pages, dtype=self.dtype.name)
        block_table = np.arange(shape.batch * shape.pages, dtype=np.int32).reshape(shape.batch, shape.pages)
        for chunk in _prefill_chunks(requests, shape):
            verification, state = decode.run_prefill(cfg, self.params, state, block_table, *chunk, compilation=self.config.compilation)
            self._collect(requests, verification, advance, drafted=False)
        self.timings.prefill_seconds += time.perf_counter() - began
        self._run_rounds(cfg, requests, state, block_table, advance)
        self.timings.num_output_tokens += sum(len(r.token_ids) for r in requests)

    def _run_rounds(
        self, cfg: RoundConfig, requests: list[_Request], state: DecodeState, block_table: np.ndarray, advance: Callable[[int], None]
    ) -> DecodeState:
        """Rounds until every request has ended; the state is donated. scripts/bench.py times this loop too."""
        began = time.perf_counter()
        # On a GPU two more rounds are launched before a round's result is read, so that the device never waits for Python, however short
        # its rounds are; requests that have ended are idle there. On a CPU both would share the cores.
        depth = 2 if jax.default_backend() == "gpu" else 0
        block_table = jax.device_put(block_table)  # once: a copy to the device costs as much as a small model's round
        in_flight: list[Verification] = []
        while in_flight or not all(r.finish_reason for r in requests):
            if not all(r.finish_reason for r in requests):
                verification, state = decode.run_round(cfg, self.params, state, block_table, self.config.compilation)
                for result in (verification.output_tokens, verification.num_sampled):
                    result.copy_to_host_async()
                in_flight.append(verification)
                self.timings.num_rounds += 1
            if len(in_flight) > depth or all(r.finish_reason for r in requests):
                self._collect(requests, in_flight.pop(0), advance, drafted=self.speculative is not None)
        self.timings.decode_seconds += time.perf_counter() - began
        return state

    def _collect(self, requests: list[_Request], verification: Verification, advance: Callable[[int], None], *, drafted: bool) -> None:
        """Read a round's result, here and nowhere else, and hand each request its tokens."""
        tokens, num_sampled = np.asarray(verification.output_tokens), np.asarray(verification.num_sampled)
        for row, request in enumerate(requests):
            if num_sampled[row] == 0 or request.finish_reason:
                continue
            if drafted:
                request.metrics.observe(int(num_sampled[row]) - 1)
                self.metrics.observe(int(num_sampled[row]) - 1)
            request.extend(tokens[row, : num_sampled[row]].tolist())
            if request.finish_reason:
                advance(1)

    def _bucket(self, requests: Sequence[_Request]) -> _Shape:
        """The smallest compiled shape that holds these requests to their ends."""
        longest = max(len(r.prompt_token_ids) for r in requests)
        tokens = max(len(r.prompt_token_ids) + r.max_tokens for r in requests)
        stops = max(len(r.stop_token_ids) for r in requests)
        return self._shape(len(requests), tokens, longest, stops)

    def _shape(self, batch: int, tokens: int, longest_prompt: int, stops: int = 0) -> _Shape:
        """The bucket of `batch` requests of at most `tokens` tokens each, prompt included."""
        config = self.config
        assert config.batch_buckets is not None
        batch = min(b for b in config.batch_buckets if b >= batch)
        # A request's last rounds verify up to K rows past its end. They get room in every bucket, so that a request's rounds see
        # the same cache whatever its neighbours need.
        held = tokens + self._head_room
        pages = -(-_power_of_two(max(held, MIN_PAGES_TOKENS)) // config.block_size)
        most = max(1, config.max_num_batched_tokens // batch)
        chunk = min(_power_of_two(max(longest_prompt, MIN_CHUNK)), most)
        return _Shape(batch, min(pages, self._max_pages), chunk, _power_of_two(max(stops, len(self.eos_token_ids), MIN_STOPS)))

    @property
    def _head_room(self) -> int:
        return self._num_speculative_tokens + 1

    @property
    def _max_pages(self) -> int:
        return -(-self.config.max_model_len // self.config.block_size)

    def _round_config(self, requests: Sequence[_Request], shape: _Shape) -> RoundConfig:
        params = [r.params for r in requests]
        return self.round_config(
            sampled=any(not p.greedy for p in params), truncated=any(not p.greedy and (p.top_k > 0 or p.top_p < 1) for p in params)
        )

    def round_config(self, *, sampled: bool, truncated: bool) -> RoundConfig:
        """The static description of this engine's rounds, for batches in which some request samples / truncates."""
        group = CacheGroup(self.config.block_size, self.config.max_model_len)
        cfg = RoundConfig(target=self.target_config, target_group=group, sampled=sampled, truncated=truncated, kernels=self.kernels)
        cfg = replace(cfg, cuda_graphs=self._target_bytes < GRAPHS_BELOW_BYTES)
        if self.speculative is None:
            return cfg
        return replace(
            cfg,
            draft=self.draft_config,
            draft_group=replace(group, window=self.draft_config.sliding_window),
            num_speculative_tokens=self._num_speculative_tokens,
            rule=self.speculative.rejection_sample_method,  # type: ignore[arg-type]
            draft_sampling=self.speculative.draft_sample_method,  # type: ignore[arg-type]
            acceptance_rates=self._rates,
        )

    def warmup(
        self,
        *,
        batch_sizes: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        sampling_params: Sequence[SamplingParams] | None = None,
    ) -> int:
        """Compile ahead what generate will need, so that nothing compiles while decoding; returns the number of shapes.

        batch_sizes: requests that will run together (None: every bucket). lengths: prompt plus max_tokens (None: every
        page bucket up to max_model_len). sampling_params: kinds of request (None: greedy, sampled and truncated). Requests with
        more stop token ids than four (or than the target's end-of-text ids) compile once more.
        """
        if sampling_params is None:
            features = [(False, False), (True, False), (True, True)]
        else:
            features = sorted({(not p.greedy, not p.greedy and (p.top_k > 0 or p.top_p < 1)) for p in sampling_params})
        limit = self.config.max_model_len
        if lengths is None:  # the longest that each page bucket holds
            lengths = [n for i in range((limit + self._head_room).bit_length()) if (n := (1 << i) - self._head_room) > 0] + [limit]
        shapes = sorted(
            {
                self._shape(b, n, longest)
                for b in (batch_sizes or self.config.batch_buckets or ())
                for n in (min(n, limit) for n in lengths)
                for longest in [*(1 << i for i in range(n.bit_length())), n]
            },
            key=lambda s: (s.batch, s.pages, s.chunk),
        )
        for shape in shapes:
            for sampled, truncated in features:
                self._warm(self.round_config(sampled=sampled, truncated=truncated), shape)
        return len(shapes)

    def warmup_for(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> int:
        """Compile just what generate(prompts, sampling_params) will run, so that it can be timed without compilation;
        returns the number of shapes. Checks the prompts as generate does."""
        needed = {}
        for batch in self._batches(self._admit_all(prompts, sampling_params)):
            shape = self._bucket(batch)
            needed[self._round_config(batch, shape), shape] = None
        for cfg, shape in needed:
            self._warm(cfg, shape)
        return len(needed)

    def _warm(self, cfg: RoundConfig, shape: _Shape) -> None:
        """Run each program of a shape once on idle rows."""
        state = _init_state(cfg, *_host_state([], shape), num_blocks=shape.batch * shape.pages, dtype=self.dtype.name)
        table = np.zeros((shape.batch, shape.pages), np.int32)
        idle = np.zeros(shape.batch, np.int32)
        mode = self.config.compilation
        chunk = np.zeros((shape.batch, shape.chunk), np.int32)
        _, state = decode.run_prefill(cfg, self.params, state, table, chunk, idle, idle, idle, compilation=mode)
        verification, _ = decode.run_round(cfg, self.params, state, table, mode)
        jax.block_until_ready(verification)


def _acceptance_rates(speculative: SpeculativeConfig) -> tuple[float, ...] | None:
    """Conditional rates of the synthetic rule, None under another."""
    return synthetic.resolve(speculative) if speculative.rejection_sample_method == "synthetic" else None


@partial(jax.jit, static_argnames=("cfg", "num_blocks", "dtype"))
def _init_state(
    cfg: RoundConfig, sampling: SamplingState, max_tokens: jax.Array, stop_token_ids: jax.Array, *, num_blocks: int, dtype: str
) -> DecodeState:
    return decode.init_state(cfg, sampling, max_tokens, stop_token_ids, num_blocks, jnp.dtype(dtype))


def _host_state(requests: Sequence[_Request], shape: _Shape) -> tuple[Any, Any, Any]:
    """The per-request arrays of a batch; padding rows are greedy, and never become active."""
    keys = np.zeros((shape.batch, 2), np.uint32)
    temperature, top_p = np.zeros(shape.batch, np.float32), np.ones(shape.batch, np.float32)
    top_k, max_tokens = np.zeros(shape.batch, np.int32), np.zeros(shape.batch, np.int32)
    stops = np.full((shape.batch, shape.stops), -1, np.int32)
    for row, request in enumerate(requests):
        params = request.params
        seed = (secrets.randbits(64) if params.seed is None else params.seed) % 2**64
        keys[row] = seed >> 32, seed & 0xFFFFFFFF
        temperature[row], top_k[row], top_p[row] = params.temperature, max(params.top_k, 0), params.top_p
        max_tokens[row] = request.max_tokens
        stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
    return SamplingState(keys, temperature, top_k, top_p), max_tokens, stops  # type: ignore[arg-type]


def _prefill_chunks(requests: Sequence[_Request], shape: _Shape) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """tokens [batch, chunk], start, num_tokens and next_prompt_token [batch] of one prefill call after another."""
    longest = max(len(r.prompt_token_ids) for r in requests)
    for begin in range(0, longest, shape.chunk):
        tokens = np.zeros((shape.batch, shape.chunk), np.int32)
        num_tokens, following = np.zeros(shape.batch, np.int32), np.full(shape.batch, -1, np.int32)
        for row, request in enumerate(requests):
            part = request.prompt_token_ids[begin : begin + shape.chunk]
            tokens[row, : len(part)] = part
            num_tokens[row] = len(part)
            if begin + shape.chunk < len(request.prompt_token_ids):
                following[row] = request.prompt_token_ids[begin + shape.chunk]
        yield tokens, np.full(shape.batch, begin, np.int32), num_tokens, following


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several? A text, a list of ids and a list of messages are one each."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts: expected texts, token ids or chats, got {prompts!r:.200}")
    items = list(prompts)
    first = items[0] if items else None
    if isinstance(first, numbers.Integral) or (isinstance(first, Mapping) and "role" in first):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ignore(_: int) -> None:
    pass


@contextlib.contextmanager
def _progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)
