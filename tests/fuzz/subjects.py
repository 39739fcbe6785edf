"""Files and values that are damaged, each with the function of jaxspec that reads it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import models
from jaxspec.config import ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.drafts import dspark
from jaxspec.engine.input_processor import InputProcessor
from jaxspec.layers.params import is_spec
from jaxspec.loading import load_tokenizer, open_checkpoint
from jaxspec.loading.gguf_file import convert_gguf
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.pretrained import check_speculative
from jaxspec.sampling.params import SamplingParams
from jaxspec.training.data import Chats, pack
from tests.fuzz.mutations import VALUES, mutate_bytes, mutate_json, mutate_value
from tests.support import full_size, gguf_files, quantized
from tests.support.families import draft_config, target_config

TEXT = "Hello, 12 wörlds!\n<|im_start|>"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
CHATS_VOCAB = 300


@dataclass(frozen=True)
class Subject:
    """Something that callers hand to jaxspec.

    write:  write an undamaged one into a folder.
    mutate: damage it there.
    load:   read it as jaxspec does; the bytes of what was read.
    exact:  whether what is read must equal the undamaged one: the format has checks of its own, or
            the damage is of a kind that a reader can always see. Elsewhere other values are other
            input, and any result will do.
    """

    write: Callable[[Path], None]
    mutate: Callable[[Random, Path], None]
    load: Callable[[Path], bytes]
    exact: bool = False


def digest(tree: Any) -> bytes:
    """Return a hash of arrays and of everything else by its repr."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, (np.ndarray, jax.Array)):
            array = np.asarray(leaf)
            found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            found.update(repr(leaf).encode("utf-8", "replace"))
    return found.digest()


# --- files of a checkpoint ------------------------------------------------------------------------


def write_target(folder: Path) -> None:
    from tests.commands.conftest import write_target

    write_target(folder / "target")


def write_quantized(folder: Path) -> None:
    plain = quantized.plain_checkpoint(folder / "plain", quantized.NARROW)
    quantized.compressed_static_fp8(plain, folder / "target")


# Forms of quantised targets, and values that their scales never have.
WRONG_SCALES = (float("nan"), float("inf"), -float("inf"))
SCALE_SUFFIXES = ("_scale", "_scale_inv", ".scales")


def write_scales(folder: Path) -> None:
    plain = quantized.plain_checkpoint(
        folder / "plain", quantized.NARROW | {"num_hidden_layers": 1}
    )
    quantized.deepseek_fp8(plain, folder / "deepseek")
    quantized.modelopt_fp8(plain, folder / "modelopt")
    quantized.gptq(plain, folder / "gptq", sym=True)


def damage_scales(rng: Random, folder: Path) -> None:
    """Give a scale of one of the files a value that no scale has."""
    from safetensors.numpy import save_file

    form = rng.choice(("deepseek", "modelopt", "gptq"))
    tensors = quantized.tensors_of(folder / form)
    name = rng.choice(sorted(name for name in tensors if name.endswith(SCALE_SUFFIXES)))
    array = tensors[name].copy()
    wrong = WRONG_SCALES if form == "gptq" else (*WRONG_SCALES, 0.0, -0.0, -1e-30, -1.0)
    array.flat[rng.randrange(array.size)] = rng.choice(wrong)
    save_file(tensors | {name: array}, folder / form / "model.safetensors")


def load_scales(folder: Path) -> bytes:
    forms = ("deepseek", "modelopt", "gptq")
    return digest([load_target(folder / form, jnp.float32) for form in forms])


def write_shards(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_target(folder)
    target = folder / "target"
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    held = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in held.items():
        save_file({name: tensors[name] for name in some}, target / file)
    weight_map = {name: file for file, some in held.items() for name in some}
    (target / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def write_pickle(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    write_target(folder)
    path = folder / "target" / "model.safetensors"
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def write_draft(folder: Path) -> None:
    from tests.commands.conftest import write_draft

    write_target(folder)
    write_draft(folder / "draft")


def write_block_draft(folder: Path) -> None:
    """A DSpark head in DeepSpec's layout, with windows and both of its heads."""
    from safetensors.numpy import save_file

    from tests.commands.conftest import HIDDEN, INNER, VOCAB

    write_target(folder)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
        "block_size": 7,
        "mask_token_id": 1,
        "target_layer_ids": [-1],
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 4,
        "markov_head_type": "gated",
    }
    target = load_target(folder / "target", jnp.float32)[0]
    named = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    cfg = dspark.config_from_checkpoint(config, named, target, SpeculativeConfig())
    specs = jax.tree.leaves(dspark.param_specs(cfg), is_leaf=is_spec)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for spec in specs
        for name, shape in spec.tensors.items()
    }
    (folder / "draft").mkdir()
    save_file(tensors, folder / "draft" / "model.safetensors")
    (folder / "draft" / "config.json").write_text(json.dumps(config))


def load_checkpoint(folder: Path) -> bytes:
    return digest(load_target(folder / "target", jnp.float32))


def load_head(folder: Path) -> bytes:
    target = load_target(folder / "target", jnp.float32)
    speculative = SpeculativeConfig(model="draft", method="eagle3")
    return digest(load_draft(folder / "draft", *target, speculative, jnp.float32))


def load_block_head(folder: Path) -> bytes:
    target = load_target(folder / "target", jnp.float32)
    return digest(load_draft(folder / "draft", *target, SpeculativeConfig(), jnp.float32))


def read_tokenizer(folder: Path) -> bytes:
    """Encode and decode a text and a chat."""
    tokenizer = load_tokenizer(folder / "target")
    ids = tokenizer.encode(TEXT), tokenizer.encode_word("a"), tokenizer.encode_chat(CHAT)
    return digest((ids, [tokenizer.decode(i) for i in ids], tokenizer.eos_token_ids))


def damage_json(name: str) -> Callable[[Random, Path], None]:
    """Return what damages a JSON file of the folder."""

    def mutate(rng: Random, folder: Path) -> None:
        path = folder / name
        path.write_bytes(mutate_json(rng, path.read_text(encoding="utf-8")))

    return mutate


def damage_bytes(name: str, within: int | None = None) -> Callable[[Random, Path], None]:
    """Return what damages a file of the folder; name: a pattern, of which one file is chosen."""

    def mutate(rng: Random, folder: Path) -> None:
        files = sorted(p for p in folder.glob(name) if p.is_file() and p.stat().st_size)
        path = rng.choice(files)
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), within))

    return mutate


def damage_header(rng: Random, folder: Path) -> None:
    """Damage the header of a safetensors file, and keep its length right."""
    path = folder / "target" / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = mutate_json(rng, content[8 : 8 + length].decode())
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def damage_tokenizer(rng: Random, folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json")
    damage_json(f"target/{rng.choice(names)}")(rng, folder)


TEMPLATES = (
    "{{ 1 / 0 }}",
    "{{ messages[99].role.x }}",
    "{{ no_such_function() }}",
    "{{ raise_exception('two\\nlines') }}",
    "{{ '%d' % 'a' }}",
    "{{ 'a' * 10**11 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(10**10) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set n = namespace(v='aa') %}{% for i in range(60) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ 9**9**9 }}",
    "{% for %}",
    "{{",
    "{% include 'x' %}",
    "\ud800",
)


def damage_template(rng: Random, folder: Path) -> None:
    path = folder / "target" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config["chat_template"]
    at = rng.randrange(len(template))
    if rng.random() < 0.7:
        template = template[:at] + rng.choice(TEMPLATES) + template[at:]
    else:
        template = mutate_bytes(rng, template.encode()).decode("utf-8", "replace")
    path.write_text(json.dumps(config | {"chat_template": template}))


# --- GGUF -----------------------------------------------------------------------------------------


def write_gguf(folder: Path) -> None:
    gguf_files.write_gguf(folder).rename(folder / "x.gguf")


def write_sentencepiece(folder: Path) -> None:
    pieces = gguf_files.sentencepiece("the quick brown fox and the other quick foxes")
    gguf_files.write_gguf(folder, pieces=pieces).rename(folder / "x.gguf")


def load_gguf(folder: Path) -> bytes:
    checkpoint = open_checkpoint(convert_gguf(folder / "x.gguf", folder / "out"))
    models.config_from_hf(checkpoint.config)
    tokenizer = load_tokenizer(folder / "out")
    tensors = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    return digest((checkpoint.config, tensors, tokenizer.encode(TEXT), tokenizer.eos_token_ids))


def damage_places(rng: Random, folder: Path) -> None:
    """Damage a dimension, the type or the offset of one tensor, or two tensors' offsets."""
    path = folder / "x.gguf"
    content = bytearray(path.read_bytes())
    fields = []
    for name, dims in (("token_embd", 2), ("blk.1.attn_q", 2), ("blk.0.ffn_norm", 1)):
        key = f"{name}.weight".encode()
        at = content.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
        fields.append((at, dims))
    at, dims = rng.choice(fields)
    kind = rng.choice(("dims", "dim", "type", "offset", "offset", "swap"))
    offsets = [a + 8 + 8 * d for a, d in fields]
    if kind == "dims":
        struct.pack_into("<I", content, at, rng.choice((0, 1, 2, 3, 4, 5, 2**31)))
    elif kind == "dim":
        number = rng.choice((0, 1, 32, 63, 64, 128, 2**32, 2**62, 2**63))
        struct.pack_into("<Q", content, at + 4 + 8 * rng.randrange(dims), number)
    elif kind == "type":
        struct.pack_into("<I", content, at + 4 + 8 * dims, rng.randrange(50))
    elif kind == "offset":
        (offset,) = struct.unpack_from("<Q", content, at + 8 + 8 * dims)
        moved = rng.choice((0, 1, 32, 64, offset + 1, offset + 32, offset - 32, 2**63))
        struct.pack_into("<Q", content, at + 8 + 8 * dims, moved % 2**64)
    else:
        one, two = rng.sample(offsets, 2)
        content[one : one + 8], content[two : two + 8] = (
            content[two : two + 8],
            content[one : one + 8],
        )
    path.write_bytes(content)


# --- training -------------------------------------------------------------------------------------


def train_state() -> Any:
    """A state of few arrays, put on the device without a program."""
    from jaxspec.training.loop import TrainState

    def arrays(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        layer = {"q_proj": rng.normal(size=(32, 16)), "norm": np.ones(16)}
        return {"fc": rng.normal(size=(96, 32)), "layers": [layer]}

    state = TrainState(arrays(0), {"mu": arrays(1), "nu": arrays(2)}, 7)  # pyright: ignore
    return jax.tree.map(
        lambda x: jax.device_put(np.asarray(x, np.int32 if x is state.step else np.float32)), state
    )


def train_pair() -> Any:
    """The head of that state, without its target."""
    from jaxspec.training.objective import TrainingPair

    head: Any = draft_config("eagle3", target_config("gpt_oss"))
    scale = np.linspace(1.0, 2.0, 96, dtype=np.float32)
    return TrainingPair(head, None, {}, np.arange(head.vocab_size), scale)  # pyright: ignore


def write_state(folder: Path) -> None:
    from jaxspec.training.resume import save_state

    save_state(folder / "state", train_state(), train_pair())


def load_state(folder: Path) -> bytes:
    from jaxspec.training.resume import restore_state

    state, pair = restore_state(folder / "state", train_state(), train_pair())
    return digest((state, pair.feature_scale))


def write_chats(folder: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, CHATS_VOCAB, n) for n in (5, 9, 200)]
    pack(sequences, [2, 3, 100], [0.0, 0.5, 1.0], np.uint16).save(folder / "chats.npz")


def damage_chats(rng: Random, folder: Path) -> None:
    if rng.random() < 0.6:
        damage_bytes("chats.npz")(rng, folder)
        return
    with np.load(folder / "chats.npz") as arrays:
        held = {name: array.tolist() for name, array in arrays.items()}
    changed = {}
    damaged = mutate_value(rng, held)
    for name, value in damaged.items() if isinstance(damaged, dict) else ():
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            changed[name] = np.asarray(value)
    np.savez(folder / "chats.npz", **changed)


def load_chats(folder: Path) -> bytes:
    chats = Chats.load(folder / "chats.npz", CHATS_VOCAB)
    counts = chats.answer_counts(CHATS_VOCAB)
    return digest((chats.tokens, chats.offsets, chats.answer_start, chats.temperature, counts))


# --- values: configs, requests, settings, flags ---------------------------------------------------


def write_values(**values: Any) -> Callable[[Path], None]:
    """Return what writes values as JSON, the form in which `damage_value` keeps them."""

    def write(folder: Path) -> None:
        (folder / "value.json").write_text(json.dumps(values))

    return write


def damage_value(rng: Random, folder: Path) -> None:
    path = folder / "value.json"
    value = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = {name: mutate_value(rng, part) for name, part in value.items()}
    path.write_text(json.dumps(value))


def read_value(folder: Path) -> Any:
    return json.loads((folder / "value.json").read_text())


def load_family(folder: Path) -> bytes:
    """Read the real models' configs, as far as the table of their tensors."""
    found = []
    for config in read_value(folder).values():
        if not isinstance(config, Mapping):
            raise ConfigError("config.json: no object")
        cfg: Any = models.config_from_hf(config)
        found.append((cfg, len(jax.tree.leaves(models.family(cfg).param_specs(cfg)))))
    return digest(repr(found))


def damage_family(rng: Random, folder: Path) -> None:
    """Keep one of the models, damaged."""
    path = folder / "value.json"
    name, config = rng.choice(sorted(json.loads(path.read_text()).items()))
    path.write_text(json.dumps({name: mutate_value(rng, config)}))


def load_requests(folder: Path) -> bytes:
    value = read_value(folder)
    if not isinstance(value["params"], Mapping):
        raise ConfigError("params: no object")
    processor = InputProcessor(
        load_tokenizer(folder / "target"),
        (256,),
        vocab_size=259,
        max_model_len=64,
        num_speculative_tokens=3,
        default_params=SamplingParams(),
    )
    known = {k: v for k, v in value["params"].items() if k in SamplingParams.__dataclass_fields__}
    if isinstance(bias := known.get("logit_bias"), Mapping):  # JSON has strings for keys
        known["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias.items()}
    params = SamplingParams(**known)
    return digest(repr(processor.make_requests(value["prompts"], params, streams=False)))


def write_requests(folder: Path) -> None:
    write_target(folder)
    params = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "seed": 3,
        "max_tokens": 8,
        "min_tokens": 2,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [1, 2, 3, 5, 9],
        "banned_token_ids": [4],
        "bad_words": ["ab"],
        "bad_words_token_ids": [[1, 2]],
        "stop": ["x"],
        "stop_token_ids": [7],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "n": 2,
        "num_speculative_tokens": 2,
        "ignore_eos": False,
        "include_stop_str_in_output": True,
    }
    prompts = ["Hello", {"prompt": "Hi"}, {"prompt_token_ids": [1, 2, 3]}]
    write_values(params=params, prompts=prompts)(folder)


def load_settings(folder: Path) -> bytes:
    value = read_value(folder)
    if not all(isinstance(part, Mapping) for part in value.values()):
        raise ConfigError("settings: no object")
    fields = EngineConfig.__dataclass_fields__
    engine = EngineConfig(**{k: v for k, v in value["engine"].items() if k in fields})
    return digest(repr((engine, check_speculative(value["speculative"]))))


PLAN = ["--gpu", "24", "--max-model-len", "64", "--max-num-seqs", "2", "--block-size", "16"]


def write_flags(folder: Path) -> None:
    write_target(folder)
    write_values(flags=[*PLAN, "--dtype", "float32", "--utilization", "0.5"])(folder)


def load_flags(folder: Path) -> bytes:
    """Run `jaxspec plan`; a wrong flag ends with code 2 and, after click's usage, a sentence."""
    from jaxspec.commands import plan
    from jaxspec.tools.cli import command

    flags = [str(flag) for flag in read_value(folder)["flags"] or ()]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            command(plan.main)(["--target", str(folder / "target"), *flags])
        except SystemExit as e:
            said = errors.getvalue().strip().splitlines()
            if e.code == 2 and said and said[-1].lower().startswith("error: "):
                raise ConfigError(said[-1]) from None
            fits_not = e.code == 1 and output.getvalue() and not said  # the plan's own answer
            if e.code and not fits_not:
                raise AssertionError(f"exit code {e.code}: {errors.getvalue()}") from None
    return digest(output.getvalue())


def damage_flags(rng: Random, folder: Path) -> None:
    path = folder / "value.json"
    flags = json.loads(path.read_text())["flags"]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(flags))
        value = str(rng.choice(VALUES)).replace("\0", "")[:100]
        flags[at] = rng.choice((value, value, f"--{value}", "--no-such-flag"))
    path.write_text(json.dumps({"flags": flags}))


SUBJECTS: dict[str, Subject] = {
    "config": Subject(write_target, damage_json("target/config.json"), load_checkpoint),
    "family": Subject(write_values(**full_size.CONFIGS), damage_family, load_family),
    "quantization": Subject(write_quantized, damage_json("target/config.json"), load_checkpoint),
    "scales": Subject(write_scales, damage_scales, load_scales, exact=True),
    "safetensors": Subject(
        write_target, damage_bytes("target/model.safetensors", 2000), load_checkpoint
    ),
    "safetensors-header": Subject(write_target, damage_header, load_checkpoint),
    "index": Subject(
        write_shards,
        damage_json("target/model.safetensors.index.json"),
        load_checkpoint,
        exact=True,
    ),
    "pickle": Subject(write_pickle, damage_bytes("target/pytorch_model.bin"), load_checkpoint),
    "draft": Subject(write_draft, damage_json("draft/config.json"), load_head),
    "draft-blocks": Subject(write_block_draft, damage_json("draft/config.json"), load_block_head),
    "tokenizer": Subject(write_target, damage_tokenizer, read_tokenizer),
    "template": Subject(write_target, damage_template, read_tokenizer),
    "gguf": Subject(write_gguf, damage_bytes("x.gguf", 9000), load_gguf),
    "gguf-sentencepiece": Subject(write_sentencepiece, damage_bytes("x.gguf", 9000), load_gguf),
    "gguf-places": Subject(write_gguf, damage_places, load_gguf, exact=True),
    "state": Subject(write_state, damage_bytes("state/**/*"), load_state, exact=True),
    "chats": Subject(write_chats, damage_chats, load_chats),
    "requests": Subject(write_requests, damage_value, load_requests),
    "settings": Subject(
        write_values(
            engine={
                "max_model_len": 64,
                "max_num_seqs": 4,
                "batch_buckets": [1, 4],
                "block_size": 16,
                "gpu_memory_utilization": 0.9,
                "num_gpu_blocks_override": 64,
                "enable_prefix_caching": True,
                "kernels": "reference",
            },
            speculative={"model": "x", "method": "eagle3", "num_speculative_tokens": 3},
        ),
        damage_value,
        load_settings,
    ),
    "flags": Subject(write_flags, damage_flags, load_flags),
}
