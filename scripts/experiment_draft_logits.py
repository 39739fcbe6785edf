"""Show the effect of draft logits that the drafts were not drawn from.

docs/notes/wrong-draft-logits.md has the results.

python scripts/experiment_draft_logits.py                            # a tiny random model
python scripts/experiment_draft_logits.py --dataset mt_bench.jsonl   # and SmolLM2 with its head
python scripts/experiment_draft_logits.py --from-json tiny.json \\
    --markdown docs/notes/wrong-draft-logits.md

The probabilities of the tiny model are exact. The rounds are the real propose and verify. Between
them this script replaces the logits of steps 1 and on: by zeros, or by those of the last round.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxspec import LLM, ConfigError, EngineConfig, SpeculativeConfig, drafts, models
from jaxspec.config import REFERENCE_OPS, AttentionConfig
from jaxspec.drafts.families import layered
from jaxspec.layers.params import Weight, init_random
from jaxspec.loading.binding import bind_draft
from jaxspec.tools import prompts, report
from jaxspec.tools.acceptance import show
from jaxspec.tools.acceptance.rounds import Corrupt, Counts, Pair, Recorder, Requests
from jaxspec.tools.acceptance.show import Grid
from jaxspec.tools.acceptance.summary import (
    estimate,
    length,
    per_position,
    standard_error,
    text_check,
)
from jaxspec.tools.cli import DRAFT, Dtype, Target, exact_float32, run_program
from jaxspec.tools.flags import Flag, Given, flag, flags_of, given_of
from jaxspec.training.target import target_states

SCRIPT = "scripts/experiment_draft_logits.py"
VOCAB, HIDDEN, K = 6, 32, 3
PROMPT = [1, 4, 2, 5]
# Tokens of a tiny text. Prefill samples the first; the second is position 0 of every first round.
LENGTH = 4
SAMPLING_TRIALS = 200


def zeros(written: jax.Array, before: jax.Array) -> jax.Array:
    """Keep step 0's logits, and set those of the later steps to zero."""
    del before
    return written.at[:, 1:].set(0.0)


def stale(written: jax.Array, before: jax.Array) -> jax.Array:
    """Keep step 0's logits, and give the later steps those of the slot's last round."""
    return jnp.concatenate([written[:, :1], before[:, 1:]], axis=1)


CONDITIONS: dict[str, Corrupt | None] = {"right": None, "zero": zeros, "stale": stale}


@dataclass(frozen=True)
class TextOptions:
    """The texts of the tiny model and of a real pair."""

    samples: int = flag(60_000, "Texts of the tiny model in each condition; 0 leaves it out.")
    dataset: str | None = flag(
        None, "JSON Lines with prompts, or a hub id: run a real pair on them too."
    )
    num_prompts: int | None = flag(None, "At most this many prompts.")
    max_tokens: int = flag(256, "At most this many tokens a prompt.")
    seed: int = flag(0, "Seed of the first prompt; the i-th has seed + i.")


@dataclass(frozen=True)
class OutputOptions:
    """The files to write, and records to show in place of a run."""

    output_json: Path | None = flag(None, "Write figures and tables to this file.")
    from_json: list[Path] | None = flag(None, "Run nothing: show these files again.")
    markdown: Path | None = flag(None, "Replace the tables between the markers of this file.")


def main(
    texts: TextOptions,
    speculative: Annotated[
        SpeculativeConfig,
        flags_of(SpeculativeConfig, "method", model=DRAFT),
    ],
    engine: Annotated[Given, given_of(EngineConfig, max_num_seqs=Flag(80), kernels=Flag("auto"))],
    output: OutputOptions,
    target: Target = None,
    dtype: Dtype = "auto",
) -> None:
    """Measure acceptance and the text's distribution with right, zero and stale draft logits.

    The logits are replaced at steps 1 and on; temperature 1, K = 3.
    """
    if texts.samples and texts.samples < 100:
        raise ConfigError(f"--samples: expected 0 or at least 100, got {texts.samples}")
    json_file = report.JsonFile(output.output_json) if output.output_json else None
    if output.markdown:
        show.check_markers(output.markdown, SCRIPT)
    if output.from_json:
        records = [read_record(path) for path in output.from_json]
    else:
        records = [run(texts, speculative, target, {"dtype": dtype, **engine})]
        if json_file:
            json_file.write(records[0])
    shown = [(record, Grid(**table)) for record in records for table in record["tables"]]
    try:
        if output.markdown:
            parts = [f"{grid.markdown()}\n\n{where(record)}" for record, grid in shown]
            show.write_section(output.markdown, SCRIPT, "\n\n".join(parts))
    finally:
        for _, grid in shown:
            Console(width=220).print(grid.rich())


def run(
    texts: TextOptions,
    speculative: SpeculativeConfig,
    target: str | None,
    engine: dict[str, Any],
) -> dict[str, Any]:
    """Run the tiny model, and the real pair where prompts are given; return the record.

    engine: keywords of LLM.from_pretrained.
    """
    prompts_of_pair = None
    if texts.dataset is not None:
        prompts_of_pair = prompts.read_prompts(texts.dataset)[: texts.num_prompts]
    if engine["dtype"] == "float32":
        exact_float32()
    record: dict[str, Any] = {}
    tables: list[Grid] = []
    if texts.samples:
        exact_float32()
        record["tiny"] = tiny_experiment(texts.samples)
        tables.append(tiny_grid(record["tiny"]))
    if texts.dataset is not None and prompts_of_pair is not None:
        llm = LLM.from_pretrained(
            target, speculative=speculative, batch_buckets=[engine["max_num_seqs"]], **engine
        )
        counts = model_experiment(llm, prompts_of_pair, texts.max_tokens, texts.seed)
        record["model"] = {name: model_figures(c) for name, c in counts.items()}
        tables.append(model_grid(counts, Path(texts.dataset).stem, str(speculative.model)))
    settings = engine | {
        "max_tokens": texts.max_tokens,
        "seed": texts.seed,
        "samples": texts.samples,
        "draft": speculative.model,
        "dataset": texts.dataset,
    }
    return record | {
        "tables": [asdict(grid) for grid in tables],
        "settings": settings,
        **report.environment(),
    }


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["tables"]
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"--from-json {path}: expected a file that --output-json wrote, got another"
        ) from e
    return record


def where(record: dict[str, Any]) -> str:
    device, versions = record["devices"][0]["kind"], record["versions"]
    commit = versions["git_commit"]
    return f"{device}, jax {versions['jax']}" + (f", commit {commit[:12]}." if commit else ".")


# --- the tiny model, whose probabilities are exact ---


@dataclass(frozen=True)
class Distance:
    """Total variation between the sampled texts and the exact distribution.

    from_sampling_alone: the mean of samples of the exact distribution itself.
    standard_deviation: that of these samples.
    """

    total_variation: float
    from_sampling_alone: float
    standard_deviation: float

    @property
    def standard_deviations_off(self) -> float:
        return (self.total_variation - self.from_sampling_alone) / self.standard_deviation


def tiny_pair() -> Pair:
    """Make a random llama and a random EAGLE-3 head on VOCAB tokens.

    The draft's distribution is sharper than the target's.
    """
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    target = models.llama.LlamaConfig("llama", VOCAB, HIDDEN, 48, 2, attention, 1e-5, 4096, False)
    draft = drafts.Eagle3Config(HIDDEN, HIDDEN, 48, 1, attention, 1e-5, VOCAB, VOCAB, (0, 1, 2))
    keys = jax.random.split(jax.random.key(0), 2)
    target_params = init_random(models.family(target).param_specs(target), keys[0], jnp.float32)
    own = init_random(drafts.family(draft).param_specs(draft), keys[1], jnp.float32)
    target_params["lm_head"], own["lm_head"] = (
        spread(p["lm_head"], s) for p, s in ((target_params, 1.2), (own, 2.5))
    )
    return Pair(
        target,
        draft,
        {"target": target_params, "draft": bind_draft(draft, own, target_params, None)},
        K,
        stop_token_ids=(),
    )


def spread(head: Weight, deviation: float) -> Weight:
    """Scale an output head [hidden, vocab] so that its logits have about this deviation.

    The logits are those of a normed hidden state.
    """
    return Weight(head.values * (deviation / (jnp.std(head.values) * HIDDEN**0.5)))


def exact_probabilities(pair: Pair) -> np.ndarray:
    """Return the probability of each text after PROMPT at temperature 1, [VOCAB] * LENGTH.

    They are computed from the target, token by token.
    """
    joint = np.ones(())
    for length_so_far in range(LENGTH):
        tokens = np.array(
            [
                [*PROMPT, *prefix]
                for prefix in itertools.product(range(VOCAB), repeat=length_so_far)
            ],
            np.int32,
        )
        lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        hidden, _ = target_states(
            pair.params["target"], pair.target, jnp.asarray(tokens), lengths, ()
        )
        logits = models.family(pair.target).logits(
            pair.params["target"], pair.target, hidden[:, -1], REFERENCE_OPS
        )
        p = np.asarray(jax.nn.softmax(logits), np.float64).reshape(*(VOCAB,) * length_so_far, VOCAB)
        joint = joint[..., None] * p / p.sum(axis=-1, keepdims=True)
    return joint


def distance(counts: np.ndarray, probabilities: np.ndarray, rng: np.random.Generator) -> Distance:
    """Return the distance of counts of texts from their probabilities, both of one shape."""
    p, total = probabilities.ravel() / probabilities.sum(), int(counts.sum())

    def total_variation(x: np.ndarray) -> np.ndarray:
        return 0.5 * np.abs(x / total - p).sum(axis=-1)

    alone = total_variation(rng.multinomial(total, p, SAMPLING_TRIALS))
    measured = float(total_variation(counts.ravel()))
    return Distance(measured, float(alone.mean()), float(alone.std()))


def tiny_experiment(samples: int, batch: int = 2000) -> dict[str, Any]:
    """Measure acceptance by position and the distance from the target's distribution.

    Distances are those of each token and of whole texts, in each condition.
    """
    pair = tiny_pair()
    exact = exact_probabilities(pair)
    recorder = Recorder(
        pair,
        max_num_seqs=min(batch, samples),
        max_tokens=len(PROMPT) + LENGTH,
        block_size=8,
    )
    requests = Requests([PROMPT] * samples, temperature=1.0, max_tokens=LENGTH)
    found = {}
    for name, corrupt in CONDITIONS.items():
        counts, texts = recorder.run(requests, "probabilistic", "probabilistic", K, corrupt=corrupt)
        seen = np.zeros(exact.shape, np.int64)
        np.add.at(seen, tuple(np.array(texts).T), 1)
        rng = np.random.default_rng(0)
        distances = {}
        for i in range(LENGTH):
            others = tuple(axis for axis in range(LENGTH) if axis != i)
            distances[f"token {i}"] = distance(seen.sum(axis=others), exact.sum(axis=others), rng)
        distances["text"] = distance(seen, exact, rng)
        record = {
            key: asdict(d) | {"standard_deviations_off": d.standard_deviations_off}
            for key, d in distances.items()
        }
        found[name] = {"acceptance": acceptance_figures(counts), "distances": record}
    return {"vocabulary": VOCAB, "samples": samples, "conditions": found}


def acceptance_figures(counts: Counts) -> dict[str, Any]:
    """Return unconditional acceptance by position and mean length.

    Standard errors are over requests.
    """
    return {
        "rounds": int(counts.rounds.sum()),
        "per_position": estimate(per_position, counts).tolist(),
        "per_position_standard_error": standard_error(per_position, thin(counts)).tolist(),
        "mean_acceptance_length": float(estimate(length, counts)),
    }


def thin(counts: Counts, groups: int = 400) -> Counts:
    """Sum thousands of requests up in groups: a bootstrap over groups has the same error."""
    if len(counts.rounds) <= groups:
        return counts
    group = np.arange(len(counts.rounds)) * groups // len(counts.rounds)

    def sums(x: np.ndarray) -> np.ndarray:
        return np.stack([x[group == g].sum(axis=0) for g in range(groups)])

    return replace(counts, rounds=sums(counts.rounds), accepted=sums(counts.accepted))


def tiny_grid(record: dict[str, Any]) -> Grid:
    def cell(d: dict[str, float]) -> str:
        return f"{d['total_variation']:.4f} ({d['standard_deviations_off']:+.0f} sd)"

    conditions = record["conditions"]
    keys = list(conditions["right"]["distances"])
    rows = []
    for name, found in conditions.items():
        rows.append(
            (name, *positions(found["acceptance"]), *(cell(found["distances"][k]) for k in keys))
        )
    alone = [conditions["right"]["distances"][k] for k in keys]
    rows.append(
        (
            "sampling alone",
            *["-"] * K,
            *(f"{d['from_sampling_alone']:.4f} ± {d['standard_deviation']:.4f}" for d in alone),
        )
    )
    heading = (
        tuple(f"accepted at {i}, %" for i in range(K)),
        tuple(f"TV of {'the whole text' if k == 'text' else k}" for k in keys),
    )
    texts = f"{record['samples']} texts of {LENGTH} tokens in each condition"
    title = f"Tiny model, vocabulary {VOCAB}, {texts}, T = 1, K = {K}"
    return Grid(title, ("logits of steps 1+", *heading[0], *heading[1]), rows)


def positions(figures: dict[str, Any]) -> list[str]:
    shares = zip(figures["per_position"], figures["per_position_standard_error"], strict=True)
    return [f"{100 * share:.1f} ± {100 * error:.1f}" for share, error in shares]


# --- a real pair ---


def model_experiment(llm: LLM, texts: list[str], max_tokens: int, seed: int) -> dict[str, Counts]:
    """Count the same prompts and seeds in each condition."""
    if llm.tokenizer is None:
        raise ConfigError("--target: expected a folder with a tokenizer, got none")
    encoded = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    pair = Pair(
        llm.target_config,
        layered(llm.draft_config),
        llm.params,
        K,
        llm.eos_token_ids,
        llm.dtype,
        llm.kernels,
        llm.config.kv_cache_dtype,
        llm.draft_cache_dtype,
    )
    longest = max(map(len, encoded))
    recorder = Recorder(
        pair, max_num_seqs=min(llm.config.max_num_seqs, len(texts)), max_tokens=longest + max_tokens
    )
    for corrupt in CONDITIONS.values():
        recorder.announce("probabilistic", "probabilistic", sampled=True, corrupt=corrupt)
    requests = Requests(encoded, 1.0, max_tokens, seed)
    return {
        name: recorder.run(requests, "probabilistic", "probabilistic", K, corrupt=c)[0]
        for name, c in CONDITIONS.items()
    }


def model_figures(counts: Counts) -> dict[str, Any]:
    return acceptance_figures(counts) | text_check(counts)


def model_grid(counts: dict[str, Counts], dataset: str, draft: str) -> Grid:
    rows = []
    for name, c in counts.items():
        f, right = model_figures(c), counts["right"]
        moved = 100 * (estimate(per_position, c) - estimate(per_position, right))
        error = 100 * standard_error(per_position, c, right)
        change = (
            " / ".join(f"{m:+.1f} ± {e:.1f}" for m, e in zip(moved, error, strict=True))
            if name != "right"
            else "-"
        )
        errors = f["surprise_minus_entropy_standard_errors"]
        surprise = f"{f['surprise_minus_entropy']:+.3f} ({errors:+.1f})"
        rows.append(
            (
                name,
                str(f["rounds"]),
                *positions(f),
                change,
                f"{f['mean_acceptance_length']:.3f}",
                surprise,
            )
        )
    headings = (
        "logits of steps 1+",
        "rounds",
        *(f"accepted at {i}, %" for i in range(K)),
        "against right, points",
        "length",
    )
    prompts_of = f"{len(counts['right'].rounds)} prompts of {dataset}"
    title = f"{draft}, {prompts_of}, T = 1, K = {K}; the last column is 0 for the target's own text"
    return Grid(title, (*headings, "-log p less entropy, a token (standard errors)"), rows)


if __name__ == "__main__":
    run_program(main)
