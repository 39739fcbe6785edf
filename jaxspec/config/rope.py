"""Rotary position embedding: settings and frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxspec.config.reading import (
    ConfigError,
    read_bool,
    read_int,
    read_number,
    read_object,
    shown,
)

# What each kind of rotation has in a checkpoint's config beside rope_theta: fields of RopeConfig.
_FIELDS = {
    "default": (),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
}
_NEEDED = {"llama3": _FIELDS["llama3"], "yarn": ("factor", "original_max_position_embeddings")}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    ``llama3`` rescales low frequencies (Llama 3.1's rope_scaling). ``yarn`` (2309.00071) blends
    interpolated and original frequencies between the dimensions that turn beta_slow and beta_fast
    times in the original context.

    attention_factor: factor of cos and sin (YaRN's temperature)
    softmax_factor:   factor of an MLA layer's softmax scale (DeepSeek's mscale_all_dim)
    """

    theta: float = 10000.0
    rope_type: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``."""
        scaling = read_object(config, "rope_parameters") or read_object(config, "rope_scaling")
        theta = read_number(scaling, "rope_theta", read_number(config, "rope_theta", default_theta))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) not in (
            None,
            1.0,
        ):
            raise ConfigError(
                "partial_rotary_factor: expected 1.0 (the whole head is rotated), got another value"
            )
        if kind == "default":
            return cls(theta)
        if not isinstance(kind, str) or kind not in _NEEDED:
            raise ConfigError(
                f"rope_type: expected 'default', 'llama3' or 'yarn', got {shown(kind)}"
            )
        missing = [k for k in _NEEDED[kind] if k not in scaling]
        if missing:
            raise ConfigError(
                f"rope_type {kind!r}: expected the keys {missing} in rope_scaling, "
                f"got {sorted(scaling)}"
            )
        factor, original = (
            read_number(scaling, "factor", 1.0),
            read_int(scaling, "original_max_position_embeddings"),
        )
        if kind == "yarn":
            return cls._yarn(theta, factor, original, scaling)
        return cls(
            theta,
            "llama3",
            factor=factor,
            low_freq_factor=read_number(scaling, "low_freq_factor", 1.0),
            high_freq_factor=read_number(scaling, "high_freq_factor", 4.0),
            original_max_position_embeddings=original,
        )

    @classmethod
    def _yarn(
        cls, theta: float, factor: float, original: int, scaling: Mapping[str, Any]
    ) -> RopeConfig:
        """Return YaRN's settings.

        DeepSeek gives mscale and mscale_all_dim. Their ratio multiplies cos and sin; the square of
        the latter multiplies MLA's softmax scale.
        """

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        one, all_dims = (
            read_number(scaling, key, 0.0) if scaling.get(key) else None
            for key in ("mscale", "mscale_all_dim")
        )
        attention = mscale(one) / mscale(all_dims) if one and all_dims else mscale(1.0)
        return cls(
            theta,
            "yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=read_number(scaling, "beta_fast", 32.0),
            beta_slow=read_number(scaling, "beta_slow", 1.0),
            truncate=read_bool(scaling, "truncate", True),
            attention_factor=read_number(scaling, "attention_factor", attention),
            softmax_factor=mscale(all_dims) ** 2 if all_dims else 1.0,
        )

    def to_hf(self) -> dict[str, Any]:
        """Return ``rope_parameters`` that from_hf reads as these settings.

        A softmax_factor comes back up to rounding.
        """
        parameters: dict[str, Any] = {"rope_type": self.rope_type, "rope_theta": self.theta}
        parameters |= {name: getattr(self, name) for name in _FIELDS[self.rope_type]}
        if self.softmax_factor != 1.0:
            weight = (math.sqrt(self.softmax_factor) - 1.0) / (0.1 * math.log(self.factor))
            parameters["mscale_all_dim"] = weight
        return parameters


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return inverse frequencies, float32 [head_dim / 2].

    llama3 scaling follows Llama 3.1's reference code, YaRN its paper's section 3.2.
    """
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "yarn":
        turns = np.array([rope.beta_fast, rope.beta_slow])
        ends = (
            head_dim
            * np.log(rope.original_max_position_embeddings / (turns * 2 * np.pi))
            / (2 * np.log(rope.theta))
        )
        low, high = (np.floor(ends[0]), np.ceil(ends[1])) if rope.truncate else ends
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
        inverse = inverse * (interpolated / rope.factor + (1 - interpolated))
    if rope.rope_type == "llama3":
        wavelength = 2 * np.pi / inverse
        original = rope.original_max_position_embeddings
        smooth = (original / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blend = np.clip(smooth, 0.0, 1.0)
        inverse = blend * inverse + (1 - blend) * inverse / rope.factor
    return inverse.astype(np.float32)
