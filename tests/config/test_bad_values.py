"""Values of the wrong kind, in a raw config.json, a setting or a prompt: one ConfigError sentence,
never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig, models
from jaxspec.config.reading import items_of
from jaxspec.drafts import eagle, eagle3
from jaxspec.layers.params import init_random
from tests.support.full_size import CONFIGS

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
}
LARGEST = 2**31 - 1  # of int32
HEAD = {**{k: v for k, v in TARGET.items() if k != "model_type"}, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "2"}, "num_attention_heads"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
        ({"model_type": ["llama"]}, "model_type"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 4},
            "layer_types",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers to be an integer of at most 4096"),
        ({"hidden_size": 10**5000}, "hidden_size to be an integer of at most .* too many digits"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps to be a positive number, got 1000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings to be true or false, got 'false'"),
        ({"attention_bias": 1}, "attention_bias to be true or false, got 1"),
        ({"rope_scaling": {"rope_type": []}}, r"rope_type: expected .*, got \[\]"),
        ({"layer_types": 5}, "config.json: expected values of the kinds .*, got TypeError"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "mscale": "x",
                    "original_max_position_embeddings": 8,
                }
            },
            "mscale",
        ),
    ],
)
def test_target_config_names_the_wrong_value(changes: dict[str, Any], names: str) -> None:
    assert models.config_from_hf(TARGET).num_layers == 8
    with pytest.raises(ConfigError, match=names):
        models.config_from_hf(TARGET | changes)


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"eagle_config": [1]}, "eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": "no"}}, "use_aux_hidden_state"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}, "hidden_size": 4},
            "use_aux_hidden_state",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}},
            "eagle_aux_hidden_state_layer_ids",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "123"}, "eagle_aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": "llama"}, "transformer_layer_config"),
        ({"num_attention_heads": "2"}, "num_attention_heads"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_draft_config_names_the_wrong_value(changes: dict[str, Any], names: str) -> None:
    target = models.config_from_hf(TARGET)
    assert eagle3.config_from_checkpoint(HEAD, {}, target, SpeculativeConfig()).aux_layers == (
        2,
        4,
        5,
    )
    with pytest.raises(ConfigError, match=names):
        eagle3.config_from_checkpoint(HEAD | changes, {}, target, SpeculativeConfig())


def test_an_eagle1_window_is_read_or_refused() -> None:
    target, speculative = models.config_from_hf(TARGET), SpeculativeConfig(method="eagle")
    window = {"layer_types": ["sliding_attention"], "sliding_window": 6}
    assert eagle.config_from_checkpoint(HEAD | window, {}, target, speculative).sliding_window == 6
    with pytest.raises(ConfigError, match="layer_types"):
        eagle.config_from_checkpoint(
            HEAD | {"layer_types": ["sliding_attention"]}, {}, target, speculative
        )


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"use_sliding_window": True}, "use_sliding_window: expected False"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types: expected full_attention"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: expected a scale for each token",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type: expected .*longrope"),
        ({"num_experts": 0}, "num_experts to be an integer of at least 1, got 0"),
        ({"num_experts": None}, "num_experts to be an integer of at least 1, got None"),
        ({"num_experts": 5000}, "num_experts to be an integer of at most 4096, got 5000"),
        (
            {"num_experts_per_tok": 129},
            "num_experts_per_tok: expected at most the model's 128 experts, got 129",
        ),
        ({"moe_intermediate_size": None}, "moe_intermediate_size to be an integer"),
        ({"norm_topk_prob": "true"}, "norm_topk_prob to be true or false, got 'true'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step to be an integer of at least 1, got 0"),
        (
            {"mlp_only_layers": [48]},
            r"mlp_only_layers: expected indices within 0\.\.47 of the model's layers, got \[48\]",
        ),
        ({"mlp_only_layers": "0"}, "mlp_only_layers: expected indices .* got '0'"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers: expected indices .* got \[True\]"),
    ],
)
def test_a_config_with_experts_names_the_wrong_value(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        models.config_from_hf(CONFIGS["Qwen3-30B-A3B"] | changes)


def test_layers_with_experts_are_every_step_th_that_is_not_listed_as_dense() -> None:
    def experts_in(**changes: Any) -> list[int]:
        cfg: Any = models.config_from_hf(
            CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 7, **changes}
        )
        return [i for i, sparse in enumerate(cfg.moe_layers) if sparse]

    assert experts_in() == experts_in(mlp_only_layers=None) == [0, 1, 2, 3, 4, 5, 6]
    assert experts_in(decoder_sparse_step=2) == [1, 3, 5]
    assert experts_in(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == [1, 5]
    assert experts_in(mlp_only_layers=[0, 6]) == [1, 2, 3, 4, 5]


def test_keys_of_experts_have_the_names_and_defaults_of_transformers() -> None:
    config = CONFIGS["Qwen3-30B-A3B"]
    cfg: Any = models.config_from_hf(config)
    assert cfg.attention.head_dim == 128 and cfg.attention.qk_norm and cfg.moe.norm_top_k
    renamed = {k: v for k, v in config.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert models.config_from_hf(renamed) == cfg
    short: Any = models.config_from_hf(
        {k: v for k, v in config.items() if k not in ("head_dim", "norm_topk_prob")}
    )
    assert short.attention.head_dim == 64 and not short.moe.norm_top_k


@pytest.mark.parametrize("key", ["first_k_dense_replace", "num_nextn_predict_layers"])
@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "DeepSeek-V3"])
def test_a_count_that_may_be_0_is_read_or_refused(name: str, key: str) -> None:
    for wrong in ("x", [1], -1, 1.5, True):
        with pytest.raises(ConfigError, match=f"expected {key} to be an integer of at least 0"):
            models.config_from_hf(CONFIGS[name] | {key: wrong})
    default = models.config_from_hf({k: v for k, v in CONFIGS[name].items() if k != key})
    assert models.config_from_hf(CONFIGS[name] | {key: None}) == default
    assert models.config_from_hf(CONFIGS[name] | {key: 0}) != models.config_from_hf(
        CONFIGS[name] | {key: 1}
    )


@pytest.mark.parametrize(
    "prompts",
    [
        5,
        [[1, 2], 3],
        [None],
        {"prompt_token_ids": None},
        [[1.5]],
        [[True]],
        [["a"]],
        [[]],
        ["text"],
        [[99]],
        b"\1\2",
        [b"\1\2"],
        np.float32([1, 2]),
        {1, 2},
        [frozenset((1, 2))],
    ],
)
def test_a_prompt_of_the_wrong_kind_is_refused(prompts: Any) -> None:
    cfg = models.config_from_hf(TARGET)
    params = init_random(models.family(cfg).param_specs(cfg), jax.random.key(0), jnp.float32)
    with pytest.raises(ConfigError, match="prompt"):
        LLM((cfg, params), config=EngineConfig(max_model_len=64)).generate(
            prompts, SamplingParams(max_tokens=2)
        )


def test_an_error_of_the_callers_own_iterator_is_kept() -> None:
    def prompts() -> Iterator[str]:
        yield "text"
        raise FileNotFoundError("prompts.txt")

    with pytest.raises(ConfigError, match="whose items fail .FileNotFoundError") as error:
        items_of(prompts())
    assert isinstance(error.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    "messages",
    [
        "text",
        ["text"],
        [1, 2],
        [[1, 2]],
        {"role": "user", "content": "text"},
        [[{"role": "user"}, "text"]],
    ],
)
def test_chat_takes_chats_and_nothing_else(messages: Any) -> None:
    """A text would go without the chat template."""
    with pytest.raises(ConfigError, match="prompt 0: expected a list of chat messages"):
        object.__new__(LLM).chat(messages)


def test_settings_may_be_numpys_integers() -> None:
    """Which have no bit_length, and overflow."""
    asked = {
        "max_num_seqs": np.int64(5),
        "max_model_len": np.int32(64),
        "batch_buckets": np.array([5, 2]),
    }
    config = EngineConfig(**asked)  # type: ignore[arg-type]
    assert config == EngineConfig(max_num_seqs=5, max_model_len=64, batch_buckets=(2, 5))
    assert {type(x) for x in (config.max_num_seqs, *(config.batch_buckets or ()))} == {int}
    assert EngineConfig(max_num_seqs=np.int64(5)).batch_buckets == (1, 2, 4, 8)  # type: ignore[arg-type]
    schedule: Any = [(np.int64(1), 2, np.int64(1))]
    speculative = SpeculativeConfig(
        num_speculative_tokens=np.int64(3), num_speculative_tokens_per_batch_size=schedule
    )  # type: ignore[arg-type]
    assert speculative == SpeculativeConfig(
        num_speculative_tokens=3, num_speculative_tokens_per_batch_size=((1, 2, 1),)
    )


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: SamplingParams(stop_token_ids=5), "stop_token_ids"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop_token_ids=(2**31,)), "stop_token_ids"),
        (lambda: SamplingParams(top_k=2**31), "top_k"),
        (lambda: EngineConfig(batch_buckets=("a", 8)), "batch_buckets"),  # type: ignore[arg-type]
        (lambda: EngineConfig(kernels=3), "kernels: expected a name or op=name,op=name, got 3"),  # type: ignore[arg-type]
        (
            lambda: LLM.from_pretrained(batch_buckets=8),
            "batch_buckets: expected batch sizes .* got 8",
        ),  # type: ignore[arg-type]
        (
            lambda: LLM.from_pretrained(speculative="eagle3"),
            "speculative: expected a SpeculativeConfig, its keys or None, got 'eagle3'",
        ),  # type: ignore[arg-type]
        (
            lambda: LLM(("a-folder",)),
            r"target: expected a .* pair whose params are jax arrays .LLM.from_pretrained takes a "
            r"folder or hub id., got \('a-folder',\)",
        ),  # type: ignore[arg-type]
        (lambda: SpeculativeConfig(model=["x"]), "model"),  # type: ignore[arg-type]
        (lambda: SpeculativeConfig(norm_output="yes"), "norm_output"),  # type: ignore[arg-type]
        (
            lambda: SpeculativeConfig(
                rejection_sample_method="synthetic", synthetic_acceptance_rates=["a"]
            ),
            "rates",
        ),  # type: ignore[arg-type]
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(make: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        make()


def test_a_switch_is_read_as_it_is() -> None:
    for value in (True, False, None):
        found = models.config_from_hf(TARGET | {"tie_word_embeddings": value})
        assert found.tie_word_embeddings is bool(value)


@pytest.mark.parametrize("array", [np.array(3), jnp.asarray(3), np.array(3.5)])
def test_an_array_without_axes_is_no_list(array: Any) -> None:
    for fields in ("stop_token_ids", "allowed_token_ids", "stop", "bad_words"):
        with pytest.raises(ConfigError, match=fields):
            SamplingParams(**{fields: array})
    with pytest.raises(ConfigError, match="batch_buckets"):
        EngineConfig(batch_buckets=array)


def test_numbers_beyond_a_float_are_refused() -> None:
    for field in ("temperature", "top_p", "presence_penalty"):
        with pytest.raises(ConfigError, match=field):
            SamplingParams(**{field: 10**400})
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=10**400)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unable to initialize backend 'cuda': no device\nmore"), "Unable .*device"),
        (AssertionError(), "no such backend"),
    ],
)
def test_a_platform_that_is_not_there_is_named(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise error

    monkeypatch.setattr(jax, "default_backend", missing)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(
        ConfigError, match=f"JAX_PLATFORMS: expected a platform .*, got 'cuda': {reason}$"
    ):
        LLM.from_pretrained("somewhere")


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("num_gpu_blocks_override", int),
        ("num_gpu_blocks_override", lambda number: (1, number)),
        ("batch_buckets", lambda number: [8, number]),
    ],
)
def test_settings_of_the_engine_that_int32_does_not_hold(name: str, put: Any) -> None:
    settings: dict[str, Any] = {name: put(LARGEST)}
    EngineConfig(**settings)
    for value in (LARGEST + 1, 10**5000):
        settings = {name: put(value)}
        with pytest.raises(ConfigError, match=rf"^{name}: expected at most 2\*\*31 - 1, got "):
            EngineConfig(**settings)


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("num_speculative_tokens", int),
        ("max_num_verify_tokens", int),
        ("draft_max_model_len", int),
        ("draft_sliding_window", int),
        ("draft_tensor_parallel_size", int),
        ("prompt_lookup_max", int),
        ("suffix_decoding_max_tree_depth", int),
        ("suffix_decoding_max_spec_factor", int),
        ("eagle_aux_hidden_state_layer_ids", lambda number: [number]),
        ("num_speculative_tokens_per_batch_size", lambda number: [(1, number, 1)]),
    ],
)
def test_settings_of_a_draft_that_int32_does_not_hold(name: str, put: Any) -> None:
    settings: dict[str, Any] = {name: put(LARGEST)}
    SpeculativeConfig(**settings)
    settings = {name: put(LARGEST + 1)}
    with pytest.raises(ConfigError, match=rf"^{name}: expected at most 2\*\*31 - 1, got 21474836"):
        SpeculativeConfig(**settings)


@pytest.mark.parametrize(
    "name", ["max_model_len", "block_size", "max_num_batched_tokens", "tensor_parallel_size"]
)
def test_sizes_that_int32_does_not_hold_are_refused(name: str) -> None:
    settings: dict[str, Any] = {name: LARGEST}
    assert getattr(EngineConfig(**settings), name) == LARGEST
    for value, shown in ((LARGEST + 1, "2147483648"), (10**5000, "one int of too many digits")):
        settings = {name: value}
        with pytest.raises(
            ConfigError, match=rf"{name}: expected at most 2\*\*31 - 1, got {shown}"
        ):
            EngineConfig(**settings)


@pytest.mark.parametrize("given", [None, 5, "", [("method", "ngram")], iter(())])
def test_a_speculative_config_is_made_of_a_mapping(given: Any) -> None:
    with pytest.raises(ConfigError, match="^speculative config: expected a mapping, got "):
        SpeculativeConfig.from_dict(given)


def test_a_program_has_no_more_rounds_than_a_request() -> None:
    assert EngineConfig(max_model_len=64, rounds_per_step=64).rounds_per_step == 64
    for rounds in (65, LARGEST + 1):
        with pytest.raises(
            ConfigError, match="^rounds_per_step: expected at most max_model_len 64,"
        ):
            EngineConfig(max_model_len=64, rounds_per_step=rounds)


def test_max_num_seqs_has_a_power_of_two_in_int32() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seqs: expected at most 2\*\*30, got 21474"):
        EngineConfig(max_num_seqs=LARGEST)


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "a\0b.gguf", "\ud800.gguf"])
def test_a_message_shows_a_name_that_a_terminal_cannot_print(name: str) -> None:
    with pytest.raises(ConfigError) as e:
        LLM(name)
    assert str(e.value).isprintable(), str(e.value)


@pytest.mark.parametrize("wanted", ["yes", 1, "auto"])
def test_the_order_of_prompts_is_a_switch_or_none(wanted: object) -> None:
    shown = repr(wanted)
    with pytest.raises(ConfigError) as error:
        EngineConfig(prefill_in_order=wanted)  # type: ignore[arg-type]
    assert str(error.value) == f"prefill_in_order: expected true or false, got {shown}"
    assert EngineConfig().prefill_in_order is None
