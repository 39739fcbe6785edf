"""Text of quantised models: speculation leaves it, and so do a request's neighbours."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.config import ConfigError
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_target
from pallas_kernels.fp8_matmul import Fp8Weight, reference
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.rows import quantise as quantise_rows
from tests.parity.ours import PagedTarget
from tests.support import quantized
from tests.support.slow import slow

PROMPTS = [[5, 6, 7, 5, 6], [80, 3, 9, 9, 41, 2, 17], [11] * 3]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SETTINGS: dict[str, Any] = dict(dtype="float32", max_model_len=64, max_num_seqs=4, block_size=16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The narrow target, plain and in each form."""
    folder = tmp_path_factory.mktemp("quantized")
    plain = quantized.plain_checkpoint(folder / "plain")
    found = {form: convert_checkpoint(plain, folder / form, form) for form in ("fp8", "int4")}  # type: ignore[arg-type]
    found["fp8-block"] = quantized.deepseek_fp8(plain, folder / "fp8-block")
    found["static"] = quantized.modelopt_fp8(plain, folder / "static")
    found["awq"] = quantized.awq(plain, folder / "awq")
    experts = quantized.plain_checkpoint(folder / "plain experts", quantized.EXPERTS)
    found["experts"] = convert_checkpoint(experts, folder / "experts", "fp8-block")
    return found | {"plain": plain}


def generate(llm: LLM, temperature: float = 0.0) -> list[list[int]]:
    params = [
        SamplingParams(temperature, max_tokens=24, ignore_eos=True, seed=i)
        for i in range(len(PROMPTS))
    ]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        ("fp8", "strict"),
        ("fp8-block", "probabilistic"),
        ("int4", "block"),
        ("experts", "block"),
        slow("static", "strict"),
        slow("awq", "strict"),
        slow("fp8", "probabilistic"),
    ],
)
def test_speculative_text_is_the_plain_text_of_the_same_quantised_target(
    form: str, rule: str, folders: dict[str, Path]
) -> None:
    plain = LLM(str(folders[form]), **SETTINGS)
    drafts = NGRAM | {"rejection_sample_method": rule}
    speculative = LLM(str(folders[form]), speculative_config=drafts, **SETTINGS)
    assert generate(speculative) == generate(plain)
    assert speculative.metrics.num_accepted_tokens > 0
    if rule == "strict":  # its samples are plain decoding's too
        assert generate(speculative, 1.0) == generate(plain, 1.0)


@pytest.mark.parametrize(
    ("target", "fp8_head", "draft_quantize"),
    [("fp8", False, None), ("plain", True, None), slow("int4", False, "fp8")],
)
def test_target_and_head_may_differ_in_form(
    target: str,
    fp8_head: bool,
    draft_quantize: str | None,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    head = quantized.eagle_head(tmp_path, "fp8" if fp8_head else "plain")
    drafts = {"model": str(head), "method": "eagle", "num_speculative_tokens": 2}
    llm = LLM(
        str(folders[target]),
        speculative_config=drafts | {"draft_quantize": draft_quantize},
        **SETTINGS,
    )
    layer = llm.params["draft"]["layers"][0]
    assert isinstance(layer["down_proj"], Fp8Weight) == (fp8_head or draft_quantize == "fp8")
    assert generate(llm) == generate(LLM(str(folders[target]), **SETTINGS))


# --- quantize= -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantising_while_loading_gives_what_converting_gives(
    form: Any, dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source, out = folders["plain"], folders[form]
    if dtype == "bfloat16":
        source = quantized.with_dtype(quantized.in_bfloat16(source, tmp_path / "source"), dtype)
        out = convert_checkpoint(source, tmp_path / "out", form)
    _, loaded = load_target(source, jnp.float32, quantize=form)
    _, converted = load_target(out, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, loaded, converted)
    assert jax.tree.map(jnp.dtype, loaded) == jax.tree.map(jnp.dtype, converted)
    assert loaded["lm_head"].values.dtype == jnp.float32


def test_vllms_quantization_is_the_same_setting(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["plain"]), quantization="fp8", **SETTINGS)
    assert llm.config.quantize == "fp8"
    assert isinstance(llm.params["target"]["layers"][0]["down_proj"], Fp8Weight)
    again = llm.on_same_weights()
    assert again.params["target"]["layers"][0]["down_proj"] is not None


def test_a_wrong_quantize_is_one_sentence(folders: dict[str, Path]) -> None:
    for form, value, message in (
        ("plain", "fp4", "quantize: expected None or one of fp8, fp8-block, int4, got 'fp4'"),
        ("fp8", "int4", "quantize: expected None for a checkpoint that is quantised already"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(folders[form]), quantize=value, **SETTINGS)
    loaded = load_target(folders["plain"], jnp.float32)
    with pytest.raises(ConfigError, match="quantize: expected None for weights that are loaded"):
        LLM(loaded, config=EngineConfig(quantize="fp8", max_model_len=64))


def test_fp8_caches_have_the_checkpoints_scales(folders: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint with other scales gives another text, unless the caches are not in fp8."""
    shutil.copytree(folders["static"], tmp_path / "other")
    tensors = quantized.tensors_of(folders["static"])
    for name in tensors:
        if name.endswith(".k_scale"):
            tensors[name] = np.full((), 2.0**-9, np.float32)  # keys saturate
    del tensors["model.layers.0.self_attn.v_proj.v_scale"]  # taken as 1
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    texts = {
        (folder, dtype): generate(LLM(str(path), kv_cache_dtype=dtype, **SETTINGS))
        for folder, path in (("static", folders["static"]), ("other", tmp_path / "other"))
        for dtype in ("auto", "fp8")
    }
    assert texts["static", "auto"] == texts["other", "auto"]
    assert texts["static", "fp8"] != texts["other", "fp8"]
    _, params = load_target(tmp_path / "other", jnp.float32)
    scales = [layer["self_attn"]["v_scale"].tolist() for layer in params["layers"]]
    assert scales == [[1.0], [0.5]]


# --- neighbours ------------------------------------------------------------------------------


def first_request(folder: Path, neighbour: list[int], rows: int) -> np.ndarray:
    """The logits of a request, with another one beside it in each pass."""
    target = PagedTarget(*load_target(folder, jnp.float32), 2, block_size=4)
    prompts = [PROMPTS[1][:rows], neighbour[:rows]]
    target.feed(rows, [0, 0], prompts)
    target.feed(1, [rows, rows], [[4], [neighbour[-1]]])
    return np.stack([target.logits[0][i] for i in range(rows + 1)])


@pytest.mark.parametrize("form", ["fp8", "fp8-block", "static", "int4"])
def test_a_requests_logits_do_not_depend_on_its_neighbours(
    form: str, folders: dict[str, Path]
) -> None:
    one, other = (first_request(folders[form], n, 7) for n in ([1] * 8, [*range(20, 28)]))
    np.testing.assert_array_equal(one, other)


def test_one_scale_for_all_rows_would_depend_on_them(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def per_tensor(x: jax.Array, activation: Any, scale: Any = None) -> Rows:
        del activation, scale
        return quantise_rows(x, "static", jnp.abs(x).max().astype(jnp.float32) / 448)

    monkeypatch.setattr(reference, "quantise", per_tensor)
    first = partial(first_request, folders["fp8"], rows=6)  # shapes that nothing has compiled yet
    assert (first([1] * 8) != first([*range(20, 28)])).any()
