"""The names of the dtypes of cached keys and values."""

from __future__ import annotations

from typing import Literal, get_args

from jaxspec.config.reading import ConfigError

KVCacheDtype = Literal["auto", "bfloat16", "float32", "fp8"]


def check_kv_cache_dtype(key: str, value: object) -> None:
    """Raise ConfigError for a value of a setting that names no such dtype."""
    if value not in get_args(KVCacheDtype):
        raise ConfigError(
            f"{key}: expected one of {', '.join(get_args(KVCacheDtype))}, got {value!r}"
        )
