"""LLM: the class that callers hold. Prompts in, texts out, whole or as they grow."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import (
    check_cache_dtype,
    own_cache_dtype,
    resolve_cache_dtype,
    resolve_draft_cache_dtype,
)
from jaxspec.config import (
    ConfigError,
    DraftConfig,
    EngineConfig,
    RoundConfig,
    SamplingFeatures,
    SpeculativeConfig,
    TargetConfig,
    check_verify_tokens,
    is_positive_int,
    items_of,
    shown,
)
from jaxspec.config.keys import (
    ENGINE,
    GENERATE,
    NO_FOREIGN_KEYS,
    RESET_PREFIX_CACHE,
    SPECULATIVE,
    checks_arguments,
    given_names,
    keywords_of,
    named_as_given,
    own_keys,
    refuse_attribute,
)
from jaxspec.engine.driver import Driver
from jaxspec.engine.engine import Engine
from jaxspec.engine.input_processor import InputProcessor
from jaxspec.engine.inputs import Message, Prompt, as_chats
from jaxspec.engine.memory import CacheMemory
from jaxspec.engine.metrics import (
    Counter,
    LatencyMetrics,
    SchedulerCounts,
    SpecDecodeMetrics,
    Timings,
    Vector,
    as_vllm,
)
from jaxspec.engine.output_processor import Callback, request_outputs
from jaxspec.engine.outputs import Increment, Interrupted, RequestOutput
from jaxspec.engine.progress import (
    compile_progress,
    no_progress,
    progress_bar,
    report_nothing,
    shows_progress,
)
from jaxspec.engine.replicas import Replicas
from jaxspec.engine.request import Request
from jaxspec.engine.runner import ModelRunner
from jaxspec.engine.warmup_shapes import compile_ahead, shapes_of, shapes_up_to
from jaxspec.layers import op_choice
from jaxspec.layers.params import Params
from jaxspec.loading import Tokenizer
from jaxspec.loading.chat import PLAIN_CHAT, ChatOptions
from jaxspec.loading.placement import choose_placements, copy_weights, place_models
from jaxspec.loading.pretrained import Parts, given_parts, load_pretrained
from jaxspec.sampling import synthetic
from jaxspec.sampling.params import SamplingParams, check_end_ids

logger = logging.getLogger(__name__)


class LLM:
    """A target, with or without a draft, that turns prompts into text.

    >>> head = SpeculativeConfig(model="smollm2-135m-instruct-eagle3")
    >>> llm = LLM.from_pretrained(speculative=head)
    >>> hello = [{"role": "user", "content": "Hi"}]
    >>> llm.chat(hello, SamplingParams(temperature=0))[0].text  # doctest: +SKIP

    Any thread may call it: the requests of all calls run together (jaxspec.engine.driver).

    engines: the engine of each replica (data_parallel_size). `engine` is the only one, for tools
        that drive it.
    serving: takes the requests: the engine, or the replicas behind their queue.
    weights: of each replica, {"target": ..., "draft": ...} on its devices; `params` is the first.

    Over all requests so far:
    metrics: acceptance of the drafts.
    timings: wall clock of prefill and decoding.
    latency: waiting times of the requests.
    scheduling: preemptions, and hits of the prefix cache.
    """

    @checks_arguments
    def __init__(
        self,
        model: str | PathLike[str] | tuple[TargetConfig, Params] | None = None,
        draft: tuple[DraftConfig, Params] | None = None,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | str | PathLike[str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        config: EngineConfig | None = None,
        dtype: Any = None,
        weights: Sequence[Params] = (),
        **options: Any,
    ) -> None:
        """Load a target and its draft by name, as vLLM does, or take loaded ones.

        LLM(model, speculative_config={...}, ...): see from_pretrained, whose arguments `options`
        are. LLM((config, params), ...): with `draft` and `speculative`, which go together, the
        engine's `config` and the `dtype` of weights and caches (None: float32). Without a
        tokenizer, prompts are token ids and texts stay empty. eos_token_ids: None for the
        tokenizer's. weights: those of another LLM with the same models and devices, which both
        then share.
        """
        if speculative is not None and speculative_config is not None:
            raise ConfigError("speculative_config: expected it or speculative, got both")
        named = {"speculative": "speculative_config"} if speculative is None else {}
        speculative = speculative_config if speculative is None else speculative
        if not isinstance(weights, list | tuple) or not all(
            isinstance(each, Mapping) and each.keys() == {"target", "draft"} for each in weights
        ):
            raise ConfigError(f"weights: expected those of another LLM, got {shown(weights)}")
        only_loaded = {
            "draft": draft,
            "eos_token_ids": eos_token_ids,
            "config": config,
            "weights": weights or None,
        }
        if isinstance(model, tuple | list):
            own_keys("LLM of a loaded target", options, (*only_loaded, "dtype"), NO_FOREIGN_KEYS)
            with named_as_given(named):
                parts = given_parts(
                    model, draft, speculative, tokenizer, eos_token_ids, config, dtype
                )
            self._start(parts, weights)
        elif wrong := [name for name, value in only_loaded.items() if value is not None]:
            raise ConfigError(
                f"{wrong[0]}: expected it beside a (config, params) pair only, "
                f"got it beside the model {shown(model)}"
            )
        else:
            dtype = "auto" if dtype is None else dtype
            names = named | given_names(options, ENGINE)
            if isinstance(speculative, Mapping):
                names |= given_names(speculative, SPECULATIVE, "speculative_config.")
            with named_as_given(names):
                self._start(
                    load_pretrained(
                        model, speculative, tokenizer=tokenizer, dtype=dtype, **options
                    ),
                    weights,
                )
            if self.config.num_gpu_blocks_override is not None:
                self.runner.resident.check_room()  # ConfigError now, not with the first request

    def _start(self, parts: Parts, weights: Sequence[Params]) -> None:
        """Make the engines."""
        target, draft, speculative = parts.target, parts.draft, parts.speculative
        tokenizer, dtype = parts.tokenizer, parts.dtype
        self.target_config, target_params = target
        kv_cache_dtype = own_cache_dtype(parts.config.kv_cache_dtype, self.target_config)
        self.config = replace(parts.config, kv_cache_dtype=kv_cache_dtype)
        limit = self.target_config.max_position_embeddings
        if self.config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len: expected at most the target's max_position_embeddings {limit}, "
                f"got {self.config.max_model_len}"
            )
        if speculative and speculative.max_k >= self.config.max_model_len:
            raise ConfigError(
                "num_speculative_tokens: expected fewer than max_model_len "
                f"{self.config.max_model_len}, got {speculative.max_k}"
            )
        if speculative is not None:
            check_verify_tokens(
                speculative,
                max_num_seqs=self.config.max_num_seqs,
                attention=self.target_config.attention,
            )
        self.draft_config = draft[0] if draft else None
        self.speculative = speculative
        self.tokenizer = tokenizer
        self._sampling = parts.sampling
        self.eos_token_ids = parts.eos_token_ids
        check_end_ids(self.eos_token_ids, self.target_config.vocab_size)
        self.dtype = jnp.dtype(dtype)
        self.cache_dtype = resolve_cache_dtype(self.config.kv_cache_dtype, self.dtype)
        check_cache_dtype(self.target_config.attention, self.cache_dtype)
        self.draft_cache_dtype = resolve_draft_cache_dtype(
            speculative and speculative.draft_kv_cache_dtype,
            self.draft_config,
            self.config.kv_cache_dtype,
            self.dtype,
        )
        if self.draft_config is not None:
            attention = self.draft_config.attention
            check_cache_dtype(attention, self.draft_cache_dtype, "draft_kv_cache_dtype")
        placements = choose_placements(self.config, speculative)
        placement = placements[0]
        draft_config = self.draft_config
        self.kernels = op_choice.choose(
            self.config.kernels,
            placement.target(self.target_config).on_device(self.target_config),
            draft_config and placement.draft(draft_config).on_device(draft_config),
            block_size=self.config.block_size,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            draft_cache_dtype=self.draft_cache_dtype,
            devices=placement.devices if placement.size > 1 else (),
        )
        target_params, draft_params = place_models(placement, target, draft)
        self.params: Params = {"target": target_params, "draft": draft_params}
        if not weights or not _are_same_arrays(weights[0], self.params):
            weights = [self.params]  # those of other devices
        others = (copy_weights(self.params, p) for p in placements[len(weights) :])
        self.weights = (*weights[: len(placements)], *others)
        runners = [
            ModelRunner(
                self.target_config,
                self.draft_config,
                params,
                speculative,
                self.config,
                ops=self.kernels,
                placement=placement,
                dtype=self.dtype,
                draft_cache_dtype=self.draft_cache_dtype,
                acceptance_rates=synthetic.acceptance_rates(speculative) if speculative else None,
                eos_token_ids=self.eos_token_ids,
            )
            for params, placement in zip(self.weights, placements, strict=True)
        ]
        CacheMemory.size_alike([runner.memory for runner in runners])
        self.runner = runners[0]
        if self.config.num_gpu_blocks_override is not None or placement.spans_processes:
            self.runner.memory.decide()  # ConfigError now, not with the first request
        self.engines = tuple(map(Engine, runners))
        self.serving = self.engines[0] if len(self.engines) == 1 else Replicas(self.engines)
        self._driver = Driver(self.serving)
        self._channel = self.runner.resident.channel
        if self._channel is not None and self._channel.leads:
            # Streams hold the driver, so it may outlive this object.
            weakref.finalize(self._driver, self._channel.close, "its leader has ended")
        self._inputs = InputProcessor(
            tokenizer,
            self.eos_token_ids,
            vocab_size=self.target_config.vocab_size,
            max_model_len=self.config.max_model_len,
            num_speculative_tokens=self.runner.num_speculative_tokens,
            default_params=self._sampling.of_requests(),
        )
        logger.info("%s", self.describe())

    @classmethod
    @checks_arguments
    def from_pretrained(
        cls,
        target: str | PathLike[str] | None = None,
        *,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        revision: str | None = None,
        tokenizer: str | PathLike[str] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        batch_buckets: Sequence[int] | None = None,
        mxfp4: str = "auto",
        generation_config: str | None = None,
        **engine: Any,
    ) -> LLM:
        """Load a target and, with speculative, its draft.

        target: a folder in Hugging Face's format, a .gguf file, a hub id, a head that names its
            target (both are loaded), or None for the target that the head names, else
            SmolLM2-135M-Instruct. A folder without a tokenizer takes token ids.
        speculative: a SpeculativeConfig or its keys; None decodes plainly.
        revision: a commit, a tag or a branch of the target's repository on the hub.
        tokenizer: the folder or hub id of another tokenizer than the target's.
        dtype: "bfloat16", "float32", or "auto" (bfloat16 on a GPU, float32 on a CPU).
        max_model_len: None for 2048, or the target's limit if that is less.
        mxfp4: "packed" keeps MXFP4 experts (gpt-oss) as they are stored, "dequantised" takes four
            times their memory. "auto" is "packed", unless a device's piece of an expert is not a
            whole number of blocks of 32.
        generation_config: "auto": requests without SamplingParams take what the target's
            generation_config.json proposes; "vllm": that file is not read. None reads it for
            get_default_sampling_params alone.
        engine: the other fields of EngineConfig. vLLM's keywords without a setting here are
            accepted with the values that change nothing (jaxspec/config/keys.py).

        Compiled programs and lowered kernels are kept on disk (JAXSPEC_CACHE or ~/.cache/jaxspec),
        unless JAX_COMPILATION_CACHE_DIR names another folder. Raises ConfigError, one sentence, for
        anything that cannot be loaded or does not fit.
        """
        if target is None:
            target = engine.pop("model", None)  # LLM's name for it
        return cls(
            target,
            speculative=speculative,
            revision=revision,
            tokenizer=tokenizer,
            dtype=dtype,
            max_model_len=max_model_len,
            batch_buckets=batch_buckets,
            mxfp4=mxfp4,
            generation_config=generation_config,
            **engine,
        )

    def on_same_weights(self, *, speculative: bool = True, **changes: Any) -> LLM:
        """Return another engine over these weights, with these fields of EngineConfig changed.

        speculative False decodes plainly.
        """
        drafts = speculative and self.speculative is not None
        made = type(self)(
            (self.target_config, self.params["target"]),
            (self.draft_config, self.params["draft"]) if drafts and self.draft_config else None,
            self.speculative if drafts else None,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            config=replace(self.config, **changes),
            dtype=self.dtype,
            weights=[w if drafts else {**w, "draft": {}} for w in self.weights],
        )
        made._sampling, made._inputs.default_params = self._sampling, self._inputs.default_params
        return made

    def __repr__(self) -> str:
        return self.describe() if hasattr(self, "runner") else object.__repr__(self)

    def describe(self) -> str:
        """Describe models, kernels and speculation in at most three lines.

        The draft's aux layers and norm switches are those that loading resolved.
        """
        t, dtypes = self.target_config, self.dtype.name
        own = self.draft_cache_dtype.name if self.draft_config is not None else None
        if self.cache_dtype != self.dtype or own not in (None, self.cache_dtype.name):
            of_draft = "" if own in (None, self.cache_dtype.name) else f", the draft's {own}"
            dtypes += f" (KV cache {self.cache_dtype.name}{of_draft})"
        lines = [
            f"target: {t.model_type}, {t.num_layers} layers, hidden size {t.hidden_size}, "
            f"vocabulary {t.vocab_size}, {dtypes} on {jax.devices()[0].device_kind}, "
            + (f"{len(self.engines)} replicas, " if len(self.engines) > 1 else "")
            + f"kernels: {self.kernels}"
        ]
        s, d = self.speculative, self.draft_config
        if s and d:
            size = getattr(d, "draft_vocab_size", None)
            vocabulary = "" if size is None else f", vocabulary {size}"
            rounds = self.runner.rounds_per_step
            lines.append(
                f"draft: {d.method}{vocabulary}, "
                f"K = {self._numbers_of_drafts}, rejection {s.rejection_sample_method}, "
                f"drafts {s.draft_sample_method}, "
                + (f"fallback {s.fallback_method}, " if s.fallback_method else "")
                + f"compilation {self.config.compilation}"
                + (f", {rounds} rounds a step" if rounds > 1 else "")
            )
            switches = [
                f"{n} {getattr(d, n)}"
                for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
                if hasattr(d, n)
            ]
            if d.aux_layers:
                lines.append(
                    ", ".join([f"aux layers (boundary ids) {list(d.aux_layers)}", *switches])
                )
        return "\n".join(lines)

    @property
    def _numbers_of_drafts(self) -> str:
        """K, and whether it adapts: then the K of rounds, and how many rounds had each so far."""
        choice, K = self.engines[0].choice, self.runner.num_speculative_tokens
        s = self.speculative
        if choice is None or s is None or not s.adaptive:
            return str(K)
        rounds = self.timings.num_rounds_of
        had = ", ".join(f"{n}: {rounds[n]}" for n in choice.numbers if n in rounds)
        so_far = f"; rounds {had}" if had else ""
        return f"{', '.join(map(str, choice.numbers))} (adaptive{so_far})"

    @property
    def engine(self) -> Engine:
        """The engine, for tools that drive a single one; ConfigError if there are several."""
        if len(self.engines) != 1:
            raise ConfigError(f"data_parallel_size: expected 1 here, got {len(self.engines)}")
        return self.engines[0]

    # --- several processes ---

    @property
    def follows(self) -> bool:
        """Whether another process schedules this engine, so that it can only `follow`."""
        return self._channel is not None and not self._channel.leads

    def follow(self) -> None:
        """Run what process 0 runs, until it closes its LLM.

        Every process makes the same LLM. Process 0 generates, the others follow. Returns at once
        in process 0, and where there are no others.
        """
        if self.follows:
            self.runner.resident.follow()

    def close(self) -> None:
        """Let the processes that follow this one go on with what comes after `follow`."""
        if self._channel is not None and self._channel.leads:
            self._channel.close("its leader has closed it")

    # --- counts and times ---

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Acceptance of the drafts."""
        return self.serving.stats.metrics

    @property
    def timings(self) -> Timings:
        """Wall clock of prefill and decoding."""
        return self.serving.stats.timings

    @property
    def latency(self) -> LatencyMetrics:
        """Waiting times of the requests."""
        return self.serving.stats.latency

    @property
    def scheduling(self) -> SchedulerCounts:
        """Preemptions, and hits of the prefix cache."""
        return self.serving.stats.scheduling

    def get_metrics(self) -> list[Counter | Vector]:
        """Return acceptance counts as vLLM does: by its names, none without speculation."""
        return as_vllm(self.metrics) if self.speculative else []

    def reset_metrics(self) -> None:
        """Set all counts and times to zero."""
        self.serving.reset_stats()

    @property
    def _label(self) -> str:
        return "speculative decoding" if self.speculative else "plain decoding"

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as transformers has it; ConfigError without one."""
        if self.tokenizer is None:
            raise ConfigError("tokenizer: expected a target that comes with one, got none")
        return self.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return new SamplingParams with what the target's generation_config.json proposes.

        Its fields may be assigned. Requests without parameters take SamplingParams() all the same,
        unless the LLM has generation_config="auto".
        """
        return self._sampling.of_model()

    @checks_arguments
    def reset_prefix_cache(self, **options: bool) -> bool:
        """Forget the prompts whose keys and values are kept; False while requests run.

        options: vLLM's keywords, with the values that change nothing.
        """
        own_keys("LLM.reset_prefix_cache", options, (), RESET_PREFIX_CACHE)
        self._refuse_unless_leading()

        def forget() -> bool:
            if self.serving.has_requests:
                return False
            for engine in self.engines:
                engine.forget_prefixes()
            return True

        return self._driver.alone(forget)

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            refuse_attribute("LLM", name)

    # --- generating ---

    @checks_arguments
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        progress: bool = False,
        callback: Callback | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate for one chat (a list of {"role", "content"}) or several; see generate.

        content: a text, a list of {"type": "text", "text"}, or None.
        chat_template: in place of the checkpoint's.
        add_generation_prompt, continue_final_message: whether the prompt ends with the start of
            the assistant's turn, or leaves the last message open.
        tools: descriptions of functions, for templates that list them.
        chat_template_kwargs: further variables of the template, such as enable_thinking.

        ConfigError for a prompt of any other kind.
        """
        if options:
            own_keys("LLM.chat", options, keywords_of(LLM.chat), GENERATE)
        chat = ChatOptions(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        shows_bar = shows_progress(progress, use_tqdm)
        return self._generate(as_chats(messages), sampling_params, shows_bar, callback, chat)

    @checks_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        progress: bool = False,
        callback: Callback | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return one output for each prompt, in the order of the prompts.

        prompts: one or a list of texts, lists of token ids, or chats (lists of
            {"role", "content"}, put through the chat template); vLLM's {"prompt": text} and
            {"prompt_token_ids": ids} work too.
        sampling_params: one for all prompts, or one for each; None: SamplingParams(), or with
            generation_config="auto" what the target proposes.
        progress: shows a bar on standard error. use_tqdm: the same in vLLM's words.
        options: vLLM's other keywords, with the values that change nothing.
        callback: called with each Increment, in this thread. An exception in it ends that text
            (finish_reason "error") and no other.

        Every prompt is checked before anything runs; ConfigError says which one is wrong. Ctrl-C
        raises Interrupted, a KeyboardInterrupt with the finished outputs; the engine stays usable,
        and the requests of other calls go on. An error that concerns one text alone ends that text:
        finish_reason "error", and the exception in `error`. EngineError if the engine itself fails.
        """
        if options:
            own_keys("LLM.generate", options, keywords_of(LLM.generate), GENERATE)
        shows_bar = shows_progress(progress, use_tqdm)
        return self._generate(prompts, sampling_params, shows_bar, callback, PLAIN_CHAT)

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        shows_bar: bool,
        callback: Callback | None,
        chat: ChatOptions,
    ) -> list[RequestOutput]:
        """Run generate with its arguments checked. chat: how chats are rendered."""
        if callback is not None and not callable(callback):
            raise ConfigError(f"callback: expected a function or None, got {shown(callback)}")
        self._refuse_unless_leading()
        requests = self._inputs.make_requests(
            prompts, sampling_params, streams=callback is not None, chat=chat
        )
        with (
            progress_bar(self._label, len(requests))
            if shows_bar
            else contextlib.nullcontext(no_progress) as advance
        ):
            try:
                failed = self._run(requests, advance, callback)
            except KeyboardInterrupt as e:
                raise Interrupted(
                    request_outputs(requests, self.tokenizer, finished_only=True)
                ) from e
        for request, error in failed.items():  # its end may have been read before its callback ran
            request.finish_reason, request.error = "error", error
        return request_outputs(requests, self.tokenizer)

    def _run(
        self,
        requests: Sequence[Request],
        advance: Callable[[int], None],
        callback: Callback | None,
    ) -> dict[Request, Exception]:
        """Run the requests to their ends; return what the callback raised, and for which."""
        failed: dict[Request, Exception] = {}
        by_place = {(r.index, r.sample): r for r in requests} if callback else {}
        increments = self._driver.run(requests, streams=callback is not None)
        with contextlib.closing(increments):
            for increment in increments:
                if callback is not None:
                    request = by_place[increment.index, increment.sample]
                    if request not in failed:
                        try:
                            self._driver.call_back(callback, increment)
                        except Exception as e:
                            logger.warning("a callback raised: its text ends here", exc_info=e)
                            failed[request] = e
                            self._driver.fail(request, e)
                if increment.finish_reason is not None:
                    advance(1)
        return failed

    @checks_arguments
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Increment]:
        """Yield an Increment for each text that a result extends, as soon as it is read.

        A result is that of a round, or of all rounds of a step without drafts.

        Arguments are those of generate, and are checked before this returns. Closing or dropping
        the iterator cancels unfinished texts. Several streams and calls of generate may overlap.
        An error that concerns one text alone ends it with an Increment whose finish_reason is
        "error". EngineError if the engine itself fails.
        """
        requests = self.make_requests(prompts, sampling_params, streams=True)
        return self._driver.run(requests, streams=True)

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        streams: bool = False,
    ) -> list[Request]:
        """Tokenise and check every prompt, and make n requests for each.

        For callers that drive `serving` directly (jaxspec.tools.benchmark.throughput).
        """
        self._refuse_unless_leading()
        return self._inputs.make_requests(prompts, sampling_params, streams=streams)

    # --- compiling ahead ---

    def round_config(self, *, sampled: bool, truncated: bool, batch: int = 1) -> RoundConfig:
        """Return the static description of this engine's rounds.

        sampled, truncated: whether some request of the batch samples, and truncates.
        batch: requests that run together.
        """
        return self.runner.configs.get(
            SamplingFeatures(
                sampled=sampled, processors=frozenset({"truncation"} if truncated else ())
            ),
            batch=batch,
        )

    @checks_arguments
    def warmup(
        self,
        *,
        batch_sizes: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        sampling_params: Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> int:
        """Compile the programs of generate ahead of decoding; return the number of programs.

        batch_sizes: for each run, the most requests together (None: every bucket).
        lengths: prompt plus max_tokens (None: every page bucket up to max_model_len).
        sampling_params: kinds of request, in any mixture; None: whatever requests ask.

        For None a few programs of each shape serve every request. Greedy, sampled, truncated and
        scored ones have rounds of their own; the others share those that compute all features.
        All but greedy, sampled and truncated ones have programs for fewer shapes. They run in the
        next larger one, and all beside them too. A second call that names such kinds compiles them
        for every shape.
        Kinds that are named have just their own programs, which are faster. A request of another
        kind then compiles once more, and so does one with more stop token ids than any of these
        kinds, than four and than the target's end-of-text ids, or whose bad words have more tokens
        together than those of any of these kinds, and than 32. Meanwhile the others go on.

        progress: shows a bar on standard error, or a line where that is no terminal.
        """

        sizes = _counts("batch_sizes", batch_sizes)
        tokens = _counts("lengths", lengths)
        kinds = None if sampling_params is None else self._kinds(sampling_params)

        def compile_programs(engine: Engine) -> int:
            shapes = shapes_up_to(engine.runner, sizes, tokens)
            if kinds is None:
                return engine.warm_levels(shapes)
            return compile_ahead(engine, kinds, shapes)

        return self._for_each_engine(compile_programs, progress)

    @checks_arguments
    def warmup_for(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> int:
        """Compile the programs of generate(prompts, sampling_params); return their number.

        generate can then be timed without compilation. Checks the prompts as generate does.
        progress: as in `warmup`.
        """
        requests = self.make_requests(prompts, sampling_params)
        if not requests:
            return 0
        kinds = [r.params for r in requests]
        return self._for_each_engine(
            lambda engine: compile_ahead(engine, kinds, shapes_of(engine.runner, requests)),
            progress,
        )

    def _kinds(self, sampling_params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """Return copies of the kinds of request to warm up for."""
        listed = items_of(sampling_params)
        if listed is None or not all(isinstance(params, SamplingParams) for params in listed):
            raise ConfigError(
                "sampling_params: expected a list of SamplingParams or None, "
                f"got {shown(sampling_params)}"
            )
        return [self._inputs.checked_copy(params) for params in listed]

    def _refuse_unless_leading(self) -> None:
        if self.follows:
            raise ConfigError(
                "process: expected 0, which alone takes requests, "
                f"got {jax.process_index()}, which may call follow()"
            )

    def _for_each_engine(self, compile_programs: Callable[[Engine], int], progress: bool) -> int:
        """Compile the programs of each replica; return the number of all."""
        self._refuse_unless_leading()
        is_shown = shows_progress(progress, None)

        def compile_shown(engine: Engine) -> int:
            with compile_progress(is_shown) as engine.runner.on_compiled:
                try:
                    return compile_programs(engine)
                finally:
                    engine.runner.on_compiled = report_nothing

        return self._driver.alone(lambda: sum(map(compile_shown, self.engines)))


def _counts(name: str, values: Sequence[int] | None) -> list[int] | None:
    """Return a list of integers of at least 1, or None; ConfigError for anything else."""
    if values is None:
        return None
    listed = items_of(values)
    if not listed or not all(map(is_positive_int, listed)):
        raise ConfigError(
            f"{name}: expected a list of integers of at least 1 or None, got {shown(values)}"
        )
    return [int(value) for value in listed]


def _are_same_arrays(params: Params, others: Params) -> bool:
    (arrays, tree), (other_arrays, other_tree) = map(jax.tree.flatten, (params, others))
    return tree == other_tree and all(map(is_, arrays, other_arrays))
