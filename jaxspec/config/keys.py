"""Keys of settings: unknown ones, other names of known ones, and vLLM's that have no setting here.

vLLM's values that change nothing here are accepted, so that its scripts run as they are.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, TypeVar

from jaxspec.config.reading import ConfigError, shown

T = TypeVar("T")


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

# Keywords of vLLM's LLM.
ENGINE = ForeignKeys(
    {
        "allowed_local_media_path": Foreign((None, ""), "prompts are text"),
        "async_scheduling": _ANY,
        "compilation_config": Foreign((None, 0, 1, 2, 3), "`compilation` chooses the programs"),
        "cpu_offload_gb": Foreign((None, 0, 0.0), "weights stay on the device"),
        "disable_custom_all_reduce": _ANY,
        "disable_chunked_mm_input": _ANY,
        "disable_log_stats": _ANY,
        "distributed_executor_backend": Foreign((None, "mp", "uni"), _ONE_HOST),
        "enable_chunked_prefill": Foreign((None, True), "long prompts are always cut"),
        "enable_lora": Foreign((None, False), "there are no adapters here"),
        "enable_sleep_mode": Foreign((None, False), "weights stay on the device"),
        "enforce_eager": _ANY,
        "generation_config": Foreign(
            ("auto",), "LLM.get_default_sampling_params reads the checkpoint's own"
        ),
        "hf_overrides": Foreign((None, {}), "the checkpoint's config.json is read as it is"),
        "limit_mm_per_prompt": _ANY,  # a prompt with an image is an error by itself
        "load_format": Foreign(("auto", "safetensors", "hf")),
        "max_logprobs": Foreign((20,), "SamplingParams.logprobs takes up to 20, or -1"),
        "pipeline_parallel_size": Foreign((None, 1), "tensor_parallel_size shares a model"),
        "runner": Foreign(("auto", "generate"), "models generate text"),
        "seed": Foreign((None, 0), "SamplingParams.seed is the seed of a request"),
        "skip_tokenizer_init": Foreign((False,), "prompts may be token ids all the same"),
        "swap_space": _ANY,
        "task": Foreign((None, "auto", "generate"), "models generate text"),
        "tokenizer_mode": Foreign(("auto", "hf"), "the checkpoint's own tokenizer is read"),
        "tokenizer_revision": Foreign((None,), "`revision` holds for the tokenizer too"),
        "trust_remote_code": Foreign((None, False), _NO_CODE),
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
        "disable_logprobs": _ANY,
        "disable_padded_drafter_batch": _OFF,
        "draft_load_config": _NONE,
        "enforce_eager": _ANY,
        "moe_backend": _NONE,
        "parallel_drafting": _OFF,
        "spec_token_tree": _NONE,
        "revision": Foreign((None,), "a revision follows the model's name: owner/name@revision"),
        "speculative_token_tree": _NONE,
        "trust_remote_code": Foreign((None, False), _NO_CODE),
        "use_heterogeneous_vocab": _OFF,
    },
    {"max_model_len": "draft_max_model_len", "quantization": "draft_quantize"},
)

# Keywords of vLLM's SamplingParams.
SAMPLING = ForeignKeys(
    {
        "best_of": Foreign((None, 1), "n texts are all returned"),
        "detokenize": Foreign((True,), "texts are always made"),
        "early_stopping": _OFF,
        "extra_args": Foreign((None, {})),
        "flat_logprobs": _OFF,
        "guided_decoding": Foreign((None,), "there are no grammars here"),
        "length_penalty": Foreign((1.0, 1)),
        "logits_processors": Foreign((None, [], ()), "processors are part of the compiled round"),
        "output_kind": _NONE,
        "spaces_between_special_tokens": Foreign((True,)),
        "structured_outputs": Foreign((None,), "there are no grammars here"),
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
        "priority": Foreign((None,), "requests run in the order of their arrival"),
        "tokenization_kwargs": Foreign((None, {}), "prompts are never cut"),
    },
    {},
)


# Attributes of vLLM's LLM, and what to do instead.
_DELETE = "weights stay on the device until the LLM is deleted"
_TEXT_ONLY = "models generate text"
_NO_WORKERS = "the engine runs in this process, as `engine`"
_PROFILER = "jax.profiler.trace(folder) records a profile"
ATTRIBUTES = {
    "apply_model": _NO_WORKERS,
    "beam_search": "SamplingParams(n=...) samples several texts",
    "classify": _TEXT_ONLY,
    "collective_rpc": _NO_WORKERS,
    "embed": _TEXT_ONLY,
    "encode": _TEXT_ONLY,
    "llm_engine": _NO_WORKERS,
    "reward": _TEXT_ONLY,
    "score": _TEXT_ONLY,
    "set_tokenizer": "the keyword `tokenizer` of LLM sets it",
    "sleep": _DELETE,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "wake_up": _DELETE,
}


class NoSuchAttribute(ConfigError, AttributeError):
    """An attribute of vLLM's that is not here; hasattr gives False."""


def refuse_attribute(what: str, name: str) -> NoReturn:
    """Raise for an attribute that an object of this class lacks, in one sentence."""
    if name in ATTRIBUTES:
        raise NoSuchAttribute(f"{what}.{name}: expected no such call here: {ATTRIBUTES[name]}")
    raise AttributeError(f"{what!r} object has no attribute {name!r}")


def keywords_of(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that a method can be given by keyword."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]


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
            likest = nearest(str(key), (*known, *foreign.names))
            raise ConfigError(
                f"{what}: expected known settings, of which {likest} is the nearest, "
                f"got {key!r:.100}"
            )
        elif name in kept or (name != key and name in given):
            raise ConfigError(f"{what}: expected {name} or {key}, got both")
        else:
            kept[name] = value
    return kept


def checks_keywords(foreign: ForeignKeys = NO_FOREIGN_KEYS) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: its constructor raises ConfigError for arguments that it lacks."""

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = frozenset(inspect.signature(init).parameters) - {"self"}

        @wraps(init)
        def checked(self: T, *values: Any, **keywords: Any) -> None:
            if not keywords.keys() <= known:
                keywords = own_keys(cls.__name__, keywords, sorted(known), foreign)
            try:
                init(self, *values, **keywords)
            except TypeError as e:
                try:
                    inspect.signature(init).bind(self, *values, **keywords)
                except TypeError:
                    raise ConfigError(
                        f"{cls.__name__}: expected each setting once, by keyword, got {e}"
                    ) from None
                raise

        cls.__init__ = checked
        return cls

    return decorate
