"""Forms of quantised linear modules, and the modules of a model that have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal, TypeVar, cast, get_args

import regex

from jaxspec.config.reading import ConfigError, is_positive_int, shown

Config = TypeVar("Config")
BLOCK = 128  # rows and columns that share a scale, and activations that do
GROUPS = (32, 64, 128)  # sizes of groups of 4-bit weights
SIMPLE = re.compile(r"[\w.-]+")  # names that are regular expressions without repetition
LONGEST_PATTERN = 500
MATCH_SECONDS = 1.0  # nested stars can take a time exponential in a name's length
SCALE_DTYPES = ("bfloat16", "float16", "float32")

Fp8Source = Literal["compressed-tensors", "fp8", "modelopt", "floats"]
Int4Source = Literal["compressed-tensors", "gptq", "awq", "floats"]


@dataclass(frozen=True)
class Fp8Form:
    """Weights in e4m3, multiplied by activations in e4m3.

    scales:     the weights that share a scale: all, an output channel's, or BLOCK x BLOCK
    activation: the activations that share a scale: a token's, BLOCK of a token, or all by a scale
                of the checkpoint
    source:     the layout of the tensors in the checkpoint; "floats": quantised while they load
    """

    scales: Literal["tensor", "channel", "block"]
    activation: Literal["token", "block", "static"]
    source: Fp8Source

    def __str__(self) -> str:
        activations = {
            "token": "a scale per token",
            "block": f"a scale per {BLOCK} of a token",
            "static": "the checkpoint's scale",
        }
        weights = f"{BLOCK} x {BLOCK} block" if self.scales == "block" else self.scales
        return f"fp8 with a scale per {weights}, activations with {activations[self.activation]}"


@dataclass(frozen=True)
class Int4Form:
    """Weights in 4 bits, multiplied by plain activations: (code - zero) * scale.

    group_size:  weights of an output channel that share a scale
    has_zeros:   whether each group has a zero; else all are 8
    zeros_from:  added to the checkpoint's zeros (GPTQ stores them less one)
    scale_dtype: of the scales in the checkpoint
    source:      the layout of the tensors in the checkpoint; "floats": quantised while they load
    """

    group_size: int
    has_zeros: bool
    source: Int4Source
    zeros_from: int = 0
    scale_dtype: str = "float32"

    def __str__(self) -> str:
        zeros = "with zeros" if self.has_zeros else "without zeros"
        return f"4 bits in groups of {self.group_size} {zeros}, {self.scale_dtype} scales"


Form = Fp8Form | Int4Form
Rule = tuple[str, Form | None]


@dataclass(frozen=True)
class Quantization:
    """The linear modules of a model that are quantised, and their forms.

    rules:              (pattern, form) pairs; the first pattern that matches a module's name from
                        its start gives the form. None: plain weights, as where no pattern matches
    kv_scales:          names of the scales of fp8 keys and values, after that of a layer's
                        attention; () for a checkpoint without them
    kv_scales_per_head: whether each KV head has a scale, instead of all heads one
    has_fp8_caches:     whether keys and values are in fp8 unless a caller says otherwise
    """

    rules: tuple[Rule, ...]
    kv_scales: tuple[str, ...] = ()
    kv_scales_per_head: bool = False
    has_fp8_caches: bool = False

    def form_of(self, *names: str) -> Form | None:
        """Return the form of a module, None for plain weights.

        names: of the module; a rule may match any
        """
        if names not in self._known:
            matches = (form for pattern, form in self.rules if _match_any(pattern, names))
            self._known[names] = next(matches, None)
        return self._known[names]

    @cached_property
    def _known(self) -> dict[tuple[str, ...], Form | None]:
        """Forms by names: a model with many experts and rules has millions of pairs."""
        return {}

    @property
    def forms(self) -> tuple[Form, ...]:
        """All forms that modules may have."""
        return tuple(dict.fromkeys(form for _, form in self.rules if form is not None))

    @property
    def made_form(self) -> Quantize | None:
        """Name of the form that plain weights got as they were loaded; None for stored codes."""
        for name, scale_dtype in product(FROM_FLOATS, SCALE_DTYPES):
            if form_of_floats(name, scale_dtype) in self.forms:
                return name
        return None


def quantization_of(cfg: Any) -> Quantization | None:
    """Return the quantisation of a target, or of the model whose weights a draft has.

    A draft_model's config holds that model, and a module of multi-token prediction holds the
    target, whose checkpoint its weights are in. An EAGLE head of Llama 4 holds a target too: a
    model of one layer, without quantisation.
    """
    return getattr(getattr(cfg, "model", getattr(cfg, "target", cfg)), "quantization", None)


Quantize = Literal["fp8", "fp8-block", "int4"]
# The quant_method of a checkpoint; its "fp8" is a name of both.
OwnMethod = Literal["awq", "compressed-tensors", "gptq", "modelopt", "mxfp4"]
_KERNEL = "_marlin"  # vLLM's names of methods with the kernel that multiplies
# Forms that plain weights get, while they load or by the conversion of their checkpoint.
FROM_FLOATS: dict[Quantize, Form] = {
    "fp8": Fp8Form("channel", "token", "floats"),
    "fp8-block": Fp8Form("block", "block", "floats"),
    # Tables take smaller groups where a width is no multiple of these.
    "int4": Int4Form(BLOCK, has_zeros=False, source="floats"),
}


# The head, routers, and the projection before a module of multi-token prediction: no published
# format quantises them unless its config says so.
KEPT: tuple[Rule, ...] = (
    (r"lm_head\Z", None),
    (r".*\.(gate|router|eh_proj|input_proj)\Z", None),
)


def form_of_floats(name: Quantize, scale_dtype: str) -> Form:
    """Return the form that plain weights get by this name.

    scale_dtype: of 4-bit weights; see scale_dtype_of
    """
    form = FROM_FLOATS[name]
    return replace(form, scale_dtype=scale_dtype) if isinstance(form, Int4Form) else form


def while_loading(name: Quantize, scale_dtype: str) -> Quantization:
    """Return the quantisation of plain weights as they load: all matrices of the layers' products.

    name, scale_dtype: see form_of_floats
    """
    return Quantization((*KEPT, (".*", form_of_floats(name, scale_dtype))))


def settled_quantize(key: str, value: object) -> Quantize | OwnMethod | None:
    """Return the value of a setting; ConfigError unless it is None, a form or a method."""
    named = value.removesuffix(_KERNEL) if isinstance(value, str) else None
    if value is not None and named not in (*FROM_FLOATS, *get_args(OwnMethod)):
        raise ConfigError(
            f"{key}: expected None, one of {', '.join(FROM_FLOATS)}, or a checkpoint's own "
            f"method ({', '.join(get_args(OwnMethod))}), got {shown(value)}"
        )
    return cast("Quantize | OwnMethod | None", named)


def left_plain(names: Sequence[str], pattern_of: Callable[[str], str]) -> tuple[Rule, ...]:
    """Return the rules of modules that stay plain.

    Names without special characters have one rule: a call of the matcher takes longer than a name,
    and a mixture of experts has tens of thousands of modules. They share its time limit.
    """
    simple = [pattern_of(name) for name in names if SIMPLE.fullmatch(name)]
    others = [pattern_of(name) for name in names if not SIMPLE.fullmatch(name)]
    joined = ["|".join(f"(?:{pattern})" for pattern in simple)] if simple else []
    return tuple((pattern, None) for pattern in (*joined, *others))


def exactly(name: str) -> str:
    """Return the pattern of one module."""
    return re.escape(name) + r"\Z"


def checked_pattern(pattern: str, key: str) -> str:
    """Return a regular expression of a checkpoint; ConfigError if it is none."""
    try:
        if len(pattern) > LONGEST_PATTERN:
            raise ValueError(f"one of {len(pattern)} characters")
        _compiled(pattern)
    except (regex.error, ValueError, RecursionError, OverflowError) as e:
        raise ConfigError(
            f"quantization_config.{key}: expected regular expressions of at most "
            f"{LONGEST_PATTERN} characters, got {shown(pattern)}: {e}"
        ) from e
    return pattern


def read_names(settings: Mapping[str, Any], *keys: str) -> Sequence[str]:
    """Return the names under all of these keys."""
    found: dict[str, None] = {}
    for key in keys:
        names = settings.get(key)
        if names is None:
            continue
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise ConfigError(
                f"quantization_config.{key}: expected a list of names, got {shown(names)}"
            )
        found |= dict.fromkeys(names)
    return list(found)


def expect(settings: Mapping[str, Any], key: str, *values: object, where: str = "") -> Any:
    """Return a setting; ConfigError unless it is one of these values, or absent where None is."""
    value = settings.get(key)
    if not any(type(value) is type(each) and value == each for each in values):
        wanted = " or ".join(map(repr, values))
        raise ConfigError(
            f"quantization_config{where}: expected {key} {wanted}, got {shown(value)}"
        )
    return value


def block_sizes(value: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block by a config's value, None for any other value."""
    match value:
        case [rows, columns] if is_positive_int(rows) and is_positive_int(columns):
            return rows, columns
    return None


def check_fp8_scheme(scheme: Mapping[str, Any], *dynamic: object) -> None:
    """Raise ConfigError unless a kv_cache_scheme means fp8 with scales in the checkpoint.

    dynamic: values of its key `dynamic` with that meaning, None for no such key
    """
    where = ".kv_cache_scheme"
    expect(scheme, "num_bits", 8, where=where)
    expect(scheme, "type", "float", where=where)
    expect(scheme, "dynamic", *dynamic, where=where)


def scale_dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype of the scales of 4-bit weights: that of config.json, float32 without one.

    config: config.json, or a quantization_config with its dtype
    """
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in SCALE_DTYPES else "float32"


def _match_any(pattern: str, names: tuple[str, ...]) -> bool:
    """Return whether one of the names begins with a match; ConfigError if that takes too long."""
    match = _compiled(pattern).match
    try:
        return any(match(name, timeout=MATCH_SECONDS) is not None for name in names)
    except TimeoutError as e:
        raise ConfigError(
            "quantization_config: expected regular expressions that match within "
            f"{MATCH_SECONDS:g} s, got {shown(pattern)} for {' or '.join(names)}"
        ) from e


@lru_cache(maxsize=65_536)
def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern)
