"""The search for the reading of a head that is accepted most, and what to set for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.doctor.acceptance import Acceptance, gain, is_better, measure
from jaxspec.doctor.formats import THINKING, PromptFormat, other_formats, present_format
from jaxspec.doctor.head import Head, Reading, open_head
from jaxspec.doctor.texts import Features, Target, Texts, read_features, write_texts
from jaxspec.drafts.head_layout import verifier
from jaxspec.loading.card import base_model
from jaxspec.loading.default_target import is_default_target, kept_default_target
from jaxspec.loading.resolve import as_path
from jaxspec.loading.tokenizer import Tokenizer
from jaxspec.training.evaluation import evaluate_acceptance

LEAST_GAIN, LEAST_FORMAT_GAIN = 0.03, 0.1  # tokens of acceptance length
MOST_FAULTS = 4  # of one head, each found after the others are mended


@dataclass(frozen=True)
class Settings:
    """What is decoded and drafted.

    prompts:    texts of users
    max_tokens: of each text
    num_steps:  K
    """

    prompts: Sequence[str]
    max_tokens: int = 64
    num_steps: int = 3


@dataclass(frozen=True)
class Tried:
    """One alternative beside the present choice.

    length: its mean acceptance length; gain: over the present one, with its standard error
    is_better: whether it is surely above
    """

    kind: str
    name: str
    length: float
    gain: float
    error: float
    is_better: bool


@dataclass(frozen=True)
class Finding:
    """A fault: its kind, what it is, and what to set.

    before, after: mean acceptance length; None if LLM refuses the head before.
    """

    kind: str
    name: str
    remedy: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and the faults that were found.

    length: teacher-forced mean acceptance length of the present choice
    ended: texts of the present choice that end with their first token
    tried: every alternative to the present choice, and to the choices that mend it
    decoded: mean acceptance length by decoding, of the present choice (None if LLM refuses it) and
        with all faults mended (None without one, and where prompts are given another way)
    """

    length: float
    ended: int
    tried: tuple[Tried, ...]
    findings: tuple[Finding, ...]
    decoded: tuple[float | None, float | None]


def diagnose(
    target: Target,
    tokenizer: Tokenizer,
    folder: Path,
    speculative: SpeculativeConfig,
    settings: Settings,
    log: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Find what a head's user could set to have more drafts accepted."""
    head = open_head(folder, target, speculative)
    formats = [present_format(tokenizer), *other_formats(tokenizer, template_folders(head))]
    encoded = [[f.encode(prompt) for prompt in settings.prompts] for f in formats]
    # A switch that the template does not read gives the present prompts again.
    kept = [i for i, prompts in enumerate(encoded) if i == 0 or prompts != encoded[0]]
    formats, encoded = [formats[i] for i in kept], [encoded[i] for i in kept]
    log(f"decoding {len(settings.prompts)} prompts in {len(formats)} formats")
    written = write_texts(target, [ids for each in encoded for ids in each], settings.max_tokens)
    count = len(settings.prompts)
    texts = [written.of(slice(i * count, (i + 1) * count)) for i in range(len(formats))]
    findings = [Finding(kind, says, remedy, None, None) for kind, says, remedy in head.refused]
    search = Search(head, texts[0], settings.num_steps, log)
    reading, found = search.run()
    findings += found
    tried = [*search.tried]
    if not any(each.drafted(settings.num_steps).any() for each in texts):
        raise ConfigError(
            "doctor: expected a target that answers the prompts with some tokens, got texts of "
            f"{int((written.lengths - written.prompts).max())} tokens at most"
        )
    present = search.measured(reading)
    others = _compare_formats(head, reading, present, formats[1:], texts[1:], settings.num_steps)
    tried += [t for _, t in others]
    best = _best_format(others)
    if best is not None:
        form, t = best
        findings.append(Finding(form.kind, t.name, form.remedy, present.length, t.length))
    log("decoding with drafts")
    before = None if head.refused else _decode(head, head.present, encoded[0], settings)
    after = None
    if reading != head.present or head.refused:
        after = _decode(head, reading, encoded[0], settings)
        if before is not None and after <= before:  # too small a gain to be seen in decoding
            findings = [f for f in findings if f not in found]
            after = None
    first = search.measured(head.present).length
    ended = int(present.ended.sum())
    return Diagnosis(first, ended, tuple(tried), tuple(findings), (before, after))


def template_folders(head: Head) -> dict[str, Path]:
    """Return the folders that may have the head's chat template: its own, and its target's.

    The head's config or its card names the target, which counts if it lies here: nothing is
    downloaded.
    """
    folders = {"the head": head.folder}
    targets = {
        "the head's verifier": verifier(head.checkpoint.config),
        "the head's base model": base_model(head.folder),
    }
    for said, name in targets.items():
        if name is None:
            continue
        folder: Path | None = as_path(name, said)
        if not folder.is_dir():
            folder = kept_default_target() if is_default_target(name) else None
        if folder is not None and folder not in folders.values():
            folders[said] = folder
    return folders


class Search:
    """Readings of one head over the same texts; each is measured once."""

    def __init__(
        self, head: Head, texts: Texts, num_steps: int, log: Callable[[str], None]
    ) -> None:
        self.head, self.texts, self.num_steps, self.log = head, texts, num_steps, log
        self.tried: list[Tried] = []
        self.measurements: dict[Reading, Acceptance] = {}
        self._features: Features | None = None

    def run(self) -> tuple[Reading, list[Finding]]:
        """Mend the fault that costs most, then look again, until nothing is surely better."""
        reading, findings = self.head.present, []
        for _ in range(MOST_FAULTS):
            present = self.measured(reading)
            best: tuple[float, Finding, Reading] | None = None
            for other in self.head.alternatives(reading, int(self.texts.lengths.max())):
                accepted = self.measured(other.reading)
                mean, error = gain(accepted, present)
                better = is_better(accepted, present, LEAST_GAIN)
                self.tried.append(
                    Tried(other.kind, other.name, accepted.length, mean, error, better)
                )
                self.log(f"{other.kind}, {other.name}: {accepted.length:.2f}")
                if better and (best is None or mean > best[0]):
                    finding = Finding(
                        other.kind, other.name, other.remedy, present.length, accepted.length
                    )
                    best = mean, finding, other.reading
            if best is None:
                break
            findings.append(best[1])
            reading = best[2]
        return reading, findings

    def measured(self, reading: Reading) -> Acceptance:
        """Return the acceptance of a reading."""
        if reading not in self.measurements:
            states = self._states(reading)
            self.measurements[reading] = measure(
                self.head, reading, self.texts, states, self.num_steps
            )
        return self.measurements[reading]

    def _states(self, reading: Reading) -> Features:
        """Return the target's hidden states; those of neighbouring layers come with them."""
        wanted = reading.cfg.aux_layers
        if self._features is None or not self._features.boundary.keys() >= set(wanted):
            n = self.head.target.cfg.num_layers
            near = {i + by for i in (*wanted, 2, n // 2, n - 3) for by in (-1, 0, 1)}
            self._features = read_features(
                self.head.target, self.texts, [i for i in near if 0 <= i <= n] if wanted else []
            )
        return self._features


def _compare_formats(
    head: Head,
    reading: Reading,
    present: Acceptance,
    formats: Sequence[PromptFormat],
    texts: Sequence[Texts],
    num_steps: int,
) -> list[tuple[PromptFormat, Tried]]:
    """Return each other format beside the present one, whose texts are others."""
    found = []
    for each, written in zip(formats, texts, strict=True):
        states = read_features(head.target, written, reading.cfg.aux_layers)
        accepted = measure(head, reading, written, states, num_steps)
        mean, error = gain(accepted, present)
        better = is_better(accepted, present, LEAST_FORMAT_GAIN)
        found.append((each, Tried(each.kind, each.name, accepted.length, mean, error, better)))
    return found


def _best_format(
    others: Sequence[tuple[PromptFormat, Tried]],
) -> tuple[PromptFormat, Tried] | None:
    """Return the format to propose, None if none is better.

    A switch goes before another template that gains as much: it is less to change.
    """
    better = [pair for pair in others if pair[1].is_better]
    if not better:
        return None
    most = max((t for _, t in better), key=lambda t: t.gain)
    as_good = [pair for pair in better if pair[1].gain >= most.gain - most.error]
    return max(as_good, key=lambda pair: (pair[0].kind == THINKING, pair[1].gain))


def _decode(
    head: Head, reading: Reading, prompts: Sequence[Sequence[int]], settings: Settings
) -> float:
    """Return the mean acceptance length of the engine."""
    metrics, *_ = evaluate_acceptance(
        head.target.cfg,
        head.target.params,
        reading.cfg,
        head.bound(reading),
        [np.asarray(prompt) for prompt in prompts],
        stop_token_ids=head.target.stop_token_ids,
        num_speculative_tokens=settings.num_steps,
        max_tokens=settings.max_tokens,
        dtype=head.target.dtype,
    )
    return metrics.mean_acceptance_length
