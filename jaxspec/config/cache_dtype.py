"""The names of the dtypes of cached keys and values."""

from __future__ import annotations

from typing import Literal, cast, get_args

from jaxspec.config.reading import ConfigError, is_one_of, shown

KVCacheDtype = Literal["auto", "bfloat16", "float32", "fp8"]
_ALIASES = {"fp8_e4m3": "fp8"}  # vLLM's


def settled_kv_cache_dtype(key: str, value: object) -> KVCacheDtype:
    """Return the value of a setting; ConfigError if it names no such dtype."""
    named = _ALIASES.get(value, value) if isinstance(value, str) else value
    if not is_one_of(named, get_args(KVCacheDtype)):
        raise ConfigError(
            f"{key}: expected one of {', '.join(get_args(KVCacheDtype))}, got {shown(value)}"
        )
    return cast(KVCacheDtype, named)
