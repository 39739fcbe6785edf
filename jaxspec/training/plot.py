"""The history of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_history(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the loss over steps, and each draft step's share of accepted rows.

    The right side shows the share in training and that of the real verify.
    """
    from matplotlib.figure import Figure  # the extra "train"

    logged = [record for record in history if "loss" in record]
    held_out = [record for record in history if "held_out_loss" in record]
    measured = [record for record in history if "acceptance" in record]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in logged], [r["loss"] for r in logged], label="training")
    left.plot(
        [r["step"] for r in held_out], [r["held_out_loss"] for r in held_out], "o", label="held out"
    )
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    for i in range(len(logged[0]["accepted"]) if logged else 0):
        right.plot(
            [r["step"] for r in logged],
            [r["accepted"][i] for r in logged],
            f"C{i}",
            label=f"training, draft {i + 1}",
        )
    for i in range(len(measured[0]["acceptance"]["per_position_acceptance"]) if measured else 0):
        shares = [r["acceptance"]["per_position_acceptance"][i] for r in measured]
        right.plot(
            [r["step"] for r in measured],
            shares,
            f"C{i}o",
            label=f"evaluation prompts, draft {i + 1}",
        )
    right.set(xlabel="step", ylabel="accepted, with all before it")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
