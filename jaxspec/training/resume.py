"""Masters, optimiser state and step on disk (orbax), to go on with a run that was killed."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jaxspec.config import ConfigError
from jaxspec.training.loop import TrainState


def save_state(folder: Path, state: TrainState) -> None:
    """The whole state under folder/STEP; the last two are kept."""
    with ocp.CheckpointManager(
        folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as manager:
        manager.save(int(state.step), args=ocp.args.StandardSave(state))


def restore_state(folder: Path, like: TrainState) -> TrainState:
    """Return the newest state under folder, bit for bit.

    like: a fresh init_train_state of the same config, whose structure it has.
    """
    with ocp.CheckpointManager(folder.resolve()) as manager:
        step = manager.latest_step()
        if step is None:
            raise ConfigError(
                f"{folder}: expected a training state saved by --keep-state to resume from, "
                "got none"
            )
        return manager.restore(
            step, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        )
