"""A trained head on disk, without the target's embedding, in a format that vLLM loads.

EAGLE-1 has SafeAI's format, the other methods have speculators'.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.drafts import Eagle3Config, EagleConfig
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.dspark import DSparkConfig
from jaxspec.layers.params import (
    AssembledSpec,
    Params,
    ParamSpec,
    is_spec,
    separate,
    separate_table,
)
from jaxspec.loading.new_file import replaced
from jaxspec.training.config import TrainableDraft
from jaxspec.training.trained import trained_specs
from jaxspec.training.vocabulary import vocabulary_maps

WEIGHTS = "model.safetensors"
PIECE_BYTES = 15 << 20


@dataclass(frozen=True)
class Verifier:
    """The target, as far as a head's config.json describes it.

    name:          a hub id or a path
    architectures: as the target's own config.json has them
    """

    name: str
    architectures: tuple[str, ...]
    max_position_embeddings: int


def speculators_config(
    cfg: Eagle3Config, verifier: Verifier, num_speculative_tokens: int = 3
) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 head as speculators 0.9 writes it.

    Aux layer ids are boundary ids there too.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": cfg.draft_vocab_size,
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc,
        "fc_norm": cfg.fc_norm,
        "norm_output": cfg.norm_output,
        "target_hidden_size": cfg.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(cfg.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": _layer_config(cfg, verifier),
        "speculators_config": _proposals("eagle3", verifier, num_speculative_tokens),
    }


def speculators_block_config(cfg: DFlashConfig, verifier: Verifier) -> dict[str, Any]:
    """Return config.json of a DFlash or DSpark head as speculators 0.9 writes it.

    It proposes as many drafts as a block has. ConfigError for a head that the layout cannot
    describe.
    """
    windows = {window for window in cfg.windows if window is not None}
    if len(windows) > 1 or (windows and not cfg.windows_from_anchor):
        raise ConfigError(
            f"windows: expected one window that ends at the anchor, got {cfg.windows}"
        )
    causal = {c for c, w in zip(cfg.causal, cfg.windows, strict=True) if w is not None}
    full = {c for c, w in zip(cfg.causal, cfg.windows, strict=True) if w is None}
    if True in full or len(causal) > 1:
        raise ConfigError(
            f"causal: expected it of all layers with a window or of none, got {cfg.causal}"
        )
    layer = _layer_config(cfg, verifier)
    layer |= _windows(cfg.windows)
    config: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if cfg.method == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": cfg.method,
        "speculators_version": "0.9.0",
        "draft_vocab_size": cfg.draft_vocab_size,
        "target_hidden_size": cfg.target_hidden_size,
        "aux_hidden_state_layer_ids": list(cfg.aux_layers),
        "block_size": cfg.draft_block_size,
        "mask_token_id": cfg.mask_token_id,
        "sample_from_anchor": cfg.sample_from_anchor,
        "sliding_window_non_causal": bool(windows) and True not in causal,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": _proposals(cfg.method, verifier, cfg.block_capacity),
    }
    if isinstance(cfg, DSparkConfig):
        config |= {
            "markov_rank": cfg.markov_rank,
            "markov_head_type": cfg.markov_kind,
            "enable_confidence_head": cfg.has_confidence,
            "confidence_head_with_markov": cfg.confidence_reads_token,
        }
    return config


def _layer_config(cfg: Eagle3Config | DFlashConfig, verifier: Verifier) -> dict[str, Any]:
    """Return transformer_layer_config."""
    rope = cfg.attention.rope
    return {
        "model_type": "qwen3" if cfg.attention.qk_norm else "llama",
        **_layer_fields(cfg, verifier),
        "rope_parameters": rope.to_hf(),
        "rope_theta": rope.theta,
        "tie_word_embeddings": False,
    }


def _layer_fields(cfg: TrainableDraft, verifier: Verifier) -> dict[str, Any]:
    """Return what every format writes of a head's layers."""
    attention = cfg.attention
    fields = {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": attention.qkv_bias,
        "mlp_bias": False,
        "rms_norm_eps": cfg.rms_norm_eps,
        "max_position_embeddings": verifier.max_position_embeddings,
    }
    if not isinstance(cfg, DFlashConfig) and cfg.sliding_window is not None:
        fields |= _windows((cfg.sliding_window,) * cfg.num_layers)
    return fields


def _windows(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the fields of the layers' sliding windows, all of one size; None: full attention."""
    return {
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ],
        "sliding_window": next((window for window in windows if window is not None), None),
        "use_sliding_window": any(window is not None for window in windows),
    }


def _proposals(algorithm: str, verifier: Verifier, num_speculative_tokens: int) -> dict[str, Any]:
    """Return speculators_config."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": num_speculative_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {
            "name_or_path": verifier.name,
            "architectures": list(verifier.architectures),
        },
    }


def safeai_config(cfg: EagleConfig, verifier: Verifier) -> dict[str, Any]:
    """Return config.json of an EAGLE-1 head as SafeAI's repository writes it.

    It names rope_theta, whose default would not be the target's.
    """
    scaling = cfg.attention.rope.to_hf()
    theta = scaling.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_layer_fields(cfg, verifier),
        "bias": cfg.fc_bias,
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "tie_word_embeddings": cfg.tied_lm_head,
        "torch_dtype": "bfloat16",
    }


def save_draft(
    folder: Path,
    cfg: TrainableDraft,
    params: Params,
    draft_ids: np.ndarray,
    verifier: Verifier,
) -> None:
    """Write the head in bfloat16, atomically: the folder holds the old head until the new is whole.

    EAGLE-1 has SafeAI's format, the other methods have speculators'. params: what trained_specs
    names. Anything beside it (the target's embedding, maps) is not written. The old head's card and
    record go with it; other files in the folder stay.

    Raises ConfigError for weights that are not finite; the old head stays.
    """
    tensors: dict[str, np.ndarray] = {}
    if cfg.maps_vocabulary:
        tensors["d2t"], tensors["t2d"] = vocabulary_maps(draft_ids, cfg.vocab_size)

    def add(spec: ParamSpec, array: jax.Array) -> None:
        if isinstance(spec, AssembledSpec):
            raise ConfigError(
                f"{spec.name}: expected a tensor of a head's own, got one that loading builds from "
                f"{', '.join(spec.tensors)}, which is not undone"
            )
        host = np.asarray(jax.device_get(array)).astype(ml_dtypes.bfloat16)
        if wrong := int((~np.isfinite(host)).sum()):
            raise ConfigError(
                f"{folder}: expected a head of finite numbers, got {spec.name} with {wrong} of "
                f"{host.size} that are not; a head that was saved before is kept"
            )
        tensors[spec.name] = np.ascontiguousarray(host.T if spec.transpose else host)

    specs = trained_specs(cfg)
    own = separate(specs, {name: params[name] for name in specs})
    jax.tree.map(add, separate_table(specs), own, is_leaf=is_spec)
    folder = folder.resolve()  # a link stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    if old.exists():  # of a process that was killed between two renames, or after them
        if folder.exists():
            _move_others(old, folder)
        else:
            os.replace(old, folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
    (fresh / WEIGHTS).chmod(0o644)  # safetensors' temporary file is the owner's only
    if isinstance(cfg, EagleConfig):
        config = safeai_config(cfg, verifier)
    elif isinstance(cfg, DFlashConfig):
        config = speculators_block_config(cfg, verifier)
    else:
        config = speculators_config(cfg, verifier)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    if old.exists():
        _move_others(old, folder)
    shutil.rmtree(old, ignore_errors=True)


_OF_A_HEAD = re.compile(
    r"(config\.json|README\.md|training\.json|loss\.png|pytorch_model\.bin|"
    r".*\.safetensors(\.index\.json)?)"
)


def _move_others(old: Path, folder: Path) -> None:
    """Move the files that belong to no head out of the old head's folder into the new one's."""
    for other in old.iterdir():
        if not _OF_A_HEAD.fullmatch(other.name) and not os.path.lexists(folder / other.name):
            os.replace(other, folder / other.name)


def split_file(path: Path, folder: Path, piece_bytes: int) -> list[Path]:
    """Cut a file into pieces name.000, name.001, ... and name.sha256.

    For transports with a limit on the size of a file. Pieces of another file of this name go, and
    no other files. ConfigError, and nothing changes, if there is no file, or an empty one.
    """
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: expected a file to cut, got {e.strerror or e}") from e
    if not content:
        raise ConfigError(f"{path}: expected a file to cut, got an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in _pieces(folder, path.name):
        stale.unlink()
    pieces = []
    for number, begin in enumerate(range(0, len(content), piece_bytes)):
        pieces.append(folder / f"{path.name}.{number:03d}")
        pieces[-1].write_bytes(content[begin : begin + piece_bytes])
    (folder / f"{path.name}.sha256").write_text(
        hashlib.sha256(content).hexdigest() + "\n", encoding="utf-8"
    )
    return pieces


def _pieces(folder: Path, name: str) -> list[Path]:
    """Return the pieces of a file in their order."""
    return sorted(folder.glob(f"{glob.escape(name)}.[0-9][0-9][0-9]"))


def join_file(folder: Path, path: Path) -> None:
    """Join the pieces of path.name in folder, the inverse of split_file.

    Raises ConfigError if a piece is missing or damaged.
    """
    pieces = _pieces(folder, path.name)
    content = b"".join(piece.read_bytes() for piece in pieces)
    digest = folder / f"{path.name}.sha256"
    expected = digest.read_bytes().strip().decode("ascii", "replace") if digest.is_file() else None
    found = hashlib.sha256(content).hexdigest() if pieces else None
    if found is None or found != expected:
        wanted = f"in {digest.name}" if expected is None else f"{expected!r:.80}"
        got = "no pieces" if found is None else repr(found)
        got = f"no {digest.name}" if expected is None else got
        raise ConfigError(
            f"{folder}/{path.name}.000 ...: expected pieces of sha256 {wanted}, got {got}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as f:
        f.write(content)
