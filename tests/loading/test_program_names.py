"""Names of programs on disk: they hold all that a trace reads."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import models
from jaxspec.config import RoundConfig
from jaxspec.decode.kept_jit import REGISTRIES, registered
from jaxspec.drafts import MODEL_FREE
from jaxspec.loading import program_names
from jaxspec.loading.program_names import Call, Undescribed, describe
from jaxspec.sampling import logits
from pallas_kernels import lowered_once
from tests.support.tiny import agreeing_model
from tests.test_layering import ROOMS

X = np.ones(3, np.float32)


def double(factor: int, x: jax.Array) -> jax.Array:
    return x * factor


def triple(factor: int, x: jax.Array) -> jax.Array:
    return x * factor * 3


@pytest.fixture(autouse=True)
def tests_are_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_names, "PACKAGES", (*program_names.PACKAGES, "tests"))
    # pytest imports the package before conftest.py sets the flags.
    monkeypatch.setattr(program_names, "VARIABLES_AT_IMPORT", program_names._chosen())


@pytest.fixture(autouse=True)
def descriptions_made_anew() -> Iterator[None]:
    yield
    program_names._versions.cache_clear()
    program_names._device_kinds.cache_clear()


def name(*, registries: Any = None, **changes: Any) -> str:
    """Return the name of a call that differs from a usual one in some parts."""
    parts: dict[str, Any] = {
        "function": double,
        "donated": 1,
        "options": (),
        "fixed": (2, agreeing_model("eagle").round_config(3)),
        "args": (X, {"a": jnp.ones(2)}),
        "named": {},
    }
    return Call.of(**(parts | changes)).file_name(registries or registered())


def on_device(x: Any) -> jax.Array:
    return jax.device_put(x, jax.devices()[0])


def on_mesh(x: Any, *axes: str) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


OTHER_CALLS: dict[str, dict[str, Any]] = {
    "function": {"function": triple},
    "donated argument": {"donated": None},
    "compiler options": {"options": (("xla_cpu_enable_fast_math", True),)},
    "static argument": {"fixed": (3, agreeing_model("eagle").round_config(3))},
    "config": {"fixed": (2, agreeing_model("eagle").round_config(2))},
    "shape": {"args": (np.ones(4, np.float32), {"a": jnp.ones(2)})},
    "dtype": {"args": (np.ones(3, np.int32), {"a": jnp.ones(2)})},
    "weak type": {"args": (X, {"a": jax.ShapeDtypeStruct((2,), jnp.float32, weak_type=True)})},
    "key": {"args": (X, {"b": jnp.ones(2)})},
    "structure": {"args": (X, (jnp.ones(2),))},
    "order": {"args": ({"a": jnp.ones(2)}, X)},
    "None": {"args": (X, {"a": jnp.ones(2), "b": None})},
    "bound to a device": {"args": (X, {"a": on_device(np.ones(2, np.float32))})},
    "mesh": {"args": (X, {"a": on_mesh(np.ones(2, np.float32))})},
    "partition": {"args": (X, {"a": on_mesh(np.ones(2, np.float32), "a")})},
    "named argument": {"named": {"addresses": X}},
}


def test_another_call_has_another_name() -> None:
    names = [name(), *(name(**changes) for changes in OTHER_CALLS.values())]
    assert len({*names}) == len(names)


def test_arrays_and_their_shapes_have_one_name() -> None:
    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    assert (
        name(args=(shape(X), {"a": shape(jnp.ones(2))}))
        == name()
        == name(args=(jnp.ones(3), {"a": np.ones(2, np.float32)}))
    )
    bound = on_device(np.ones(2, np.float32))
    as_shape = jax.ShapeDtypeStruct(bound.shape, bound.dtype, sharding=bound.sharding)
    assert name(args=(X, {"a": as_shape})) == name(**OTHER_CALLS["bound to a device"])


def set_flags(patch: pytest.MonkeyPatch, flags: str) -> None:
    """Set XLA's flags as before the import."""
    patch.setenv("XLA_FLAGS", flags)
    patch.setattr(program_names, "VARIABLES_AT_IMPORT", program_names._chosen())


def ngram_with(**changes: Any) -> Any:
    made = copy.copy(MODEL_FREE["ngram"])
    vars(made).update(changes)
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(program_names, "SOURCES", "other sources"),
        lambda patch: patch.setattr(lowered_once, "VERSIONS", "other versions"),
        lambda patch: patch.setattr(sys, "version", "3.99"),
        lambda patch: patch.setattr(program_names, "DISTRIBUTIONS", re.compile("pytest")),
        lambda patch: patch.setattr(program_names, "_driver", lambda kind: "another driver"),
        lambda patch: set_flags(patch, "--xla_gpu_autotune_level=0"),
        lambda patch: patch.setattr(jax, "default_backend", lambda: "gpu"),
        lambda patch: patch.setitem(models.FAMILIES, "llama", models.FAMILIES["qwen3"]),
        lambda patch: patch.setattr(logits, "AFTER_TEMPERATURE", ()),
        lambda patch: patch.setitem(MODEL_FREE, "ngram", ngram_with(lookahead=3)),
    ],
    ids=[
        "sources", "versions", "python", "packages", "driver", "flags", "backend", "registry",
        "processors", "attribute",
    ],
)  # fmt: skip
def test_another_environment_has_another_name(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name()
    program_names._versions.cache_clear()
    program_names._device_kinds.cache_clear()
    change(monkeypatch)
    assert name() != before


@pytest.mark.parametrize(
    "settings",
    [
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.numpy_dtype_promotion("standard"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.debug_nans(True),
        lambda: jax.default_prng_impl("rbg"),
    ],
)
def test_other_settings_of_jax_have_another_name(settings: Callable[[], Any]) -> None:
    before = name()
    with settings():
        assert name() != before
    assert name() == before


def test_a_mesh_around_a_trace_has_another_name() -> None:
    before = name(args=(X,))
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("a",))):
        assert name(args=(X,)) != before
    assert name(args=(X,)) == before


def test_the_place_of_the_cache_and_logging_change_no_name() -> None:
    before, names = name(), ("jax_compilation_cache_dir", "jax_log_compiles")
    values = {each: jax.config.values[each] for each in names}
    try:
        jax.config.update("jax_compilation_cache_dir", "elsewhere")
        jax.config.update("jax_log_compiles", True)
        assert name() == before
    finally:
        for each, value in values.items():
            jax.config.update(each, value)


def test_each_field_of_a_config_is_described() -> None:
    cfg = agreeing_model("eagle").round_config(3)
    found = {describe(cfg)}
    for field in fields(RoundConfig):
        other = copy.copy(cfg)
        object.__setattr__(other, field.name, "another value")
        found.add(describe(other))
    assert len(found) == 1 + len(fields(RoundConfig))
    deep = replace(
        cfg, target=replace(cfg.target, attention=replace(cfg.target.attention, head_dim=4))
    )
    assert describe(deep) not in found


def test_equal_values_have_one_text_and_others_have_others() -> None:
    assert describe({"b": 1, "a": 2}) == describe({"a": 2, "b": 1})
    pair = [frozenset([0, 8]), frozenset([8, 0])]  # their hashes collide
    assert [*pair[0]] != [*pair[1]] and describe(pair[0]) == describe(pair[1])
    values = [
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        "None",
        (1,),
        [1],
        frozenset({1}),
        {1: 1},
        np.dtype("int32"),
        np.dtype("uint32"),
        np.dtype(jnp.bfloat16),
        int.__name__,
    ]
    assert len({*map(describe, values)}) == len(values)


@dataclass(frozen=True)
class Foreign:
    x: int = 1


def local() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    "value",
    [Foreign(), Foreign, local(), lambda: 0, object(), np.ones(2), jnp.ones(2), SimpleNamespace()],
    ids=["object", "class", "closure", "lambda", "bare", "array", "jax array", "namespace"],
)  # fmt: skip
def test_what_other_packages_define_has_no_text(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_names, "PACKAGES", ("jaxspec", "pallas_kernels"))
    with pytest.raises(Undescribed):
        describe((value,))


def test_a_replaced_function_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = double
    monkeypatch.setitem(globals(), "double", triple)
    with pytest.raises(Undescribed, match="double"):
        name(function=before)


def test_nothing_is_kept_beside_a_family_of_another_package() -> None:
    with pytest.raises(Undescribed, match="SimpleNamespace"):
        name(registries={"families": {"toy": SimpleNamespace()}})
    with pytest.raises(Undescribed, match="numpy"):
        name(registries={"families": {"toy": np}})


@pytest.mark.parametrize(
    ("module", "each"), [(m, name) for m, names in REGISTRIES for name in names]
)
def test_each_registry_is_read_when_a_program_is_named(
    module: Any, each: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = getattr(module, each)
    more = (*entries, SimpleNamespace()) if isinstance(entries, tuple) else (
        {**entries, next(iter(entries)): SimpleNamespace()}
    )  # fmt: skip
    monkeypatch.setattr(module, each, more)
    with pytest.raises(Undescribed, match="SimpleNamespace"):
        name()


def test_variables_that_do_not_say_what_xla_does_have_no_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # XLA has read them already
        with pytest.raises(Undescribed, match="changed since the import"):
            name()
    with monkeypatch.context() as patch:
        (tmp_path / "results").write_text("")
        set_flags(patch, f"--xla_gpu_load_autotune_results_from={tmp_path / 'results'}")
        with pytest.raises(Undescribed, match="a file that XLA_FLAGS names"):
            name()
    with monkeypatch.context() as patch:
        patch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "/a/path")  # JAX sets it
        name()
        patch.setenv("MOSAIC_GPU_LINE_INFO", "1")
        with pytest.raises(Undescribed, match="MOSAIC_GPU_LINE_INFO"):
            name()


def test_sources_that_cannot_be_read_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_names, "FILES", {})
    program_names._versions.cache_clear()
    with pytest.raises(Undescribed, match="sources"):
        name()


def test_programs_of_several_processes_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(Undescribed, match="several processes"):
        name()


def test_a_digest_of_sources_sees_each_file_and_its_name(tmp_path: Path) -> None:
    def digest() -> str:
        return lowered_once.digest_of_sources(tmp_path)

    (tmp_path / "a.py").write_text("x = 1\n")
    found = [digest()]
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.py").write_text("")
    found.append(digest())
    (tmp_path / "a.py").write_text("x = 2\n")
    found.append(digest())
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    found.append(digest())
    assert len({*found}) == 4
    assert lowered_once.digest_of_sources(tmp_path, without=["inner", "c"]) != found[-1]
    (tmp_path / "c.py").write_text("x = 3\n")
    (tmp_path / "inner" / "b.py").write_text("y = 3\n")
    found.append(lowered_once.digest_of_sources(tmp_path, without=["inner", "c"]))
    assert found[-1] == lowered_once.digest_of_sources(tmp_path / "inner", without=["b"])


def test_only_rooms_above_decode_are_left_out_of_the_sources() -> None:
    assert set(program_names.UNTRACED) == {*ROOMS[: ROOMS.index("decode")]}
