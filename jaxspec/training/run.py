"""A run: a new head for a target, trained on its chats, saved and evaluated on the way."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.settings import setting
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.layers.params import Params
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.checkpoint import PIECE_BYTES, WEIGHTS, Verifier, save_draft, split_file
from jaxspec.training.config import TrainableDraft, TrainConfig
from jaxspec.training.data import Chats
from jaxspec.training.evaluation import EvaluationConfig, evaluate_head, evaluated_drafts
from jaxspec.training.feature_scale import feature_scale, scaled_params, unscaled_params
from jaxspec.training.heads import HeadConfig, new_head
from jaxspec.training.loop import Budget, TrainState, data_mesh, init_train_state, train
from jaxspec.training.objective import TrainingPair, target_ops
from jaxspec.training.plot import plot_history
from jaxspec.training.run_record import RunRecord, earlier_history
from jaxspec.training.target import require_packable, require_plain_head
from jaxspec.training.vocabulary import coverage


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run.

    held_out:     chats kept for validation
    data_parallel_size: devices that share each batch; None: all
    save_seconds: time between two saves of the head, each with an evaluation
    keep_state:   save the optimiser's state beside the head
    resume:       go on from that state
    """

    head: HeadConfig
    train: TrainConfig
    evaluation: EvaluationConfig
    held_out: int = setting(512, "Chats kept for validation.")
    max_steps: int = setting(1_000_000, "Steps at most.")
    data_parallel_size: int | None = setting(None, "Devices that share each batch. [default: all]")
    save_seconds: float = setting(150.0, "How often the head is saved and evaluated.")
    keep_state: bool = setting(False, "Save the optimiser's state beside the head (OUTPUT/state).")
    resume: bool = setting(
        False, "Go on from OUTPUT/state; the same curve, if --max-steps ends the run."
    )

    def __post_init__(self) -> None:
        for name in ("keep_state", "resume"):
            if getattr(self, name) and not _has_orbax():
                raise ConfigError(
                    f"{name}: expected orbax-checkpoint (pip install '.[train]'), got none"
                )


def _has_orbax() -> bool:
    """Return whether orbax.checkpoint is installed, which the package orbax alone does not say."""
    find = importlib.util.find_spec
    return find("orbax") is not None and find("orbax.checkpoint") is not None


def train_head(
    cfg: RunConfig,
    target: ChatTarget,
    chats: Chats,
    folder: Path,
    *,
    deadline: float,
    record: RunRecord,
    log: Callable[[str], None],
) -> None:
    """Train until max_steps or deadline (time.monotonic).

    folder gets head/, pieces/, loss.png and, with keep_state, state/.
    """
    mesh = data_mesh(cfg.data_parallel_size)
    require_plain_head(target.params)
    if cfg.train.pack:
        require_packable(target.cfg)
    if len(chats) <= cfg.held_out:
        raise ConfigError(
            f"training data: expected more than the {cfg.held_out} held-out chats, got {len(chats)}"
        )
    training, held_out = chats.split(cfg.held_out)
    counts, held_out_counts = (
        part.answer_counts(target.cfg.vocab_size) for part in (training, held_out)
    )
    draft, params, ids = new_head(cfg.head, target, counts)
    evaluated_drafts(cfg.evaluation, draft)  # ConfigError now, not after the first save
    covered = {
        "coverage": coverage(counts, ids),
        "held_out_coverage": coverage(held_out_counts, ids),
    }
    record.entries["vocabulary"] = {"size": len(ids), **covered}
    record.entries |= describe_head(cfg, target, draft, params)
    log(
        f"train: {len(training)} chats, {int(training.lengths.sum())} tokens, "
        f"{training.num_answer_tokens} of them answers"
    )
    log(
        f"train: vocabulary {record.entries['vocabulary']}, "
        f"{record.entries['head']['parameters']} parameters, {mesh.size} devices"
    )
    log(f"train: {draft}")

    pair = TrainingPair(draft, target.cfg, target.params, jnp.asarray(ids, jnp.int32))
    for rows in sorted(cfg.train.buckets):
        attention = target_ops(pair, rows).attention
        log(f"train: the target's attention over {rows} tokens: {attention}")
    if isinstance(draft, DFlashConfig):
        pair = dataclasses.replace(pair, feature_scale=feature_scale(pair, training))

    # A fresh fc is drawn for features of size one; a trained one reads them as they are.
    start = scaled_params(pair, params) if cfg.head.init else params
    state = init_train_state(cfg.train, draft, start)
    history = record.entries["history"] = []
    if cfg.resume:
        from jaxspec.training.resume import restore_state

        state, pair = restore_state(folder / "state", state, pair)
        history += earlier_history(record.path, int(state.step))
        log(f"train: goes on from step {int(state.step)}")

    def save(state: TrainState, step: int) -> dict[str, Any]:
        record.write()  # also of a run that diverged, whose head is not saved
        save_head(folder, draft, unscaled_params(pair, state.params), ids, target)
        log(f"train: saved step {step} to {folder / 'head'}")
        if cfg.keep_state:
            from jaxspec.training.resume import save_state  # the extra "train"

            save_state(folder / "state", state, pair)
        found = evaluate_head(
            cfg.evaluation, target, folder / "head", cfg.head.method, record, log=log
        )
        return {"acceptance": found} if found else {}

    train(
        cfg.train,
        pair,
        state,
        training,
        held_out,
        mesh=mesh,
        budget=Budget(cfg.max_steps, deadline),
        save=save,
        save_every_seconds=cfg.save_seconds,
        log=log,
        history=history,
    )
    record.write()
    try:
        plot_history(history, folder / "loss.png")
    except ImportError as e:
        log(f"train: no loss.png: {e} (the extra 'train' brings it)")


def describe_head(
    cfg: RunConfig, target: ChatTarget, draft: TrainableDraft, params: Params
) -> dict[str, Any]:
    """Describe a head before its first step, for the record."""
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    return {
        "head": {
            "method": cfg.head.method,
            "parameters": num_parameters,
            "target": target.name,
            "init": cfg.head.init,
        },
        "train_config": dataclasses.asdict(cfg.train),
        "draft_config": dataclasses.asdict(draft),
    }


def save_head(
    folder: Path, draft: TrainableDraft, params: Params, ids: np.ndarray, target: ChatTarget
) -> None:
    """The head under folder/head, and cut for transport under folder/pieces."""
    head, pieces = folder / "head", folder / "pieces"
    verifier = Verifier(target.name, target.architectures, target.cfg.max_position_embeddings)
    save_draft(head, draft, params, ids, verifier)
    split_file(head / WEIGHTS, pieces, PIECE_BYTES)
    (pieces / "config.json").write_bytes((head / "config.json").read_bytes())
