"""Reports of a run: acceptance figures, comparison with plain decoding, and the JSON record."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
from rich.table import Table

from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.engine.metrics import SpecDecodeMetrics, Timings
from jaxspec.engine.outputs import CompletionOutput, RequestOutput
from jaxspec.loading.pretrained import check_platform
from jaxspec.loading.resolve import as_path
from jaxspec.sampling.logprobs import Logprob
from jaxspec.sampling.params import SamplingParams
from jaxspec.tools.losslessness import Difference

RULER = "-" * 50


def metric_lines(num_output_tokens: int, metrics: SpecDecodeMetrics) -> list[str]:
    """Return the lines that vLLM's spec_decode example ends with."""
    return [
        RULER,
        f"total_num_output_tokens: {num_output_tokens}",
        f"num_drafts: {metrics.num_drafts}",
        f"num_draft_tokens: {metrics.num_draft_tokens}",
        f"num_accepted_tokens: {metrics.num_accepted_tokens}",
        f"mean acceptance length: {metrics.mean_acceptance_length:.2f}",
        RULER,
        *(
            f"acceptance at token {i}: {rate:.2f}"
            for i, rate in enumerate(metrics.per_position_acceptance)
        ),
    ]


def acceptance_table(metrics: SpecDecodeMetrics) -> Table:
    """Return a table of accepted drafts, position by position."""
    table = Table(title="Acceptance of draft tokens")
    for heading in ("position", "accepted", "of rounds", "given the one before"):
        table.add_column(heading, justify="right")
    reached = metrics.num_drafts
    for i, accepted in enumerate(metrics.accepted_per_position):
        shares = [f"{accepted / of:.1%}" if of else "-" for of in (metrics.num_drafts, reached)]
        table.add_row(str(i), f"{accepted} / {metrics.num_drafts}", *shares)
        reached = accepted
    return table


# --- speculative against plain decoding ---

Agreement = Literal["tokens", "distribution", "nothing"]


def expected_agreement(params: SamplingParams, speculative: SpeculativeConfig) -> Agreement:
    """Return what speculative and plain decoding have in common.

    "tokens": greedy decoding and the strict rule, which share one random stream.
    "distribution": the other rules. "nothing": a schedule decides what is accepted.
    """
    if speculative.rejection_sample_method == "synthetic":
        return "nothing"
    return (
        "tokens"
        if params.greedy or speculative.rejection_sample_method == "strict"
        else "distribution"
    )


def tokens_per_second(timings: Timings) -> float:
    """Return the output tokens per second of prefill and decoding."""
    seconds = timings.prefill_seconds + timings.decode_seconds
    return timings.num_output_tokens / seconds if seconds else 0.0


@dataclass(frozen=True)
class Comparison:
    """Timings and differences of the same prompts with and without speculation.

    Programs compile before either is timed.
    """

    expected: Agreement
    speculative: Timings
    plain: Timings
    differences: list[Difference]
    num_prompts: int

    @property
    def texts_agree(self) -> bool:
        return not self.differences

    @property
    def failed(self) -> bool:
        return self.expected == "tokens" and not self.texts_agree

    @property
    def speed_up(self) -> float:
        plain = tokens_per_second(self.plain)
        return tokens_per_second(self.speculative) / plain if plain else 0.0

    def lines(self) -> list[str]:
        agree, where = self.texts_agree, "; ".join(map(str, self.differences))
        count = f"{self.num_prompts - len(self.differences)} of {self.num_prompts}"
        verdict = {
            "tokens": f"texts agree: yes ({count})"
            if agree
            else f"texts agree: NO, {count} ({where})",
            "distribution": f"texts agree: {'yes' if agree else 'no'}; "
            "under this rejection rule only their distribution is the same",
            "nothing": "texts agree: not compared; "
            "the synthetic schedule accepts drafts whatever the target says",
        }[self.expected]
        speeds = [
            f"{name} {tokens_per_second(t):.1f} tokens/s"
            for name, t in (("speculative", self.speculative), ("plain", self.plain))
        ]
        return [
            f"speed-up over plain decoding: {self.speed_up:.2f}x "
            f"({', '.join(speeds)}; both warm, compilation not counted)",
            verdict,
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "texts_agree": self.texts_agree,
            "num_prompts": self.num_prompts,
            "expected_to_agree_in": self.expected,
            "differences": [d.to_dict() for d in self.differences],
            "speed_up": self.speed_up,
            "speculative_tokens_per_second": tokens_per_second(self.speculative),
            "plain_tokens_per_second": tokens_per_second(self.plain),
            "plain_timings": self.plain.to_dict(),
        }


# --- the JSON record ---


class JsonFile:
    """A file that is checked before the run and replaced in one step after it.

    A failed run leaves the old file.

    inputs: files that the run reads, by path; names that are no files are passed over
    """

    def __init__(self, path: Path, inputs: Iterable[str | Path] = ()) -> None:
        given = as_path(path, "--output-json", "a place to write a file")
        try:
            self.path = given.resolve()
        except (OSError, RuntimeError) as e:  # a loop of links
            raise ConfigError(
                f"--output-json {path}: expected a place to write a file, got {e}"
            ) from e
        for name in inputs:
            if self.path.is_file() and os.path.exists(name) and self.path.samefile(name):
                raise ConfigError(
                    f"--output-json {path}: expected another file than the run reads, got {name}"
                )
        if self.path.exists() and not self.path.is_file():
            kind = "a folder" if path.is_dir() else "something else"
            raise ConfigError(f"--output-json {path}: expected a file, got {kind}")
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self._temporary.touch()
            self._temporary.unlink()
        except OSError as e:
            raise ConfigError(
                f"--output-json {path}: expected a place to write a file, got {e.strerror}"
            ) from e

    def write(self, value: Any) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            # A lone surrogate has no UTF-8. JSON has an escape for it.
            self._temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
            self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)


def request_record(output: RequestOutput, text: str) -> dict[str, Any]:
    """Return the record of one request; text is the prompt as the user gave it.

    The first of several texts is in the record itself, the others are its "further_texts".
    """
    record = {
        "prompt": text,
        "prompt_token_ids": output.prompt_token_ids,
        **_text_record(output.outputs[0]),
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if place is None else _places(place) for place in output.prompt_logprobs
        ]
    if output.outputs[1:]:
        record["further_texts"] = [_text_record(each) for each in output.outputs[1:]]
    return record


def _text_record(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "metrics": output.metrics.to_dict(),
    }
    if output.logprobs is not None:
        record["logprobs"] = [_places(place) for place in output.logprobs]
    return record


def _places(place: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {token: asdict(score) for token, score in place.items()}


def environment() -> dict[str, Any]:
    """Return versions and devices, for a record of a run."""
    check_platform()
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "jaxspec"):
        versions[name] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    devices = [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()]
    return {
        "versions": versions | {"git_commit": git_commit()},
        "devices": devices,
        "machine": platform.platform(),
    }


def git_commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
