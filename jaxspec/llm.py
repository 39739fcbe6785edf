"""LLM: what a caller holds. Prompts in, texts out, whole or as they grow."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import kernels as kernel_choice
from jaxspec import synthetic
from jaxspec.attention import join_projections
from jaxspec.config import ConfigError, EngineConfig, RoundConfig, SamplingFeatures, SpeculativeConfig
from jaxspec.detokenizer import Detokenizer
from jaxspec.engine import Engine
from jaxspec.inputs import Message, Prompt, as_chats, as_list, encode, encode_words
from jaxspec.loading import Tokenizer, load_tokenizer, resolve
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.tokenizer import eos_token_ids, has_tokenizer
from jaxspec.metrics import LatencyMetrics, SchedulerCounts, SpecDecodeMetrics, Timings
from jaxspec.outputs import CompletionOutput, Increment, Interrupted, RequestOutput
from jaxspec.params import Params
from jaxspec.request import Request, derive_seed
from jaxspec.runner import ModelRunner
from jaxspec.sampling_params import SamplingParams, features_of

logger = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
USUAL = (SamplingParams(temperature=0), SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9))  # what warmup covers

Callback = Callable[[Increment], object]


class LLM:
    """A target, perhaps with a draft, that turns prompts into text.

    >>> llm = LLM.from_pretrained(speculative=SpeculativeConfig(model="smollm2-135m-instruct-eagle3"))
    >>> llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0))[0].text  # doctest: +SKIP

    metrics sums up the drafts' acceptance over all requests so far, timings the wall clock, latency what each request waited for,
    scheduling counts preemptions and hits of the prefix cache.
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
        if not isinstance(target, tuple | list) or len(target) != 2:
            raise ConfigError(
                f"target: expected a (config, params) pair (LLM.from_pretrained takes a folder or hub id), got {target!r:.200}"
            )
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
        self._encode_words = lru_cache(maxsize=256)(partial(encode_words, tokenizer=tokenizer))  # many prompts have the same
        self.eos_token_ids = tuple(eos_token_ids if eos_token_ids is not None else tokenizer.eos_token_ids if tokenizer else ())
        self.dtype = jnp.dtype(dtype)
        self.kernels = kernel_choice.choose(
            self.config.kernels, self.target_config, self.draft_config, block_size=self.config.block_size, dtype=self.dtype
        )
        self.params: Params = {"target": join_projections(target_params), "draft": join_projections(draft[1]) if draft else {}}
        self.runner = ModelRunner(
            self.target_config,
            self.draft_config,
            self.params,
            speculative,
            self.config,
            kernels=self.kernels,
            dtype=self.dtype,
            acceptance_rates=_acceptance_rates(speculative) if speculative else None,
            eos_token_ids=self.eos_token_ids,
        )
        if self.config.num_gpu_blocks_override is not None:
            _ = self.runner.num_blocks  # too few are found now
        self.engine = Engine(self.runner)
        logger.info("%s", self.describe())

    @classmethod
    def from_pretrained(
        cls,
        target: str | None = None,
        *,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        batch_buckets: Sequence[int] | None = None,
        mxfp4: str = "dequantised",
        **engine: Any,
    ) -> LLM:
        """Load a target and, with speculative, its draft.

        target: a folder in Hugging Face's format, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct.
        speculative: a SpeculativeConfig or its keys; None decodes plainly.
        dtype: "bfloat16", "float32", or "auto" (bfloat16 on a GPU, float32 on a CPU). max_model_len: None for 2048, or what
        the target was made for if that is less. mxfp4: "dequantised", or "packed" to keep MXFP4 experts (gpt-oss) as they are stored, in a
        quarter of the memory. engine: the rest of EngineConfig. A folder without a tokenizer takes token ids.
        Raises ConfigError, one sentence, for anything that cannot be loaded or does not fit.
        """
        if isinstance(speculative, Mapping):
            speculative = SpeculativeConfig.from_dict(speculative)
        if speculative is not None:
            if not isinstance(speculative, SpeculativeConfig):
                raise ConfigError(f"speculative: expected a SpeculativeConfig, its keys or None, got {speculative!r:.200}")
            if speculative.model is None and speculative.method != "mtp":
                raise ConfigError("speculative model: expected a folder, a name under checkpoints/ or a hub id of a draft head, got none")
            _acceptance_rates(speculative)  # found wrong before the weights are read, not after
        if dtype != "auto" and dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
        if mxfp4 not in ("dequantised", "packed"):
            raise ConfigError(f"mxfp4: expected dequantised or packed, got {mxfp4!r}")
        if batch_buckets is not None:
            engine["batch_buckets"] = batch_buckets
        if max_model_len is not None:
            engine["max_model_len"] = max_model_len
        config = EngineConfig(**engine)
        resolved = DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"] if dtype == "auto" else DTYPES[dtype]
        folder = resolve(target, kind="target")
        loaded = load_target(folder, resolved, mxfp4=mxfp4)
        if max_model_len is None:
            config = replace(config, max_model_len=min(2048, loaded[0].max_position_embeddings))
        draft = None
        if speculative is not None:
            own = speculative.model is None  # an MTP module is in the target's own checkpoint
            draft = load_draft(folder if own else resolve(speculative.model, kind="draft"), *loaded, speculative, resolved)
        tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        eos = tokenizer.eos_token_ids if tokenizer else eos_token_ids(folder, None)
        return cls(loaded, draft, speculative, tokenizer=tokenizer, eos_token_ids=eos, config=config, dtype=resolved)

    def on_same_weights(self, *, speculative: bool = True, **changes: Any) -> LLM:
        """Another engine over these weights, with these fields of EngineConfig changed; speculative False decodes plainly."""
        drafts = speculative and self.speculative is not None
        return type(self)(
            (self.target_config, self.params["target"]),
            (self.draft_config, self.params["draft"]) if drafts else None,
            self.speculative if drafts else None,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            config=replace(self.config, **changes),
            dtype=self.dtype,
        )

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
                + (f", {self.runner.rounds_per_step} rounds a step" if self.runner.rounds_per_step > 1 else "")
            )
            switches = [
                f"{n} {getattr(d, n)}" for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if hasattr(d, n)
            ]
            if d.aux_layers:
                lines.append(f"aux layers (boundary ids) {list(d.aux_layers)}, {', '.join(switches)}")
        return "\n".join(lines)

    # --- what was counted ----------------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> SpecDecodeMetrics:
        return self.engine.stats.metrics

    @property
    def timings(self) -> Timings:
        return self.engine.stats.timings

    @property
    def latency(self) -> LatencyMetrics:
        return self.engine.stats.latency

    @property
    def scheduling(self) -> SchedulerCounts:
        return self.engine.stats.scheduling

    def reset_metrics(self) -> None:
        """Start counting anew."""
        self.engine.reset_stats()

    @property
    def _label(self) -> str:
        return "speculative decoding" if self.speculative else "plain decoding"

    # --- generating ----------------------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> list[RequestOutput]:
        """generate for one chat (a list of {"role", "content"}) or several, and for nothing else."""
        return self.generate(as_chats(messages), sampling_params, progress=progress, callback=callback)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        callback: Callback | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: texts, lists of token ids, or chats (lists of {"role", "content"}, put through the chat template); one or
        a list of them; vLLM's {"prompt": text} and {"prompt_token_ids": ids} work too. sampling_params: for all, or one
        each. Every prompt is checked before anything runs; ConfigError says which one is wrong. progress shows a bar on
        standard error. callback is called with each Increment as it is read; an exception in it ends that text (finish_reason "error")
        and no other. Ctrl-C raises Interrupted, a KeyboardInterrupt with the outputs that were finished, and leaves the engine usable.
        """
        requests = self.make_requests(prompts, sampling_params, streams=callback is not None)
        with _progress_bar(self._label, len(requests)) if progress else contextlib.nullcontext(_ignore) as advance:
            waiting = _Waiting(requests, advance, callback)
            try:
                self._run(requests, waiting)
            except KeyboardInterrupt as e:
                self._cancel(requests)
                raise Interrupted(self._outputs(requests, finished_only=True)) from e
            except BaseException:
                self._cancel(requests)
                raise
        return self._outputs(requests)

    def _run(self, requests: Sequence[Request], waiting: _Waiting) -> None:
        for request in requests:
            self.engine.add(request)
        while waiting.unfinished:
            self.engine.step()

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Increment]:
        """What each round adds to each text, as it comes; arguments as generate takes them, and checked before this returns.

        Closing the iterator (or dropping it) cancels what has not finished. Several streams may run at once, and generate beside them.
        """
        return self._stream(self.make_requests(prompts, sampling_params, streams=True))

    def _stream(self, requests: Sequence[Request]) -> Iterator[Increment]:
        increments: deque[Increment] = deque()
        waiting = _Waiting(requests, _ignore, increments.append)
        try:
            for request in requests:
                self.engine.add(request)
            while waiting.unfinished or increments:
                while increments:
                    yield increments.popleft()
                if waiting.unfinished:
                    self.engine.step()
        finally:
            self._cancel(requests)

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.on_tokens = None
            self.engine.cancel(request)

    # --- requests ------------------------------------------------------------------------------------------------------------------

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        streams: bool = False,
    ) -> list[Request]:
        """Tokenise and check every prompt; n requests for each. For who drives `engine` himself (jaxspec.benchmark.throughput)."""
        listed = as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(listed)
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
            raise ConfigError(f"sampling_params: expected SamplingParams, or a list of them, got {sampling_params!r:.200}")
        if len(sampling_params) != len(listed):
            raise ConfigError(f"sampling_params: expected one for all or one for each of {len(listed)} prompts, got {len(sampling_params)}")
        requests = []
        for index, (prompt, params) in enumerate(zip(listed, sampling_params, strict=True)):
            if not isinstance(params, SamplingParams):
                raise ConfigError(f"prompt {index}: sampling_params: expected SamplingParams, got {params!r:.200}")
            try:
                params = self._with_words(params)
                params.check_vocabulary(self.target_config.vocab_size, self.eos_token_ids)
            except ConfigError as e:
                raise ConfigError(f"prompt {index}: {e}") from None
            token_ids = self._encode(index, prompt)
            requests += [self._request(index, sample, prompt, token_ids, params, streams) for sample in range(params.n)]
        return requests

    def _with_words(self, params: SamplingParams) -> SamplingParams:
        """bad_words as the tokenizer writes them, beside the bad_words_token_ids."""
        if not params.bad_words:
            return params
        found = dict.fromkeys((*params.bad_words_token_ids, *self._encode_words(params.bad_words)))
        return replace(params, bad_words_token_ids=tuple(found))

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        token_ids = encode(index, prompt, self.tokenizer)
        vocab, limit = self.target_config.vocab_size, self.config.max_model_len
        if not token_ids:
            raise ConfigError(f"prompt {index}: expected at least one token, got an empty prompt")
        bad = [t for t in token_ids if not 0 <= t < vocab]
        if bad:
            raise ConfigError(f"prompt {index}: expected token ids in 0..{vocab - 1}, got {bad[0]}")
        if len(token_ids) >= limit:
            raise ConfigError(f"prompt {index}: expected fewer tokens than max_model_len {limit}, got {len(token_ids)}")
        return token_ids

    def _request(self, index: int, sample: int, prompt: Prompt, token_ids: list[int], params: SamplingParams, streams: bool) -> Request:
        K, own = self.runner.num_speculative_tokens, params.num_speculative_tokens
        detokenizer = None
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                f"prompt {index}: stop: expected a target with a tokenizer, in whose texts the strings are looked for, got none"
            )
        if self.tokenizer is not None and (params.stop or streams):
            detokenizer = Detokenizer(self.tokenizer.decode, params.stop, include_stop=params.include_stop_str_in_output)
        return Request(
            prompt_token_ids=token_ids,
            params=params if sample == 0 else replace(params, prompt_logprobs=None),  # the prompt is scored once
            max_tokens=min(params.max_tokens or self.config.max_model_len, self.config.max_model_len - len(token_ids)),
            stop_token_ids=tuple(sorted({*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids})),
            max_drafts=K if own is None else min(K, own),
            seed=derive_seed(params.seed, sample),
            index=index,
            sample=sample,
            prompt=prompt,
            metrics=SpecDecodeMetrics(K),
            detokenizer=detokenizer,
        )

    def _outputs(self, requests: Sequence[Request], *, finished_only: bool = False) -> list[RequestOutput]:
        """In the order of the prompts, each with its n texts."""
        grouped: dict[int, list[Request]] = {}
        for request in requests:
            grouped.setdefault(request.index, []).append(request)
        outputs = []
        for index, group in grouped.items():
            if not finished_only or all(r.finish_reason in ("stop", "length") for r in group):
                texts = [self._completion(r) for r in group]
                scores = group[0].prompt_logprobs if group[0].params.prompt_logprobs is not None else None
                outputs.append(RequestOutput(group[0].prompt, group[0].prompt_token_ids, texts, index, scores))
        return outputs

    def _completion(self, request: Request) -> CompletionOutput:
        token_ids = request.token_ids
        text = ""
        if request.detokenizer is not None and request.detokenizer.stopped:
            text = request.detokenizer.text
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids)
        reason = request.finish_reason or "cancelled"
        scores = None if request.params.logprobs is None else request.logprobs
        return CompletionOutput(request.sample, token_ids, text, reason, request.metrics, request.times, request.error, scores)

    # --- compiling ahead -----------------------------------------------------------------------------------------------------------

    def round_config(self, *, sampled: bool, truncated: bool) -> RoundConfig:
        """The static description of this engine's rounds, for batches in which some request samples / truncates."""
        return self.runner.round_config(SamplingFeatures(sampled=sampled, truncated=truncated))

    def warmup(
        self,
        *,
        batch_sizes: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        sampling_params: Sequence[SamplingParams] | None = None,
    ) -> int:
        """Compile ahead what generate will need, so that nothing compiles while decoding; returns the number of programs.

        batch_sizes: requests that will run together at most, each a run of its own (None: every bucket). lengths: prompt plus
        max_tokens (None: every page bucket up to max_model_len). sampling_params: kinds of request, of which any mixture may come
        (None: greedy, sampled and truncated). Requests with more stop token ids than these, than four and than the target's end-of-text
        ids compile once more, and so do those with more or longer bad words than these and than eight of four tokens.
        """
        kinds = USUAL if sampling_params is None else [self._with_words(params) for params in sampling_params]
        limit, runner = self.config.max_model_len, self.runner
        longest = limit if lengths is None else min(limit, max(lengths))
        pages = runner.buckets.every_pages(1, longest + runner.num_speculative_tokens + 1)  # a text grows through the smaller ones
        assert self.config.batch_buckets is not None
        most = max(batch_sizes or self.config.batch_buckets)
        batches = [b for i, b in enumerate(self.config.batch_buckets) if i == 0 or self.config.batch_buckets[i - 1] < most]
        tiles = runner.buckets.every_tiles(1, -(-longest // runner.prefill_tile) * min(most, self.config.max_num_seqs))
        return self._warm(kinds, batches, pages, tiles)

    def warmup_for(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> int:
        """Compile just what generate(prompts, sampling_params) may run, so that it can be timed without compilation;
        returns the number of programs. Checks the prompts as generate does."""
        requests = self.make_requests(prompts, sampling_params)
        if not requests:
            return 0
        runner = self.runner
        assert self.config.batch_buckets is not None
        running = min(len(requests), self.config.max_num_seqs)
        batches = [b for i, b in enumerate(self.config.batch_buckets) if i == 0 or self.config.batch_buckets[i - 1] < running]
        prompt_tokens = sorted(len(r.prompt_token_ids) for r in requests)
        tokens = sorted(len(r.prompt_token_ids) + r.max_tokens for r in requests)
        again = self._may_preempt(tokens[-running:])  # who is preempted is prefilled anew, with what he has generated
        in_tiles = [-(-n // runner.prefill_tile) for n in (tokens if again else prompt_tokens)]
        most = sum(in_tiles[-running:])
        # What a prefix of others, or the call before, leaves of a prompt may be less than any prompt.
        is_cut = self.config.enable_prefix_caching or again or most > runner.buckets.max_tiles
        tiles = runner.buckets.every_tiles(1 if is_cut else in_tiles[0], most)
        longest = tokens[-1] + runner.num_speculative_tokens + 1
        return self._warm([r.params for r in requests], batches, runner.buckets.every_pages(prompt_tokens[0], longest), tiles)

    def _may_preempt(self, tokens: Sequence[int]) -> bool:
        """Whether requests of so many tokens each may hold more blocks than there are."""
        runner = self.runner
        lengths = [min(n + runner.num_speculative_tokens, self.config.max_model_len) for n in tokens]
        return any(
            sum(runner.demand(group, n).least for n in lengths) > blocks
            for group, blocks in zip(runner.cache_groups, runner.num_blocks, strict=True)
        )

    def _warm(self, kinds: Sequence[SamplingParams], batches: Sequence[int], pages: Sequence[int], tiles: Sequence[int]) -> int:
        """Every mixture of these kinds of request, in these buckets."""
        mixtures: dict[SamplingFeatures, None] = {}
        for features in dict.fromkeys(features_of([params]) for params in kinds):
            mixtures |= dict.fromkeys([features, *(features | others for others in mixtures)])
        limited = any(p.num_speculative_tokens is not None for p in kinds)
        limited |= self.speculative is not None and self.speculative.draft_max_model_len is not None
        limits = [False, True] if limited and self.speculative is not None else [False]
        return sum(
            self.engine.warm(
                mixtures,
                params=kinds,
                batches=batches,
                round_pages=pages,
                prefills=[(t, p) for t in tiles for p in pages],
                limits_drafts=limit,
            )
            for limit in limits
        )


class _Waiting:
    """Who waits for these requests: counts those that have not finished, and passes on what they gain."""

    def __init__(self, requests: Sequence[Request], advance: Callable[[int], None], callback: Callable[[Increment], object] | None) -> None:
        self.unfinished = len(requests)
        self._advance, self._callback = advance, callback
        for request in requests:
            request.on_tokens = self._on_tokens

    def _on_tokens(self, request: Request, num_new: int) -> None:
        finished = request.finish_reason is not None
        if finished:
            self.unfinished -= 1
            self._advance(1)
        if self._callback is None:
            return
        text = ""
        if request.detokenizer is not None:
            if finished:
                request.detokenizer.flush()
            text = request.detokenizer.take(last=finished)
        new = request.all_token_ids[len(request.all_token_ids) - num_new :]
        try:
            self._callback(Increment(request.index, request.sample, new, text, request.finish_reason))
        except Exception:
            if not finished:  # the engine ends the request, and tells nobody
                self.unfinished -= 1
                self._advance(1)
            raise


def _acceptance_rates(speculative: SpeculativeConfig) -> tuple[float, ...] | None:
    """Conditional rates of the synthetic rule, None under another."""
    return synthetic.resolve(speculative) if speculative.rejection_sample_method == "synthetic" else None


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
