"""Programs from disk run as those of jax.jit do, and are found without a trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from jaxspec.decode.kept_jit import KeptJit
from jaxspec.loading import executables, program_names
from tests.support.compilations import counting_compilations
from tests.support.devices import run_on_devices
from tests.support.slow import slow

TRACES: list[str] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(program_names, "PACKAGES", (*program_names.PACKAGES, "tests"))
    monkeypatch.setattr(executables, "STORE", executables.Store())
    monkeypatch.setattr(program_names, "VARIABLES_AT_IMPORT", program_names._chosen())
    executables.keep_in(tmp_path / "kept")
    TRACES.clear()
    with executables.written_at_once():
        yield tmp_path / "kept"


def scaled(
    factor: float, weights: dict[str, jax.Array], x: jax.Array, at: jax.Array
) -> tuple[jax.Array, jax.Array]:
    TRACES.append("scaled")
    return x * factor + weights["w"], at + 1


def plus(x: jax.Array, y: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        return x + y


def multiplied(x: jax.Array) -> jax.Array:
    return x @ x


def shown(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda y: TRACES.append("shown"), x)
    return x + 1


WEIGHTS = {"w": jnp.float32(1.0)}


def in_new_process(**changes: Any) -> KeptJit:
    """Return a program that holds nothing, as it is when a process starts."""
    jax.clear_caches()
    return KeptJit(scaled, donate=2, static=1, told_by=-1, **changes)


def run(program: KeptJit, size: int = 3, factor: float = 2.0) -> Any:
    try:
        return program(factor, WEIGHTS, jnp.ones(size), jnp.zeros(2, jnp.int32))
    finally:
        executables.STORE.name_all()


def test_a_later_process_finds_a_program_without_a_trace(folder: Path) -> None:
    first = run(in_new_process())
    assert TRACES == ["scaled"] and len([*folder.iterdir()]) == 1
    program = in_new_process()
    with counting_compilations() as compiled:
        second = run(program)
    assert TRACES == ["scaled"] and not any("scaled" in each for each in compiled)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    expected = jax.jit(scaled, static_argnums=0)(2.0, WEIGHTS, jnp.ones(3), jnp.zeros(2, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, second, expected)


def test_a_damaged_file_is_written_anew(folder: Path) -> None:
    run(in_new_process())
    [path] = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:1000])
    run(in_new_process())
    assert TRACES == ["scaled"] * 2 and len(path.read_bytes()) > 1000
    run(in_new_process())
    assert TRACES == ["scaled"] * 2


@pytest.mark.parametrize("is_bound", [False, True])
def test_donation_and_bindings_are_those_of_jit(is_bound: bool) -> None:
    def array(value: Any) -> jax.Array:
        return jax.device_put(value, jax.devices()[0]) if is_bound else jnp.asarray(value)

    jitted: Any = jax.jit(scaled, static_argnums=0, donate_argnums=2)
    program: Any = None
    for make in (lambda: jitted, in_new_process, in_new_process):
        program = make()
        x, at = array(np.ones(3, np.float32)), array(np.zeros(2, np.int32))
        for _ in range(3):
            before = x
            x, at = program(2.0, WEIGHTS, x, at)
            assert before.is_deleted() and not at.is_deleted()
            assert (x.committed, at.committed) == (is_bound, is_bound)
    assert program.cache_size() == 1, "a program's own results need no other one"


def test_shapes_compile_what_arrays_run() -> None:
    program = in_new_process()

    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    program.compile(2.0, {"w": shape()}, shape(3), shape(2, dtype=jnp.int32))
    assert TRACES == ["scaled"]
    run(program)
    program(2.0, WEIGHTS, np.ones(3, np.float32), np.zeros(2, np.int32))
    assert TRACES == ["scaled"] and program.cache_size() == 1


def test_arguments_that_only_differ_elsewhere_run_their_own_program(folder: Path) -> None:
    """The shapes of the last argument find a program, whatever the others are."""
    for number_of_traces in (3, 3):
        program = in_new_process()
        for _ in range(2):
            for size in (3, 4, 3, 5):
                assert run(program, size)[0].tolist() == [3.0] * size
        assert len(TRACES) == number_of_traces
        assert program.cache_size() == len([*folder.iterdir()]) == 3


def test_equal_configs_share_a_program_and_others_do_not() -> None:
    program = in_new_process()
    values = [run(program, factor=f)[0][0].item() for f in (2.0, float("2"), 5.0, 2.0)]
    assert values == [3.0, 3.0, 6.0, 3.0] and program.cache_size() == 2


def test_weak_types_and_bindings_tell_programs_apart() -> None:
    device = jax.devices()[0]
    program, expected = KeptJit(plus), jax.jit(plus)
    narrow = jnp.ones(2, jnp.bfloat16)
    for x, y in (
        (narrow, 2.0),
        (narrow, np.float32(2)),
        (jax.device_put(narrow, device), 2.0),
        (narrow, 2.0),
    ):
        found, same = program(x, y), expected(x, y)
        assert (found.dtype, found.committed) == (same.dtype, same.committed)


def test_an_error_while_a_program_runs_is_raised_and_the_program_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, calls = in_new_process(), []
    run(program)
    ((key, recent),) = program._recent.items()

    def failing(*args: Any, **named: Any) -> Any:
        calls.append(args)
        raise ValueError("of the device")

    program._recent[key] = recent._replace(compiled=failing)
    program._compiled = dict.fromkeys(program._compiled, failing)
    with pytest.raises(ValueError, match="of the device"):
        run(program)
    assert len(calls) == 1


def test_a_known_program_is_traced_into_another_one() -> None:
    """Its last argument is an array, as before; an earlier one is traced."""
    program, x, at = KeptJit(scaled, static=1, told_by=-1), jnp.ones(3), jnp.zeros(2, jnp.int32)
    expected = program(2.0, WEIGHTS, x, at)
    found = jax.jit(lambda weights: program(2.0, weights, x, at))(WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_error_of_the_arguments_is_raised() -> None:
    program = in_new_process()
    for _ in range(2):
        run(program)
        with pytest.raises(TypeError):
            program(2.0, WEIGHTS, "text", jnp.zeros(2, jnp.int32))


def test_other_settings_run_another_program() -> None:
    program, x = KeptJit(multiplied), jnp.ones((8, 8))
    for _ in range(2):
        program(x)
        with jax.default_matmul_precision("bfloat16"):
            program(x)
    assert program.cache_size() == 2


def test_traced_calls_and_calls_without_jit_go_through_jax() -> None:
    program = KeptJit(multiplied)
    np.testing.assert_array_equal(jax.vmap(program)(jnp.ones((2, 3, 3))), np.full((2, 3, 3), 3.0))
    assert jax.eval_shape(program, jnp.ones((3, 3))).shape == (3, 3)
    with jax.disable_jit():
        program(jnp.ones((3, 3)))
    assert not program._compiled


@pytest.mark.parametrize("kind", ["callback", "closure"])
def test_what_has_no_description_runs_and_is_not_kept(kind: str, folder: Path) -> None:
    offset = 1.0
    for _ in range(2):
        jax.clear_caches()
        program = KeptJit(shown if kind == "callback" else lambda x: x + offset)
        for _ in range(2):
            assert program(jnp.ones(1)).item() == 2.0
        program.compile(jnp.ones(2))
    jax.effects_barrier()
    assert (["shown"] * 4 if kind == "callback" else []) == TRACES
    assert not folder.exists()


def test_nothing_is_kept_when_it_is_not_allowed(folder: Path) -> None:
    executables.allow(False)
    program = in_new_process()
    run(program)
    assert not folder.exists() and not program._compiled and program.cache_size() == 1


def test_jax_keeps_no_copy_and_gives_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for a CPU that comes from JAX's cache cannot be serialised: it would not run."""
    kept: list[str] = []
    put = compilation_cache.put_executable_and_time

    def noted(key: str, *rest: Any, **named: Any) -> None:
        kept.append(key)
        put(key, *rest, **named)

    monkeypatch.setattr(compilation_cache, "put_executable_and_time", noted)
    factor = float(np.random.default_rng().uniform())  # no earlier run of the tests has it
    run(in_new_process(), factor=factor)
    [path] = folder.iterdir()
    assert not any("scaled" in key for key in kept)
    path.unlink()
    jax.clear_caches()
    jax.jit(scaled, donate_argnums=2, static_argnums=0)(
        factor, WEIGHTS, jnp.ones(3), jnp.zeros(2, jnp.int32)
    )
    assert any("scaled" in key for key in kept)
    run(in_new_process(), factor=factor)
    assert path.exists()
    run(in_new_process(), factor=factor)  # from the file
    assert TRACES == ["scaled"] * 3


def test_a_program_that_ran_before_is_used_and_not_kept(folder: Path) -> None:
    """Perhaps JAX has read it from its cache."""
    executables.allow(False)
    program = in_new_process()
    run(program)
    executables.allow(True)
    assert run(program)[0].tolist() == [3.0] * 3
    assert TRACES == ["scaled"] and not folder.exists()


@pytest.mark.parametrize(
    ("devices", "compilation"), [(1, "round"), slow(2, "round"), slow(1, "step")]
)
def test_a_second_process_generates_the_same_text_without_a_trace(
    devices: int, compilation: str, tmp_path: Path
) -> None:
    start = partial(
        run_on_devices,
        devices,
        "tests.decode.kept_engine",
        f"{tmp_path}",
        f"{devices}",
        compilation,
    )
    *tokens, compiled = start(settings={"PYTHONHASHSEED": "1"}).splitlines()
    assert "prefill_packed" in compiled and len({*tokens}) == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    assert {"prefill_packed", "_put_back"} < {name.rpartition("-")[0] for name in names}
    again = start("traceless", settings={"PYTHONHASHSEED": "2"}).splitlines()
    assert again == [*tokens, "[]"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_is_not_kept_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxspec"):
        KeptJit(lambda x: x)(jnp.ones(1))
    assert "is not kept: it depends on" in caplog.text
