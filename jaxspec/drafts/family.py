"""DraftFamily: the functions of a draft with layers, and the parts that families share.

A family is a module. It names the defaults that it does not override, as in
`target_hidden = keep_hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import Visibility
from jaxspec.config import (
    AttentionConfig,
    ConfigError,
    DraftConfig,
    Ops,
    RopeConfig,
    SpeculativeConfig,
    read_bool,
    read_int,
    read_number,
    read_object,
    refuse_unless,
)
from jaxspec.drafts.head_layout import is_rope_table, warn_of_guess
from jaxspec.layers.context import Pass
from jaxspec.layers.markov import MarkovStep
from jaxspec.layers.params import Params
from jaxspec.layers.products import vocab_logits
from jaxspec.models import TargetConfig

Shapes = Mapping[str, tuple[int, ...]]  # of a checkpoint's tensors, by canonical name


class LayeredConfig(DraftConfig, Protocol):
    """The static shape of a draft with layers."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        ...

    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        ...

    @property
    def tied_lm_head(self) -> bool:
        """Whether the head is the target's embedding."""
        ...


class BlockConfig(LayeredConfig, Protocol):
    """The static shape of a draft that makes a block of tokens in one pass."""

    @property
    def mask_token_id(self) -> int:
        """The token of the block's rows whose own token is not known."""
        ...

    @property
    def sample_from_anchor(self) -> bool:
        """Whether the block's first row, which reads the last known token, drafts too."""
        ...

    @property
    def block_capacity(self) -> int:
        """Tokens that a whole block drafts."""
        ...

    @property
    def visibility(self) -> tuple[Visibility, ...]:
        """For each of cache_groups, which of the block's rows see each other."""
        ...

    @property
    def corrects_logits(self) -> bool:
        """Whether a token's logits depend on the drafts before it (see step_logits)."""
        ...

    @property
    def confidence_threshold(self) -> float:
        """Chance of acceptance below which a request's drafts end; 0 for no end."""
        ...


class DraftFamily(Protocol):
    """The functions of every family; cfg is the family's own config, a LayeredConfig."""

    def config_from_checkpoint(
        self,
        config: Mapping[str, Any],
        shapes: Shapes,
        target: TargetConfig,
        overrides: SpeculativeConfig,
    ) -> Any:
        """Read the config of a checkpoint from its config.json and its tensors' shapes."""
        ...

    def canonical_name(self, name: str) -> str:
        """Return the name that param_specs gives a tensor of a checkpoint."""
        ...

    def ignored_tensor(self, cfg: Any, name: str) -> bool:
        """Return whether a tensor of a checkpoint is not a weight of the draft."""
        ...

    def param_specs(self, cfg: Any) -> Params:
        """Return the weights: a ParamSpec per array, in the structure of the params."""
        ...

    def logits(self, params: Params, cfg: Any, head_input: jax.Array, ops: Ops) -> jax.Array:
        """Return float32 logits [..., draft_vocab] of head_input [..., D]."""
        ...


class HeadFamily(DraftFamily, Protocol):
    """A family that reads the target's hidden states."""

    def target_hidden(self, cfg: Any, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
        """Return the features of the target's pass that the draft keeps, [batch, rows, width].

        hidden is the target's hidden state after its final norm, aux its aux_layers side by side.
        """
        ...

    def fuse(self, params: Params, cfg: Any, hidden: jax.Array, ops: Ops) -> jax.Array:
        """Map target features [batch, rows, width] to the draft's hidden state [batch, rows, D]."""
        ...


class StepFamily(HeadFamily, Protocol):
    """A family that drafts a token a pass (jaxspec.drafts.autoregressive)."""

    def forward(
        self,
        params: Params,
        cfg: Any,
        tokens: jax.Array,
        hidden: jax.Array,
        pass_: Pass,
        caches: KVCache,
    ) -> DraftOutput:
        """Run the draft once over tokens [batch, rows] and hidden [batch, rows, D].

        A row's token is the one after the row's position.
        """
        ...


class BlockFamily(HeadFamily, Protocol):
    """A family that drafts a block of tokens a pass (jaxspec.drafts.block)."""

    def write_context(
        self, params: Params, cfg: Any, hidden: jax.Array, pass_: Pass, caches: KVCache
    ) -> KVCache:
        """Write keys and values of hidden [batch, rows, D], `fuse`'s output, into the caches."""
        ...

    def forward(
        self, params: Params, cfg: Any, tokens: jax.Array, pass_: Pass, caches: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Run the draft over a block's tokens [batch, rows].

        Returns the head's input [batch, rows, D], and the caches with these rows written.
        """
        ...

    def first_head_state(self, cfg: Any, hidden: jax.Array) -> jax.Array | None:
        """Return what the head carries from one row to the next, before the block's first; or None.

        hidden: [batch, K, D], the head's inputs
        """
        ...

    def step_logits(
        self,
        params: Params,
        cfg: Any,
        base: jax.Array,
        hidden: jax.Array,
        token: jax.Array,
        head_state: jax.Array | None,
        ops: Ops,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits [batch, draft_vocab] of a draft whose predecessor is token [batch].

        base:   [batch, draft_vocab], the logits of `logits`
        hidden: [batch, D], the head's input

        The second result is the next head_state.
        """
        ...

    def markov_step(
        self,
        params: Params,
        cfg: Any,
        base: jax.Array,
        step: jax.Array | int,
        token: jax.Array,
        ops: Ops,
    ) -> MarkovStep | None:
        """Return a step whose kernels draw from step_logits' logits, or find the largest of them.

        None without such a kernel, and always for a head that carries a head_state.

        base:  [batch, K, draft_vocab], the logits of `logits`, whole on each device
        token: int32 [batch], the draft's predecessor
        """
        ...


class ConfidentFamily(BlockFamily, Protocol):
    """A family of blocks whose heads may have a confidence head; others have no threshold."""

    def confidence(
        self, params: Params, cfg: Any, hidden: jax.Array, token: jax.Array
    ) -> jax.Array:
        """Return the chance float32 [batch] that a draft will be accepted if those before it are.

        It depends on the head's input hidden [batch, D] and the token [batch] before the draft.
        """
        ...


@dataclass(frozen=True)
class DraftOutput:
    """The outputs of one pass of a draft.

    head_input: [batch, rows, D], the input of `logits`
    feedback:   [batch, rows, D], the hidden state of the next step
    caches:     the draft's caches with these rows written

    If the pass names a last_row, the first two may hold that row alone, [batch, 1, D].
    """

    head_input: jax.Array
    feedback: jax.Array
    caches: KVCache


def keep_hidden(cfg: LayeredConfig, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """Return the target's hidden state after its final norm, unchanged."""
    return hidden


def keep_aux(cfg: LayeredConfig, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """Return the target's hidden states at aux_layers, side by side."""
    assert aux is not None
    return aux


def keep_features(params: Params, cfg: LayeredConfig, hidden: jax.Array, ops: Ops) -> jax.Array:
    """Return the target's features unchanged; `forward` joins them with the embedding."""
    return hidden


def head_logits(params: Params, cfg: LayeredConfig, head_input: jax.Array, ops: Ops) -> jax.Array:
    """Return float32 logits [..., draft_vocab] of head_input [..., D].

    The head is the draft's or the target's.
    """
    return vocab_logits(head_input, params["lm_head"], ops)


def same_name(name: str) -> str:
    """Return the name unchanged: checkpoints have one layout."""
    return name


def hidden_width(cfg: LayeredConfig, target: TargetConfig) -> int:
    """Width of the target features that the draft reads for each token."""
    if not cfg.aux_layers:
        return target.hidden_size
    return getattr(target, "streams_size", target.hidden_size) * len(cfg.aux_layers)


class ShapedLikeTarget:
    """Base of a config whose layers are the target's: its dimensions are those of `target`."""

    target: Any

    @property
    def attention(self) -> Any:
        return self.target.attention

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.target.intermediate_size

    @property
    def rms_norm_eps(self) -> float:
        return self.target.rms_norm_eps

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def maps_vocabulary(self) -> bool:
        return False

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups."""
        return (0,)


def draft_attention(
    layer: Mapping[str, Any], shapes: Shapes, *, by_doctor: bool = True
) -> AttentionConfig:
    """Return the attention config of the draft's layer.

    A head_dim that the config lacks comes from q_proj's rows, since hidden / heads does not hold
    everywhere. ConfigError if the tensors contradict the number of heads or key/value heads.
    """
    refuse_unless(layer, "hidden_act", "silu")
    refuse_unless(layer, "mlp_bias", False)
    num_heads = read_int(layer, "num_attention_heads")
    num_kv_heads = read_int(layer, "num_key_value_heads", num_heads)
    q, k = (shapes.get(f"layers.0.self_attn.{x}_proj.weight") for x in "qk")
    head_dim = read_int(
        layer, "head_dim", q[0] // num_heads if q else read_int(layer, "hidden_size") // num_heads
    )
    for name, shape, heads in (("q", q, num_heads), ("k", k, num_kv_heads)):
        if shape is not None and shape[0] != heads * head_dim:
            raise ConfigError(
                f"layers.0.self_attn.{name}_proj.weight: expected {heads} heads of {head_dim} "
                "rows by the draft's config, "
                f"got {shape[0]} rows"
            )
    if _rope_theta(layer) is None:
        warn_of_guess("rope_theta", "10000, Hugging Face's default", by_doctor=by_doctor)
    bias = read_bool(layer, "attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig.from_hf(layer),
        qk_norm=layer.get("model_type") == "qwen3",
        # SafeAI's heads for Qwen2 have biases here, under a key of their own, and none in o_proj.
        qkv_bias=bias or read_bool(layer, "qkv_bias", False),
        o_bias=bias,
        rms_norm_eps=read_number(layer, "rms_norm_eps", 1e-6),
    )


def _rope_theta(layer: Mapping[str, Any]) -> object:
    """Return the rotation's base as the config has it, in any of its places; None if in none."""
    places = (read_object(layer, "rope_parameters"), read_object(layer, "rope_scaling"), layer)
    return next((p["rope_theta"] for p in places if p.get("rope_theta") is not None), None)


def draft_window(layer: Mapping[str, Any], given: int | None) -> int | None:
    """Return the sliding window of the draft's layers in tokens, None for full attention.

    It is the given one, or else that of the head's config: speculators 0.9 gives new drafts one.
    """
    if given is not None:
        return given
    kinds = set(layer.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        refuse_unless(layer, "use_sliding_window", False)
        return None
    if kinds != {"sliding_attention"} or not layer.get("sliding_window"):
        raise ConfigError(
            "layer_types: expected all full_attention, or all sliding_attention with a "
            "sliding_window, in the draft's config, "
            f"got {sorted(kinds)}"
        )
    return read_int(layer, "sliding_window")


def draft_eps(layer: Mapping[str, Any], *, by_doctor: bool = True) -> float:
    """Return the epsilon of the draft's norms; a WARNING says if it is the default."""
    if layer.get("rms_norm_eps") is None:
        warn_of_guess("rms_norm_eps", "1e-06", by_doctor=by_doctor)
    return read_number(layer, "rms_norm_eps", 1e-6)


def is_no_weight(cfg: Any, name: str) -> bool:
    """Return whether a tensor is not a weight of the draft's layers.

    Loading reads vocabulary maps separately, and the config implies rotation tables.
    """
    return name in ("d2t", "t2d") or is_rope_table(name)
