"""Calls in vLLM's shape, as its documentation has them: they run, or say in one sentence why not.

Names of models and heads are those of tiny folders; nothing else is changed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.config import keys
from tests.commands.conftest import write_draft, write_target

pytestmark = pytest.mark.once

ANY_PARAMS: Any = SamplingParams  # called with names that are no parameter
ANY_LLM: Any = LLM
PROMPTS = ["Hello, my name is", "The future of AI is"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TEMPLATE = (
    "{% if tools %}tools {{ tools | map(attribute='function') | map(attribute='name') | join }}\n"
    "{% endif %}{% if enable_thinking is defined %}thinking {{ enable_thinking }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target") / "target"))


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_draft(tmp_path_factory.mktemp("head") / "head"))


@pytest.fixture(scope="session")
def llm(target: str, head: str) -> LLM:
    """The shared engine, made as vLLM's page on EAGLE makes it; the method is the head's own."""
    return LLM(
        model=target,
        tensor_parallel_size=1,
        trust_remote_code=False,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.8,
        max_num_seqs=2,
        seed=0,
        disable_log_stats=False,
        limit_mm_per_prompt={"image": 5},
        disable_chunked_mm_input=True,
        allowed_local_media_path="",
        generation_config="auto",
        attention_backend=None,
        max_seq_len_to_capture=8192,
        max_num_batched_tokens=None,
        block_size=None,
        enable_prefix_caching=None,
        speculative_config={
            "model": head,
            "spec_token_tree": None,
            "use_local_argmax_reduction": False,
            "draft_tensor_parallel_size": 1,
            "num_speculative_tokens": 2,
            "max_model_len": 256,
        },
    )


def rendered(llm: LLM, output: Any) -> str:
    return llm.get_tokenizer().decode(output.prompt_token_ids)


# --- calls that run


def test_the_method_is_read_from_the_head(llm: LLM) -> None:
    assert llm.speculative is not None and llm.speculative.method == "eagle3"
    assert llm.speculative.draft_max_model_len == 256
    assert repr(llm) == llm.describe() and "draft: eagle3" in repr(llm)


def test_quickstart(llm: LLM) -> None:
    """docs.vllm.ai, Quickstart: offline batched inference."""
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt and output.finished
        generated_text = output.outputs[0].text
        assert isinstance(generated_text, str) and output.outputs[0].finished()
        assert len(output.outputs[0].token_ids) == 16
    first, second = (int(output.request_id) for output in outputs)
    assert second == first + 1


def test_chat_with_use_tqdm(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """examples/offline_inference/basic/chat.py: a conversation, and a batch of them."""
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about higher education."},
    ]
    params = SamplingParams(max_tokens=4)
    outputs = llm.chat([conversation] * 2, params, use_tqdm=False)
    assert len(outputs) == 2 and capfd.readouterr().err == ""
    llm.chat(conversation, params, use_tqdm=True)
    assert "1/1" in capfd.readouterr().err


def test_chat_template_by_hand(llm: LLM) -> None:
    """Quickstart: apply_chat_template of the tokenizer, then generate."""
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=4)
    by_hand = llm.generate(
        {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}, params
    )
    assert by_hand[0].prompt_token_ids == llm.chat(messages, params)[0].prompt_token_ids


def test_tools_and_template_kwargs(llm: LLM) -> None:
    """examples/offline_inference/chat_with_tools.py, and Qwen3's switch of thinking."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "a1",
                    "type": "function",
                    "function": {"name": "get_current_weather", "arguments": '{"city": "Dallas"}'},
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a1"},
    ]
    [output] = llm.chat(
        messages,
        sampling_params=SamplingParams(max_tokens=1),
        tools=TOOLS,
        chat_template=TEMPLATE,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert rendered(llm, output) == (
        "tools get_current_weather\nthinking False\nuser: Weather?\nassistant: Dallas\n"
        "tool: sunny\nassistant: "
    )


def test_content_parts_are_lines(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chats = [[{"role": "user", "content": content}] for content in (parts, "one\ntwo")]
    a, b = llm.chat(chats, SamplingParams(max_tokens=1))
    assert a.prompt_token_ids == b.prompt_token_ids
    assert "one\ntwo" in rendered(llm, a)


def test_the_last_message_is_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "It is"}]
    [output] = llm.chat(
        messages,
        SamplingParams(max_tokens=1),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert rendered(llm, output).endswith("It is")


def test_stop_reason_and_cached_tokens(llm: LLM) -> None:
    """What ended a text, and the part of a prompt that the prefix cache held."""
    prompt = "What a long prompt this is. " * 8
    greedy = SamplingParams(temperature=0, max_tokens=6)
    llm.generate(prompt, greedy)
    [again] = llm.generate(prompt, greedy)
    assert again.num_cached_tokens is not None and again.num_cached_tokens >= 64
    assert again.num_cached_tokens % 64 == 0
    assert (again.outputs[0].finish_reason, again.outputs[0].stop_reason) == ("length", None)
    text, third = again.outputs[0].text, again.outputs[0].token_ids[2]
    [by_text] = llm.generate(prompt, SamplingParams(temperature=0, stop=[text[1:3]]))
    assert by_text.outputs[0].stop_reason == text[1:3]
    [by_token] = llm.generate(prompt, SamplingParams(temperature=0, stop_token_ids=[third]))
    assert by_token.outputs[0].stop_reason == third


def test_default_sampling_params(llm: LLM, target: str) -> None:
    """examples/basic/offline_inference/generate.py: the model's own, then changed by assignment."""
    sampling_params = llm.get_default_sampling_params()
    assert sampling_params == SamplingParams() is not llm.get_default_sampling_params()
    sampling_params.max_tokens = 5
    sampling_params.temperature = 0
    [output] = llm.generate(PROMPTS[:1], sampling_params)
    assert len(output.outputs[0].token_ids) == 5


def test_settings_that_change_nothing() -> None:
    """vLLM's examples have these engine arguments, at these values."""
    given = {
        "calculate_kv_scales": False,
        "disable_sliding_window": False,
        "enable_log_requests": False,
        "guided_decoding_backend": "xgrammar",
        "kv_cache_memory_bytes": None,
        "logprobs_mode": "raw_logprobs",
        "max_loras": 1,
        "scheduling_policy": "fcfs",
        "served_model_name": ["mine"],
        "swap_space": 4,
        "use_v2_block_manager": True,
        "worker_cls": "auto",
    }
    assert keys.own_keys("LLM", given, ("model",), keys.ENGINE) == {}


def test_generation_config(target: str, tmp_path: Path) -> None:
    """examples/basic/offline_inference: "auto" is vLLM's default, "vllm" leaves the file alone."""
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 3}))
    proposed, plain = SamplingParams(temperature=0.6, top_k=3), SamplingParams()
    for options, of_requests, of_model in (
        ({}, plain, proposed),
        ({"generation_config": "auto"}, proposed, proposed),
        ({"generation_config": "vllm"}, plain, plain),
    ):
        made = LLM(str(folder), max_model_len=64, max_num_seqs=1, **options)
        for each in (made, made.on_same_weights()):
            [request] = each.make_requests("Hello", None)
            assert request.params == of_requests
            assert each.get_default_sampling_params() == of_model
        [request] = made.make_requests("Hello", SamplingParams(top_p=0.5))
        assert request.params == SamplingParams(top_p=0.5)


def test_reset_prefix_cache(llm: LLM) -> None:
    """False while requests run, as in vLLM."""
    prompt, greedy = "A prefix to forget, later. " * 8, SamplingParams(0.0, max_tokens=6)
    llm.generate(prompt, greedy)
    stream = llm.stream(prompt, greedy)
    next(stream)
    assert llm.reset_prefix_cache() is False
    cached = [llm.generate(prompt, greedy)[0].num_cached_tokens for _ in stream][-1]
    assert cached is not None and cached >= 64
    assert llm.reset_prefix_cache(reset_running_requests=False) is True
    [again] = llm.generate(prompt, greedy)
    assert again.num_cached_tokens == 0


def test_calls_that_are_not_here(llm: LLM) -> None:
    """docs.vllm.ai, Sleep mode; examples of beam search, profiling and pooling."""
    for name in keys.ATTRIBUTES:
        assert not hasattr(llm, name)
        with pytest.raises(ConfigError, match=f"^`LLM.{name}` is not here: .") as e:
            getattr(llm, name)
        assert "\n" not in str(e.value)
        for own in re.findall(r"`LLM\.(\w+)", str(e.value).partition(": ")[2]):
            assert hasattr(LLM, own) or hasattr(llm, own)  # what it says instead is there
    with pytest.raises(AttributeError, match="^'LLM' object has no attribute 'slep'$"):
        llm.slep  # type: ignore[attr-defined]  # noqa: B018


def test_special_tokens_are_kept_on_request(llm: LLM) -> None:
    end = llm.eos_token_ids[0]
    params = {"temperature": 0, "max_tokens": 2, "allowed_token_ids": [end], "ignore_eos": True}
    [hidden] = llm.generate("Hello", SamplingParams(**params))
    [shown] = llm.generate("Hello", SamplingParams(**params, skip_special_tokens=False))
    assert hidden.text == "" and shown.text == 2 * llm.get_tokenizer().decode([end])
    streamed = "".join(
        i.text for i in llm.stream("Hello", SamplingParams(**params, skip_special_tokens=False))
    )
    assert streamed == shown.text


def test_spec_decode_example(llm: LLM) -> None:
    """examples/offline_inference/spec_decode.py: prompts of token ids, then the metrics by name."""
    llm.reset_metrics()
    ids = [llm.get_tokenizer().encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [{"prompt_token_ids": x, "multi_modal_data": None} for x in ids]
    outputs = llm.generate(prompts, sampling_params=params)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 24
    metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    num_drafts = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    assert 0 < num_drafts == llm.metrics.num_drafts
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == 2 * num_drafts
    assert sum(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == accepted


def test_ngram(target: str) -> None:
    """Speculating by matching n-grams in the prompt."""
    llm = LLM(
        model=target,
        tensor_parallel_size=1,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
        },
        max_model_len=128,
    )
    assert llm.speculative is not None and llm.speculative.prompt_lookup_max == 4
    for method in (None, "ngram", "[ngram]", "ngram_gpu"):
        read = SpeculativeConfig(method=method, model="[ngram]")
        assert (read.method, read.model) == ("ngram", None)


def test_suffix_without_the_trees_of_other_requests() -> None:
    """docs.vllm.ai, Suffix decoding."""
    values = {"method": "suffix", "num_speculative_tokens": 24}
    own = values | {"suffix_decoding_max_cached_requests": 0}
    assert SpeculativeConfig.from_dict(own) == SpeculativeConfig.from_dict(values)


def test_e4m3_has_two_names() -> None:
    assert EngineConfig(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"  # type: ignore[arg-type]
    assert SpeculativeConfig.from_dict({"kv_cache_dtype": "fp8_e4m3"}).draft_kv_cache_dtype == "fp8"


# --- calls that end in one sentence


class PathOfBytes:
    """What os.scandir(b".") yields."""

    def __fspath__(self) -> bytes:
        return b"/models"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda target, head: LLM(target, tensor_parallel_size=4096),
            "tensor_parallel_size: expected at most the",
        ),
        (
            lambda target, head: LLM(
                target, speculative_config={"model": head, "method": "draft_model"}
            ),
            "model_type: expected one of deepseek_v3,",  # an EAGLE head is no whole model
        ),
        (
            lambda target, head: LLM(
                target, speculative_config={"method": "medusa", "num_speculative_tokens": 32}
            ),
            "method: expected one of eagle, eagle3, dflash, dspark, mtp, draft_model, ngram, "
            "suffix, got 'medusa'",
        ),
        (
            lambda target, head: LLM(
                target, speculative_config={"method": "mtp", "num_speculative_tokens": 1}
            ),
            "mtp",
        ),
        (
            lambda target, head: LLM(target, speculative_config={"model": head, "method": "eagle"}),
            "method: expected 'eagle3', which this head is by its files",
        ),
        (
            lambda target, head: LLM(target, speculative_config={"num_speculative_tokens": 3}),
            "speculative model: expected a folder",
        ),
        (
            lambda target, head: LLM(target, speculative_config={"model": head, "num_spec": 3}),
            "num_speculative_tokens is the nearest, got 'num_spec'",
        ),
        (
            lambda target, head: LLM(target, trust_remote_code=True),
            "trust_remote_code: expected None or False (no code of a checkpoint runs here), got",
        ),
        (lambda target, head: LLM(target, enable_lora=True), "enable_lora: expected None or False"),
        (
            lambda target, head: LLM(target, max_num_seq=4),
            "LLM: expected known settings, of which max_num_seqs is the nearest, got 'max_num_seq'",
        ),
        (
            lambda target, head: LLM(target, runner="pooling"),
            "runner: expected 'auto' or 'generate' (models generate text), got 'pooling'",
        ),
        (
            lambda target, head: LLM(target, kv_cache_dtype="fp8_e5m2"),
            "kv_cache_dtype: expected one of auto, bfloat16, float32, fp8, got 'fp8_e5m2'",
        ),
        (
            lambda target, head: ANY_PARAMS(structured_outputs={"choice": ["a", "b"]}),
            "structured_outputs: expected None (there are no grammars here)",
        ),
        (
            lambda target, head: ANY_PARAMS(guided_decoding={"choice": ["a", "b"]}),
            "guided_decoding: expected None (there are no grammars here)",
        ),
        (
            lambda target, head: LLM(target, enable_chunked_prefill=False),
            "enable_chunked_prefill: expected None or True (long prompts are always cut), got",
        ),
        (
            lambda target, head: LLM(target, enable_sleep_mode=True),
            "enable_sleep_mode: expected None or False (weights stay on the device), got True",
        ),
        (
            lambda target, head: LLM(target, generation_config=target),
            "generation_config: expected None, 'auto' or 'vllm', got '",
        ),
        (
            lambda target, head: LLM(target, logits_processors=["my.Processor"]),
            "logits_processors: expected None or [] or () (processors are part of the compiled",
        ),
        (
            lambda target, head: LLM(target, kv_transfer_config={"kv_role": "kv_both"}),
            "kv_transfer_config: expected None (keys and values stay in their engine), got {'kv",
        ),
        (
            lambda target, head: LLM(target, load_format="dummy"),
            "load_format: expected 'auto' or 'safetensors' or 'hf', got 'dummy'",
        ),
        (
            lambda target, head: ANY_PARAMS(extra_args={"target_token": 1}),
            "extra_args: expected None or {}, got {'target_token': 1}",
        ),
        (
            lambda target, head: LLM(
                target,
                speculative_config={
                    "method": "suffix",
                    "suffix_decoding_max_cached_requests": 1000,
                },
            ),
            "suffix_decoding_max_cached_requests: expected 0 (drafts come from a request's",
        ),
        (
            lambda target, head: LLM(target, seed=42),
            "seed: expected None or 0 (SamplingParams.seed is the seed of a request), got 42",
        ),
        (
            lambda target, head: ANY_PARAMS(temprature=0.5),
            "SamplingParams: expected known settings, of which temperature is the nearest",
        ),
        (
            lambda target, head: LLM(target, speculative_config="ngram"),
            "speculative_config: expected a SpeculativeConfig, its keys or None, got 'ngram'",
        ),
        (
            lambda target, head: LLM(target, None, "ngram"),
            "speculative: expected a SpeculativeConfig, its keys or None, got 'ngram'",
        ),
        (
            lambda target, head: LLM("https://example.org/owner/name"),
            "or a hub id (owner/name), got no such folder",
        ),
        (
            lambda target, head: LLM("Write an essay. " * 500),
            "target: expected a folder, a .gguf file, a name or a hub id, got 'Write an essay.",
        ),
        (
            lambda target, head: LLM("~no-such-user/model"),
            "a name or a hub id, got '~no-such-user/model' (Could not determine home directory",
        ),
        (
            lambda target, head: LLM(target, tokenizer="~no-such-user/model"),
            "tokenizer: expected a folder, a .gguf file, a name or a hub id, got '~no-such-user",
        ),
        (
            lambda target, head: ANY_LLM(PathOfBytes()),
            "model: expected a path of text, got b'/models",
        ),
        (
            lambda target, head: ANY_LLM(target, model=target),
            "LLM: expected the arguments of its signature, got multiple values for argument",
        ),
        (
            lambda target, head: LLM(target, revision="main"),
            "revision: expected none, or a hub id without one beside it, got 'main'",
        ),
    ],
)
def test_one_sentence(
    target: str, head: str, call: Callable[[str, str], object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        call(target, head)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lora_request": "adapter"}, "lora_request: expected None"),
        ({"prefix_allowed": 1}, "LLM.chat: expected known settings, of which"),
        ({"use_tqdm": "yes"}, "progress, use_tqdm: expected true or false, got 'yes'"),
        ({"tools": "weather"}, "tools: expected a list of objects, got 'weather'"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs: expected variables by name"),
        ({"chat_template_kwargs": {"tokenize": True}}, "variables of the template, got tokenize"),
        ({"chat_template_kwargs": {"messages": 5}}, "variables of the template, got messages"),
        ({"chat_template": "{{"}, "that the chat template of the request accepts, got"),
        ({"continue_final_message": True}, "or add_generation_prompt false, got both"),
    ],
)
def test_a_wrong_option_of_chat(llm: LLM, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match="expected") as error:
        llm.chat([{"role": "user", "content": "Hi"}], **options)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda llm: llm.reset_prefix_cache(reset_running_requests=True),
            "reset_running_requests: expected None or False (requests that run keep their blocks)",
        ),
        (
            lambda llm: llm.reset_prefix_cache(reset_runing_requests=True),
            "LLM.reset_prefix_cache: expected known settings, of which reset_running_requests",
        ),
        (
            lambda llm: llm.generate(prompts=None, prompt_token_ids=[[1, 2]]),
            "prompt_token_ids: expected None (`prompts` may be lists of token ids), got [[1, 2]]",
        ),
        (
            lambda llm: llm.generate(prompt="a"),
            "LLM.generate: expected the arguments of its signature, got none for 'prompts'",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}], None, True, None),
            "LLM.chat: expected the arguments of its signature, got too many positional arguments",
        ),
        (
            lambda llm: llm.stream("a", use_tqdm=False),
            "LLM.stream: expected the arguments of its signature, got an unexpected keyword",
        ),
        (
            lambda llm: llm.generate("a", callback="print"),
            "callback: expected a function or None, got 'print'",
        ),
        (
            lambda llm: llm.warmup(batch_sizes=[0]),
            "batch_sizes: expected a list of integers of at least 1 or None, got [0]",
        ),
        (
            lambda llm: llm.warmup(batch_sizes=[]),
            "batch_sizes: expected a list of integers of at least 1 or None, got []",
        ),
        (
            lambda llm: llm.reset_prefix_cache(False),
            "got too many positional arguments; they are vLLM's, by keyword",
        ),
        (
            lambda llm: llm.warmup(lengths=64),
            "lengths: expected a list of integers of at least 1 or None, got 64",
        ),
        (
            lambda llm: llm.warmup(sampling_params=SamplingParams(0.0)),
            "sampling_params: expected a list of SamplingParams or None, got SamplingParams(",
        ),
        (
            lambda llm: llm.generate(bytearray(b"ab")),
            "prompt 0: expected a text, token ids or a list of chat messages, got bytearray(",
        ),
        (
            lambda llm: llm.generate({"prompt_embeds": [[0.5]]}),
            "prompt 0: expected a text, token ids or a list of chat messages, got {'prompt_embeds",
        ),
        (
            lambda llm: llm.generate({"encoder_prompt": "a", "decoder_prompt": "b"}),
            "prompt 0: expected a text, token ids or a list of chat messages, got {'encoder_promp",
        ),
        (
            lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}),
            "prompt 0: expected the keys prompt or prompt_token_ids alone, got multi_modal_data",
        ),
    ],
)
def test_a_wrong_call_of_the_engine(llm: LLM, call: Callable[[LLM], object], sentence: str) -> None:
    """Legacy and multi-modal prompts of vLLM's examples, and its keywords."""
    with pytest.raises(ConfigError) as error:
        call(llm)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user", "content": {"type": "text", "text": "a"}}, "got {'type': 'text'"),
        (
            {"role": "user", "content": b"a"},
            "or a list of parts of type 'text', as content, got b'",
        ),
        ({"role": "user", "content": 3}, "chat: expected a text, or a list of parts"),
        ({"role": 3, "content": "a"}, "expected a list of objects with 'role' and 'content', got"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls to be a list of objects, got {}"),
    ],
)
def test_a_message_that_a_template_would_print_as_python_does(
    llm: LLM, message: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match="^prompt 0: chat: ") as error:
        llm.chat([message])
    assert sentence in str(error.value)


@pytest.mark.parametrize("role", ["tool", "ipython"])
def test_a_tool_may_return_an_object(llm: LLM, role: str) -> None:
    """Llama 3.1's template writes JSON of it."""
    template = "{{ messages[-1].content | tojson }}"
    message = {"role": role, "content": {"temperature": 20}}
    [output] = llm.chat([message], SamplingParams(max_tokens=1), chat_template=template)
    assert rendered(llm, output) == '{"temperature": 20}'


def test_a_prompt_of_both_kinds_without_ids_is_its_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    [a, b] = llm.generate([{"prompt": "Hi", "prompt_token_ids": None}, "Hi"], params)
    assert a.prompt_token_ids == b.prompt_token_ids


def test_further_keys_of_a_prompt_may_say_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    prompt: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "mm_processor_kwargs": {},
        "type": "token",
    }
    [output] = llm.generate([prompt], params)
    assert output.prompt_token_ids == [1, 2]
    with pytest.raises(ConfigError, match="got mm_processor_kwargs, type too$"):
        llm.generate([prompt | {"mm_processor_kwargs": {"crop": 1}, "type": "image"}], params)


def test_from_pretrained_takes_the_name_of_the_model_as_llm_does(target: str) -> None:
    made = LLM.from_pretrained(model=target, max_model_len=64)
    assert made.speculative is None and made.config.max_model_len == 64


def test_an_image_is_refused(llm: LLM) -> None:
    """docs.vllm.ai, Multimodal inputs."""
    image = {"type": "image_url", "image_url": {"url": "https://example.org/duck.jpg"}}
    with pytest.raises(ConfigError, match="prompt 0: chat: expected text, or parts of type 'text'"):
        llm.chat([{"role": "user", "content": [image]}])


def test_the_file_of_a_head_is_no_target_of_a_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision: expected a commit, a tag or a branch, got 3"):
        LLM(str(tmp_path), revision=3)
