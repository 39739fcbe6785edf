"""TargetFamily: the functions of a family of targets. A family is a module that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jaxspec.cache.arrays import KVCache
from jaxspec.config import Ops, TargetConfig
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params
from jaxspec.models.decoder import TargetOutput


class TargetFamily(Protocol):
    """The functions of a family; cfg is the family's own config."""

    def config_from_hf(self, config: Mapping[str, Any]) -> TargetConfig:
        """Read the config of a checkpoint from its config.json."""
        ...

    def param_specs(self, cfg: Any) -> Params:
        """Return the weights: a ParamSpec per array, in the structure of the params."""
        ...

    def ignored_tensor(self, cfg: Any, name: str) -> bool:
        """Return whether a tensor of a checkpoint is not a weight of the decoder."""
        ...

    def forward(
        self,
        params: Params,
        cfg: Any,
        tokens: jax.Array,
        pass_: Pass,
        caches: KVCache,
        *,
        aux_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run the model over tokens int32 [batch, rows]; aux_layers: see decoder.run_layers."""
        ...

    def logits(self, params: Params, cfg: Any, hidden: jax.Array, ops: Ops) -> jax.Array:
        """Return float32 logits [..., vocab] of hidden [..., D]."""
        ...


class FamilyWithMtp(TargetFamily, Protocol):
    """A family whose decoder layer is also the layer of its MTP module (drafts/mtp.py)."""

    def layer_specs(self, cfg: Any, prefix: str) -> Params:
        """Return one decoder layer's weights under `prefix`."""
        ...

    def decoder_layer(
        self, layer: Params, cfg: Any, x: jax.Array, cache: Any, pass_: Pass
    ) -> tuple[jax.Array, Any]:
        """Run one layer on x [batch, rows, D]."""
        ...
