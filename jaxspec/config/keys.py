"""Keys of settings: unknown ones, other names of known ones, and vLLM's that have no setting here.

vLLM's values that change nothing here are accepted, so that its scripts run as they are.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from jaxspec.config.reading import ConfigError, shown

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Foreign:
    """A key of vLLM's without a setting here.

    accepted: the values that change nothing here; None: any value
    why: what an error says about other values
    """

    accepted: tuple[object, ...] | None
    why: str = ""

    def check(self, key: str, value: object) -> None:
        """Raise ConfigError for a value that is not accepted."""
        # By type too: 1 == True, and an array has no truth value.
        if self.accepted is not None and not any(
            type(value) is type(each) and value == each for each in self.accepted
        ):
            wanted = " or ".join(map(repr, self.accepted))
            why = f" ({self.why})" if self.why else ""
            raise ConfigError(f"{key}: expected {wanted}{why}, got {shown(value)}")


@dataclass(frozen=True)
class ForeignKeys:
    """The keys of vLLM's for one class of settings.

    values: those without a setting here
    names: vLLM's name -> the name of the same setting here
    """

    values: Mapping[str, Foreign]
    names: Mapping[str, str]


NO_FOREIGN_KEYS = ForeignKeys({}, {})
_ANY, _OFF, _NONE = Foreign(None), Foreign((None, False)), Foreign((None,))
_ONE_HOST = "jax.distributed joins the processes of several hosts"
_NO_CODE = "no code of a checkpoint runs here"
_NO_GRAMMARS = "there are no grammars here"
_COMPILED = "processors are part of the compiled round"
_ORDER = "requests run in the order of their arrival"
_NO_WORKERS = "the engine runs in this process, as `LLM.engine`"
_PROFILER = "jax.profiler.trace(folder) records a profile"

# Keywords of vLLM's LLM.
ENGINE = ForeignKeys(
    {
        "additional_config": Foreign((None, {})),
        "allowed_local_media_path": Foreign((None, ""), "prompts are text"),
        "async_scheduling": _ANY,
        "attention_backend": _NONE,
        "attention_config": _NONE,
        "calculate_kv_scales": Foreign((None, False), "a checkpoint has scales, or they are 1"),
        "compilation_config": Foreign((None, 0, 1, 2, 3), "`compilation` chooses the programs"),
        "convert": Foreign(("auto", "none"), "models generate text"),
        "cpu_offload_gb": Foreign((None, 0, 0.0), "weights stay on the device"),
        "cudagraph_capture_sizes": _ANY,
        "disable_async_output_proc": _ANY,
        "disable_cascade_attn": _ANY,
        "disable_custom_all_reduce": _ANY,
        "disable_chunked_mm_input": _ANY,
        "disable_log_stats": _ANY,
        "disable_sliding_window": Foreign((False,), "windows are those of the checkpoint"),
        "distributed_executor_backend": Foreign((None, "mp", "uni"), _ONE_HOST),
        "download_dir": Foreign((None,), "HF_HOME names the folder of what the hub sends"),
        "enable_chunked_prefill": Foreign((None, True), "long prompts are always cut"),
        "enable_log_requests": _ANY,
        "enable_lora": Foreign((None, False), "there are no adapters here"),
        "enable_prompt_embeds": Foreign((None, False), "prompts are text or token ids"),
        "enable_sleep_mode": Foreign((None, False), "weights stay on the device"),
        "enforce_eager": _ANY,
        "guided_decoding_backend": _ANY,
        "hf_overrides": Foreign((None, {}), "the checkpoint's config.json is read as it is"),
        "hf_token": Foreign((None,), "HF_TOKEN has the hub's token"),
        "ignore_patterns": _ANY,
        "io_processor_plugin": _NONE,
        "kv_cache_memory_bytes": Foreign((None,), "num_gpu_blocks_override limits the KV cache"),
        "kv_transfer_config": Foreign((None,), "keys and values stay in their engine"),
        "limit_mm_per_prompt": _ANY,  # a prompt with an image is an error by itself
        "load_format": Foreign(("auto", "safetensors", "hf")),
        "logits_processors": Foreign((None, [], ()), _COMPILED),
        "logprobs_mode": Foreign(("raw_logprobs",), "log-probabilities are of raw logits"),
        "long_prefill_token_threshold": Foreign((0,), "max_num_batched_tokens bounds a step"),
        "max_logprobs": Foreign((20,), "SamplingParams.logprobs takes up to 20, or -1"),
        "max_lora_rank": _ANY,
        "max_loras": _ANY,
        "max_seq_len_to_capture": _ANY,
        "mm_processor_kwargs": Foreign((None, {}), "prompts are text"),
        "model_impl": Foreign(("auto",), "models are those of jaxspec"),
        "override_generation_config": Foreign((None, {}), "SamplingParams has these settings"),
        "pipeline_parallel_size": Foreign((None, 1), "tensor_parallel_size shares a model"),
        "pooler_config": Foreign((None,), "models generate text"),
        "prefix_caching_hash_algo": _ANY,
        "profiler_config": Foreign((None, {}), _PROFILER),
        "runner": Foreign(("auto", "generate"), "models generate text"),
        "safetensors_load_strategy": _ANY,
        "seed": Foreign((None, 0), "SamplingParams.seed is the seed of a request"),
        "scheduling_policy": Foreign(("fcfs",), _ORDER),
        "served_model_name": _ANY,
        "skip_tokenizer_init": Foreign((False,), "prompts may be token ids all the same"),
        "structured_outputs_config": Foreign((None, {}), _NO_GRAMMARS),
        "swap_space": _ANY,
        "task": Foreign((None, "auto", "generate"), "models generate text"),
        "tokenizer_mode": Foreign(("auto", "hf"), "the checkpoint's own tokenizer is read"),
        "tokenizer_revision": Foreign((None,), "`revision` holds for the tokenizer too"),
        "trust_remote_code": Foreign((None, False), _NO_CODE),
        "use_tqdm_on_load": _ANY,
        "use_v2_block_manager": _ANY,
        "worker_cls": Foreign(("auto",), _NO_WORKERS),
        "worker_extension_cls": Foreign((None, ""), _NO_WORKERS),
    },
    {"quantization": "quantize"},
)

# Keys of vLLM's speculative_config.
SPECULATIVE = ForeignKeys(
    {
        "attention_backend": _NONE,
        "code_revision": Foreign((None,), _NO_CODE),
        "disable_by_batch_size": Foreign(
            (None,), "num_speculative_tokens_per_batch_size is a schedule"
        ),
        "disable_eagle_block_drop": _OFF,
        "disable_logprobs": _ANY,
        "disable_padded_drafter_batch": _OFF,
        "draft_load_config": _NONE,
        "dspark_draft_topk": _NONE,
        "enable_adaptive_verification": Foreign(
            (None, False),
            "draft_confidence_threshold ends drafts, max_num_verify_tokens limits rows",
        ),
        "enforce_eager": _ANY,
        "index_share_for_mtp_iteration": _NONE,
        "moe_backend": _NONE,
        "parallel_drafting": _OFF,
        "spec_token_tree": _NONE,
        "revision": Foreign((None,), "a revision follows the model's name: owner/name@revision"),
        "speculative_token_tree": _NONE,
        "suffix_decoding_max_cached_requests": Foreign(
            (0,), "drafts come from a request's own text alone"
        ),
        "trust_remote_code": Foreign((None, False), _NO_CODE),
        "use_heterogeneous_vocab": _OFF,
        "use_local_argmax_reduction": _ANY,
    },
    {
        "kv_cache_dtype": "draft_kv_cache_dtype",
        "max_model_len": "draft_max_model_len",
        "quantization": "draft_quantize",
    },
)

# Keywords of vLLM's SamplingParams.
SAMPLING = ForeignKeys(
    {
        "best_of": Foreign((None, 1), "n texts are all returned"),
        "detokenize": Foreign((True,), "texts are always made"),
        "early_stopping": _OFF,
        "extra_args": Foreign((None, {})),
        "flat_logprobs": _OFF,
        "guided_decoding": Foreign((None,), _NO_GRAMMARS),
        "length_penalty": Foreign((1.0, 1)),
        "logprob_token_ids": _NONE,
        "logits_processors": Foreign((None, [], ()), _COMPILED),
        "output_kind": _NONE,
        "prompt_logprob_token_ids": _NONE,
        "repetition_detection": _NONE,
        "skip_clone": _ANY,
        "skip_reading_prefix_cache": Foreign(
            (None, False), "enable_prefix_caching=False turns the cache off for all requests"
        ),
        "spaces_between_special_tokens": Foreign((True,)),
        "stream_interval": _NONE,
        "structured_outputs": Foreign((None,), _NO_GRAMMARS),
        "thinking_token_budget": _NONE,
        "truncate_prompt_tokens": Foreign((None,), "a prompt is never cut"),
        "use_beam_search": _OFF,
    },
    {},
)

# Keywords of vLLM's LLM.generate and LLM.chat.
GENERATE = ForeignKeys(
    {
        "chat_template_content_format": Foreign(("auto", "string"), "content is given as text"),
        "lora_request": Foreign((None,), "there are no adapters here"),
        "mm_processor_kwargs": Foreign((None, {}), "prompts are text"),
        "priority": Foreign((None,), _ORDER),
        "prompt_token_ids": Foreign((None,), "`prompts` may be lists of token ids"),
        "tokenization_kwargs": Foreign((None, {}), "prompts are never cut"),
    },
    {},
)


# Keywords of vLLM's LLM.reset_prefix_cache.
RESET_PREFIX_CACHE = ForeignKeys(
    {
        "reset_connector": _OFF,
        "reset_running_requests": Foreign((None, False), "requests that run keep their blocks"),
    },
    {},
)

# Attributes of vLLM's LLM and of its outputs, and what to do instead.
_DELETE = "weights stay on the device until the LLM is deleted"
_TEXT_ONLY = "models generate text"
_NEW_WEIGHTS = "LLM((config, params)) takes other weights"
_AT_ONCE = "`LLM.generate` takes a list of prompts, and `LLM.stream` yields texts as they grow"
ATTRIBUTES = {
    "apply_model": _NO_WORKERS,
    "beam_search": "SamplingParams(n=...) samples several texts",
    "classify": _TEXT_ONLY,
    "collective_rpc": _NO_WORKERS,
    "default_sampling_params": "`LLM.get_default_sampling_params()` returns them",
    "embed": _TEXT_ONLY,
    "encode": _TEXT_ONLY,
    "enqueue": _AT_ONCE,
    "enqueue_chat": _AT_ONCE,
    "get_tokenizer_group": "`LLM.get_tokenizer()` returns the tokenizer",
    "get_world_size": "tensor_parallel_size and data_parallel_size are in `LLM.config`",
    "init_weight_transfer_engine": _NEW_WEIGHTS,
    "llm_engine": _NO_WORKERS,
    "model_config": "the settings are in `LLM.config`, the target's in `LLM.target_config`",
    "preprocess_chat": "`LLM.get_tokenizer()` has apply_chat_template",
    "renderer": "`LLM.get_tokenizer()` has apply_chat_template",
    "request_counter": "outputs have their `request_id`",
    "reset_mm_cache": "prompts are text",
    "reward": _TEXT_ONLY,
    "score": _TEXT_ONLY,
    "set_tokenizer": "the keyword `tokenizer` of LLM sets it",
    "shutdown": "deleting the LLM frees its memory",
    "sleep": _DELETE,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "supported_tasks": _TEXT_ONLY,
    "update_weights": _NEW_WEIGHTS,
    "vllm_config": "the settings are in `LLM.config`, the target's in `LLM.target_config`",
    "wait_for_completion": _AT_ONCE,
    "wake_up": _DELETE,
}


class NoSuchAttribute(ConfigError, AttributeError):
    """An attribute of vLLM's that is not here; hasattr gives False."""


def refuse_attribute(what: str, name: str) -> NoReturn:
    """Raise for an attribute that an object of this class lacks, in one sentence."""
    if name in ATTRIBUTES:
        raise NoSuchAttribute(f"`{what}.{name}` is not here: {ATTRIBUTES[name]}")
    raise AttributeError(f"{what!r} object has no attribute {name!r}")


def keywords_of(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that a method can be given by keyword."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]


def checks_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method: a call that its signature does not allow raises ConfigError."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as e:
            name = function.__qualname__.removesuffix(".__init__")
            names = ", ".join(keywords_of(function)) or "vLLM's, by keyword"
            got = str(e).removeprefix("got ").replace("missing a required argument: ", "none for ")
            raise ConfigError(
                f"{name}: expected the arguments of its signature, got {got}; they are {names}"
            ) from None
        return function(*args, **kwargs)

    return checked


def nearest(key: str, names: Collection[str]) -> str:
    """Return the name that is the most like a key.

    An equal first word counts, as typing errors and shortened names keep it.
    """
    first = key.split("_")[0]

    def likeness(name: str) -> float:
        ratio = difflib.SequenceMatcher(None, name, key).ratio()
        return ratio + 0.1 * (name.split("_")[0] == first)

    return max(names, key=likeness)


def own_keys(
    what: str, given: Mapping[Any, Any], known: Collection[str], foreign: ForeignKeys
) -> dict[str, Any]:
    """Return the given settings under the names of here.

    ConfigError for a key that neither side knows, with the nearest known one, and for a value of
    vLLM's that would change something. what: names the settings in such an error.
    """
    kept: dict[str, Any] = {}
    for key, value in given.items():
        name = foreign.names.get(key, key) if isinstance(key, str) else key
        if name in foreign.values and name not in known:
            foreign.values[name].check(name, value)
        elif name not in known:
            text = key if isinstance(key, str) else shown(key)
            closest = nearest(text, (*known, *foreign.names, *foreign.values))
            raise ConfigError(
                f"{what}: expected known settings, of which {closest} is the nearest, "
                f"got {shown(key)}"
            )
        elif name in kept or (name != key and name in given):
            raise ConfigError(f"{what}: expected {name} or {key}, got both")
        else:
            kept[name] = value
    return kept


def given_names(given: Mapping[str, Any], foreign: ForeignKeys, prefix: str = "") -> dict[str, str]:
    """Return setting -> the name of vLLM's, after a prefix, under which it was given."""
    return {foreign.names[key]: prefix + key for key in given if key in foreign.names}


@contextlib.contextmanager
def named_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Raise a ConfigError about one of these settings under the name that the caller gave it.

    names: setting -> that name
    """
    try:
        yield
    except ConfigError as e:
        setting, _, rest = str(e).partition(":")
        if setting not in names:
            raise
        raise ConfigError(f"{names[setting]}:{rest}") from e


def checks_keywords(foreign: ForeignKeys = NO_FOREIGN_KEYS) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: its constructor raises ConfigError for arguments that it lacks.

    vLLM's values that change nothing stay readable as attributes of the object.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = frozenset(inspect.signature(init).parameters) - {"self"}

        @wraps(init)
        def checked(self: T, *values: Any, **keywords: Any) -> None:
            names = given_names(keywords, foreign)
            harmless = {k: v for k, v in keywords.items() if k in foreign.values and k not in known}
            if not keywords.keys() <= known:
                keywords = own_keys(cls.__name__, keywords, sorted(known), foreign)
            try:
                with named_as_given(names):
                    init(self, *values, **keywords)
            except TypeError as e:
                try:
                    inspect.signature(init).bind(self, *values, **keywords)
                except TypeError:
                    raise ConfigError(
                        f"{cls.__name__}: expected each setting once, by keyword, got {e}"
                    ) from None
                raise
            for name, value in harmless.items():
                object.__setattr__(self, name, value)

        cls.__init__ = checked
        return cls

    return decorate
