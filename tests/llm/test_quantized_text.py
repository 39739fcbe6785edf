"""Text of quantised models: speculation leaves it, and so do a request's neighbours."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.config import ConfigError
from jaxspec.layers.quantized import files
from jaxspec.loading import model as loading_model
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.weights import load_params
from pallas_kernels.fp8_matmul import Fp8Weight, reference
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.rows import quantise as quantise_rows
from tests.parity.ours import PagedTarget
from tests.support import quantized
from tests.support.slow import slow

pytestmark = pytest.mark.once

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
    found["fp8 experts"] = convert_checkpoint(experts, folder / "fp8 experts", "fp8")
    latent = quantized.random_checkpoint(folder / "plain latents", quantized.LATENT)
    found["latents"] = convert_checkpoint(latent, folder / "latents", "fp8-block")
    groups = quantized.random_checkpoint(folder / "plain groups", quantized.GROUPS)
    found["groups"] = convert_checkpoint(groups, folder / "groups", "fp8")
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
        ("int4", "block"),
        # Their greedy texts are compared below, beside the bits of log-probabilities.
        slow("fp8-block", "probabilistic"),
        slow("experts", "block"),
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
    ("form", "slots"),
    [
        *((form, 4) for form in ("fp8", "fp8 caches", "fp8-block", "experts", "latents")),
        ("groups", 1),
        *(slow(form, 1) for form in ("fp8", "fp8 caches")),
        *(slow(form, slots) for form in ("static", "fp8 experts") for slots in (1, 4)),
        *(slow("fp8-block", 1), slow("experts", 1), slow("latents", 1), slow("groups", 4)),
    ],
)
def test_speculation_leaves_the_bits_of_logprobs(
    form: str, slots: int, folders: dict[str, Path]
) -> None:
    """A verify pass has four rows a request, a plain step one."""
    settings = SETTINGS | {"max_num_seqs": slots}
    if form == "fp8 caches":
        settings |= {"kv_cache_dtype": "fp8"}
    folder = str(folders["plain" if form == "fp8 caches" else form])
    plain = LLM(folder, **settings)
    speculative = LLM(folder, speculative_config=NGRAM, **settings)
    params = SamplingParams(0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    found, expected = (llm.generate(PROMPTS, params) for llm in (speculative, plain))
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert [o.logprobs for o in found] == [o.logprobs for o in expected]
    assert speculative.metrics.num_accepted_tokens > 0


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


@pytest.mark.parametrize(
    ("method", "form"), [*(("eagle", form) for form in quantized.FOUR_BITS), ("eagle3", "awq")]
)
def test_fc_of_an_eagle_head_may_be_in_4_bits(
    method: str, form: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its tensors' names tell the method, and an lm_head is the head's own."""
    has_head = form == "int4"  # others leave it plain
    head = quantized.four_bit_head(tmp_path, form, lm_head=has_head, method=method)
    drafts = {"model": str(head), "num_speculative_tokens": 2}
    llm = LLM(str(folders["plain"]), speculative_config=drafts, **SETTINGS)
    draft = llm.params["draft"]
    assert llm.draft_config is not None and llm.draft_config.method == method
    stored = quantized.tensors_of(quantized.eagle_head(tmp_path / "again", "plain"))["fc.weight"]
    wanted = quantized.floats(*quantized.asymmetric(stored, 128)).T
    np.testing.assert_array_equal(draft["fc"].to_array(jnp.float32), wanted)
    assert (draft["lm_head"] is not llm.params["target"]["lm_head"]) == has_head
    assert generate(llm) == generate(LLM(str(folders["plain"]), **SETTINGS))
    speculative = SpeculativeConfig(str(head), "draft_model")
    with pytest.raises(ConfigError, match="expected a whole model, got a draft head"):
        LLM(str(folders["plain"]), speculative_config=speculative, **SETTINGS)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("form", "axis", "message"),
    [
        ("int4", 1, "expected type 'float', got 'int'"),
        ("gptq", 0, "expected bits 4, got 8"),
        ("awq", 1, "expected bits 4, got 8"),
    ],
)
def test_a_head_with_codes_of_8_bits_is_refused_for_these(
    method: str, form: str, axis: int, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Not for the shape that its weights would have if the codes had 4."""
    head = quantized.four_bit_head(tmp_path, form, method=method)
    tensors = quantized.tensors_of(head)
    for name in tensors:
        if name.endswith(files.CODES):
            tensors[name] = np.repeat(tensors[name], 2, axis)
    save_file(tensors, head / "model.safetensors")
    config = (head / "config.json").read_text()
    (head / "config.json").write_text(config.replace('bits": 4', 'bits": 8'))
    target = load_target(folders["plain"], jnp.float32)
    with pytest.raises(ConfigError, match=f"^quantization_config.*: {message}"):
        load_draft(head, *target, SpeculativeConfig(str(head)), jnp.float32)


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


@pytest.mark.parametrize(
    ("form", "method"),
    [
        ("awq", "awq"),
        ("awq", "awq_marlin"),
        ("fp8-block", "fp8"),
        ("fp8", "compressed-tensors"),
        ("static", "modelopt"),
    ],
)
def test_a_checkpoints_own_method_may_be_named(
    form: str, method: str, folders: dict[str, Path]
) -> None:
    """As in vLLM; and the engine can be made again from what it has loaded."""
    llm = LLM(str(folders[form]), quantization=method, **SETTINGS)
    assert llm.config.quantize is None
    _, expected = load_target(folders[form], jnp.float32)
    for each in (llm, llm.on_same_weights()):
        jax.tree.map(np.testing.assert_array_equal, each.params["target"], expected)


def test_a_heads_own_method_may_be_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """And the engine can be made again."""
    drafts = {"method": "eagle", "num_speculative_tokens": 2}
    head = quantized.eagle_head(tmp_path / "fp8", "fp8")
    own = drafts | {"model": str(head), "quantization": "compressed-tensors"}
    llm = LLM(str(folders["plain"]), speculative_config=own, **SETTINGS)
    for each in (llm, llm.on_same_weights()):
        assert isinstance(each.params["draft"]["layers"][0]["down_proj"], Fp8Weight)


def test_a_wrong_quantize_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    """Under the name that the caller gave the setting."""
    already = "for a checkpoint that is quantised already, got"
    for key in ("quantize", "quantization"):
        for form, value, message in (
            ("plain", "fp4", "expected None, one of fp8, fp8-block, int4, or a checkpoint's own"),
            ("plain", "awq", "expected None or one of fp8, fp8-block, int4 for plain weights, got"),
            ("fp8", "int4", f"expected None or 'compressed-tensors' {already} 'int4'"),
            ("awq", "gptq", f"expected None or 'awq' {already} 'gptq'"),
        ):
            with pytest.raises(ConfigError, match=f"^{key}: {message}"):
                LLM(str(folders[form]), **{key: value}, **SETTINGS)
    head = quantized.eagle_head(tmp_path / "fp8", "fp8")
    for key, name in (
        ("draft_quantize", "draft_quantize"),
        ("quantization", "speculative_config.quantization"),
    ):
        for value, message in (("fp4", "expected None, one of"), ("int4", f".* {already} 'int4'")):
            drafts = {"method": "eagle", "model": str(head), key: value}
            with pytest.raises(ConfigError, match=f"^{name}: {message}"):
                LLM(str(folders["plain"]), speculative_config=drafts, **SETTINGS)
    for key, value in (("quantization", "fp4"), ("kv_cache_dtype", "fp4"), ("max_model_len", 0)):
        with pytest.raises(ConfigError, match=f"^{key}: expected"):
            SpeculativeConfig(**{key: value})
    loaded = load_target(folders["plain"], jnp.float32)
    with pytest.raises(ConfigError, match="quantize: expected None for weights that are loaded"):
        LLM(loaded, config=EngineConfig(quantize="fp8", max_model_len=64))


def test_a_drafts_wrong_form_is_refused_before_weights_are_read(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(*args: Any, source: str, **options: Any) -> Any:
        read.append(source)
        return load_params(*args, source=source, **options)

    monkeypatch.setattr(loading_model, "load_params", counted)
    head = quantized.eagle_head(tmp_path, "fp8")
    for value in ("gptq", "int4"):
        drafts = {"method": "eagle", "model": str(head), "draft_quantize": value}
        with pytest.raises(ConfigError, match=f"^draft_quantize: expected None or .*got '{value}'"):
            LLM(str(folders["plain"]), speculative_config=drafts, **SETTINGS)
    assert read == []
    LLM(str(folders["plain"]), speculative_config=drafts | {"draft_quantize": None}, **SETTINGS)
    assert len(read) == 2  # the target's and the head's


def test_fp8_caches_have_the_checkpoints_scales(folders: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint with other scales gives another text, unless the caches are not in fp8.

    "auto" is fp8, which its config names.
    """
    shutil.copytree(folders["static"], tmp_path / "other")
    tensors = quantized.tensors_of(folders["static"])
    for name in tensors:
        if name.endswith(".k_scale"):
            tensors[name] = np.full((), 2.0**-9, np.float32)  # keys saturate
    for name in ("k_proj.k_scale", "v_proj.v_scale"):  # taken as 1
        del tensors[f"model.layers.0.self_attn.{name}"]
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    texts = {
        (folder, dtype): generate(LLM(str(path), kv_cache_dtype=dtype, **SETTINGS))
        for folder, path in (("static", folders["static"]), ("other", tmp_path / "other"))
        for dtype in ("auto", "float32", "fp8")
    }
    assert texts["static", "float32"] == texts["other", "float32"]
    assert texts["static", "fp8"] != texts["other", "fp8"]
    assert texts["static", "auto"] == texts["static", "fp8"]
    _, params = load_target(tmp_path / "other", jnp.float32)
    scales = [layer["self_attn"]["v_scale"].tolist() for layer in params["layers"]]
    assert scales == [[1.0], [0.5]]


def kv_only(plain: Path, folder: Path, scale: float) -> Path:
    """A plain checkpoint with scales of fp8 keys and values."""
    shutil.copytree(plain, folder)
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return quantized.with_kv_scales(folder, "tensor", [scale])


def test_keys_and_values_alone_may_have_scales(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = folders["plain"]
    of_one = kv_only(plain, tmp_path / "one", 1.0)
    tensors = quantized.tensors_of(of_one)
    tensors |= {name: np.ones(1, np.float32) for name in tensors if name.endswith("v_scale")}
    save_file(tensors, of_one / "model.safetensors", metadata={"format": "pt"})
    small = kv_only(plain, tmp_path / "small", 2.0**-9)  # keys and values saturate
    llms = {
        (folder.name, dtype): LLM(str(folder), kv_cache_dtype=dtype, **SETTINGS)
        for folder, dtype in (
            *((plain, "auto"), (plain, "fp8")),
            *((of_one, "auto"), (small, "fp8"), (small, "float32")),
        )
    }
    assert [llm.cache_dtype for llm in llms.values()] == [
        *(jnp.float32, jnp.float8_e4m3fn),
        *(jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float32),
    ]
    texts = {case: generate(llm) for case, llm in llms.items()}
    assert texts["small", "float32"] == texts["plain", "auto"]
    assert texts["one", "auto"] == texts["plain", "fp8"] != texts["small", "fp8"]


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_a_drafts_checkpoint_says_what_auto_is_beside_a_target_that_does_not(
    method: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A setting of the target's caches holds for the draft's too, unless they have their own."""
    if method == "eagle":
        draft = quantized.with_kv_scales(quantized.eagle_head(tmp_path, "fp8"), "tensor", [0.5])
    else:
        draft = kv_only(folders["plain"], tmp_path / "draft", 0.5)
    target, wide, fp8 = str(folders["plain"]), jnp.dtype("float32"), jnp.dtype("float8_e4m3fn")
    drafts = {"model": str(draft), "method": method, "num_speculative_tokens": 2}
    cases: tuple[tuple[str, str | None, Any, Any], ...] = (
        ("auto", None, wide, fp8),
        ("auto", "auto", wide, fp8),
        ("auto", "float32", wide, wide),
        ("float32", None, wide, wide),
        ("float32", "auto", wide, fp8),
        ("fp8", "float32", fp8, wide),
    )
    for dtype, own, of_target, of_draft in cases:
        speculative = drafts | {"draft_kv_cache_dtype": own}
        llm = LLM(target, speculative_config=speculative, kv_cache_dtype=dtype, **SETTINGS)
        assert (llm.cache_dtype, llm.draft_cache_dtype) == (of_target, of_draft), (dtype, own)
        state = llm.runner.resident.state
        held = [
            {array.dtype for array in jax.tree.leaves(caches)}
            for caches in (state.target_caches, state.draft.caches)
        ]
        assert held == [{of_target}, {of_draft}], (dtype, own)
    llm = LLM(target, speculative_config=drafts, **SETTINGS)
    assert generate(llm) == generate(LLM(target, **SETTINGS))


def test_auto_leaves_static_scales_of_autofp8_to_a_caller(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM does not read them from quant_method "fp8" unless kv_cache_dtype says so."""
    made: dict[str, list[list[int]]] = {}
    for name, scale in (("one", 1.0), ("small", 2.0**-9)):  # keys and values saturate
        write = partial(quantized.static_fp8, shape=(), inputs=quantized.INPUT_SCALES)
        out = quantized.rewritten(folders["plain"], tmp_path / name, quantized.STATIC_FP8, write)
        quantized.with_kv_scales(out, "tensor", scale)
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["kv_cache_scheme"] = "static"
        (out / "config.json").write_text(json.dumps(config))
        for dtype in ("auto", "fp8"):
            llm = LLM(str(out), kv_cache_dtype=dtype, **SETTINGS)
            assert llm.cache_dtype == (jnp.float32 if dtype == "auto" else jnp.float8_e4m3fn)
            made[f"{name} {dtype}"] = generate(llm)
    assert made["one auto"] == made["small auto"] and made["one fp8"] != made["small fp8"]


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
