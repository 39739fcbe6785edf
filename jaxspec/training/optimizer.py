"""The optimiser and its schedule, from optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxspec.layers.params import Params, join, separate
from jaxspec.training.config import TrainConfig

# Moonlight (2502.16982): with updates of this root mean square Muon takes AdamW's learning rate
# and weight decay.
MUON_RMS = 0.2
OF_TOKENS = ("lm_head", "markov_w1", "markov_w2")


def _is_matrix(params: Params) -> Params:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _muon_dimensions(params: Params) -> Params:
    """Choose Muon for the matrices inside the head; lm_head, norms and biases keep Adam.

    So do the Markov head's tables, whose rows or columns are tokens.
    """
    dims = contrib.MuonDimensionNumbers()

    def choose(path: tuple[Any, ...], x: jax.Array) -> object:
        return dims if x.ndim == 2 and path[0].key not in OF_TOKENS else None

    return jax.tree_util.tree_map_with_path(choose, params)


def optimizer(cfg: TrainConfig, specs: Params) -> optax.GradientTransformation:
    """Return the optimiser at learning rate 1; the step multiplies updates by the schedule's rate.

    It sees each projection by itself, since Muon treats a matrix as a whole. Weight decay spares
    norms and biases.

    specs: the parameter table of the weights
    """
    inner = _optimizer(cfg)

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(separate(specs, params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = inner.update(separate(specs, updates), state, separate(specs, params))
        return join(specs, updates), state

    return optax.GradientTransformation(init, update)


def _optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    clip = optax.clip_by_global_norm(cfg.clip)
    if cfg.optimizer == "muon":
        muon = contrib.muon(
            1.0,
            adam_learning_rate=0.5,  # Muon's matrices bear twice Adam's rate and more
            weight_decay=cfg.weight_decay,
            adam_b1=cfg.betas[0],
            adam_b2=cfg.betas[1],
            muon_weight_dimension_numbers=_muon_dimensions,
            consistent_rms=MUON_RMS,
        )
        return optax.chain(clip, muon)
    return optax.chain(
        clip,
        optax.adamw(
            1.0, b1=cfg.betas[0], b2=cfg.betas[1], weight_decay=cfg.weight_decay, mask=_is_matrix
        ),
    )


def learning_rate(cfg: TrainConfig, step: jax.Array, progress: jax.Array) -> jax.Array:
    """Return the learning rate, float32 []: a linear warm-up over steps times a cosine of progress.

    The cosine falls from 1 to the final rate while progress, float32 [], goes from 0 to 1.
    Progress is a share of steps or of time, so that a run with a time budget ends at the final
    rate too.
    """
    warmup = optax.schedules.linear_schedule(
        1.0 / max(cfg.warmup_steps, 1), 1.0, max(cfg.warmup_steps - 1, 0)
    )
    cosine = optax.schedules.cosine_decay_schedule(
        cfg.learning_rate, 1, alpha=cfg.final_learning_rate / cfg.learning_rate
    )
    return jnp.asarray(warmup(step) * cosine(progress), jnp.float32)
