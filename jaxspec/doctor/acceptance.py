"""How many drafts of a reading the target's own texts accept, without decoding.

Every row of a text drafts num_steps tokens, teacher-forced (jaxspec.training.eagle3). Drafts count
as long as they are the target's greedy tokens. A row counts however many drafts before it were
right, so the figure is a little higher than an engine's; it ranks readings over the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxspec import drafts
from jaxspec.config import REFERENCE_OPS
from jaxspec.doctor.head import Head, Reading
from jaxspec.doctor.texts import Features, Texts
from jaxspec.training.objective import FORWARDS

SURE = 2.5  # standard errors


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of each row that counts.

    accepted: int [rows]
    text:     int [rows], the text of each row
    ended:    bool [texts], the texts that end with their first token, of all texts
    """

    accepted: np.ndarray
    text: np.ndarray
    ended: np.ndarray

    @property
    def length(self) -> float:
        """Mean acceptance length, the target's own token included."""
        return 1.0 + float(self.accepted.mean()) if len(self.accepted) else 1.0

    def lengths(self) -> np.ndarray:
        """Return the mean acceptance length of each text, NaN for one without rows."""
        of_text = [self.accepted[self.text == text] for text in range(len(self.ended))]
        return np.array([1.0 + rows.mean() if len(rows) else np.nan for rows in of_text])


def measure(
    head: Head, reading: Reading, texts: Texts, features: Features, num_steps: int
) -> Acceptance:
    """Draft from every row of the texts as this reading does."""
    cfg = reading.cfg
    params, family = head.bound(reading), drafts.family(cfg)
    forward = FORWARDS[cfg.method].forward_steps
    text, row = np.nonzero(texts.drafted(num_steps))
    if not len(row):  # every text ended at once
        return Acceptance(np.zeros(0, int), text, texts.ended)
    to_target = np.asarray(params["draft_to_target"]) if cfg.maps_vocabulary else None
    tokens, states = jnp.asarray(texts.tokens), features.of_layers(cfg.aux_layers)
    right = np.ones(len(row), bool)
    accepted = np.zeros(len(row), int)
    for step, head_input in enumerate(forward(params, cfg, tokens, states, num_steps)):
        logits = family.logits(params, cfg, head_input[text, row], REFERENCE_OPS)
        drafted = np.asarray(jnp.argmax(logits, axis=-1))
        if to_target is not None:
            drafted = to_target[drafted]
        right &= drafted == texts.tokens[text, row + 2 + step]
        accepted += right
    return Acceptance(accepted, text, texts.ended)


def gain(other: Acceptance, present: Acceptance) -> tuple[float, float]:
    """Return the mean gain in length over the texts of both, and its standard error.

    Texts are compared one by one, since the rows of a text are not independent. A text that ends
    with its first token counts as length 1 beside one with rows. Prompts in a wrong format often
    end at once, and no draft of theirs is accepted.
    """
    theirs, ours = other.lengths(), present.lengths()
    gains = np.where(other.ended, 1.0, theirs) - np.where(present.ended, 1.0, ours)
    gains[other.ended & present.ended] = np.nan
    gains = gains[~np.isnan(gains)]
    if len(gains) < 2:
        return 0.0, np.inf
    return float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))


def is_better(other: Acceptance, present: Acceptance, least: float) -> bool:
    """Return whether the other length is surely above the present one, by more than `least`."""
    mean, error = gain(other, present)
    return mean > max(least, SURE * error)
