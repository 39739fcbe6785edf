"""Write a head's README.md from the training.json of its run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from jaxspec.config import ConfigError, read_object, shown
from jaxspec.config.quantization import block_sizes
from jaxspec.loading.checkpoint import read_json
from jaxspec.loading.new_file import write_text
from jaxspec.loading.resolve import HUB_ID
from jaxspec.tools.acceptance.rounds import join
from jaxspec.tools.acceptance.summary import Result, by_prompt_length, measured_figures

SPECULATORS = (
    "speculators' (`config.json`, `model.safetensors`, {weights}), without `embed_tokens`, which "
    "is the target's"
)
FORMATS = {
    "eagle3": SPECULATORS,
    "dspark": SPECULATORS,
    "dflash": SPECULATORS,
    "eagle": "SafeAI's EAGLE-1 (`config.json`, `model.safetensors`, {weights}); `embed_tokens` and "
    "`lm_head` are the target's",
}
PLAIN = "bfloat16"
FLOAT8 = (
    "matrices in float8 with a scale for each {} x {} block, plain once loaded, for jaxspec alone"
)
TITLES = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "dspark": "DSpark", "dflash": "DFlash"}

Record = Mapping[str, Any]


def write_card(
    head: Path, evaluations: Sequence[Path] = (), acceptance: Path | None = None, **about: Any
) -> None:
    """Write README.md into a head's folder.

    evaluations: files of later evaluations, which first join the head's training.json
    acceptance:  what `jaxspec acceptance` wrote, whose lengths join it too
    about: keywords of `card`
    """
    path = head / "training.json"
    record = read_json(path)
    try:
        more = [read_json(later)["evaluation"] for later in evaluations]
        record["evaluations"] = record.get("evaluations", []) + more
        if acceptance is not None:
            record["acceptance_by_length"] = lengths_of(acceptance, head, record)
        page = card(head.name, record, weights=weight_format(head), **about)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(
            f"{path}: expected the record of a training run, got {type(e).__name__}: {e}"
        ) from e
    write_text(head / "README.md", page)  # first: after an error the record is as it was
    write_text(path, json.dumps(record, indent=1) + "\n")


def card(
    name: str,
    record: Record,
    *,
    weights: str = PLAIN,
    about_target: str = "",
    licence: str = "Apache-2.0",
    notes: Sequence[str] = (),
) -> str:
    """Return the card as Markdown, with the hub's metadata as YAML before it.

    record: training.json; its "evaluations" and "acceptance_by_length" came after the run
    weights: how they are stored (weight_format)
    about_target: follows the target's name
    notes: paragraphs
    """
    method, target = record["head"]["method"], record["head"]["target"]
    about = ModelCardData(
        base_model=target if HUB_ID.fullmatch(target) else None,
        language="en",
        library_name="jaxspec",
        license=licence.lower(),
        pipeline_tag="text-generation",
        tags=[method, "speculative-decoding"],
    )
    found = ([record["evaluation"]] if "evaluation" in record else []) + record.get(
        "evaluations", []
    )
    parts = [
        f"# {TITLES[method]} head for {record['head']['target'].rpartition('/')[2]}",
        _head_table(record, weights, about_target, licence),
        *(f"{note}\n" for note in notes),
        f"    jaxspec generate --draft {name}\n",
        "## Acceptance\n",
        _acceptance(found),
        _by_length(record),
        _held_out(record),
        "## Data\n",
        _data(record),
        "## Recipe and cost\n",
        _recipe(record),
    ]
    page = "\n".join(part for part in parts if part).rstrip() + "\n"
    return str(ModelCard(f"---\n{about.to_yaml()}\n---\n\n{page}"))


def weight_format(head: Path) -> str:
    """Return how a head's files store its weights, by its config.json if there is one."""
    config = head / "config.json"
    stored = read_object(read_json(config), "quantization_config") if config.is_file() else {}
    if not stored:
        return PLAIN
    sizes = block_sizes(stored.get("weight_block_size"))
    if sizes is None:
        raise ConfigError(
            f"{config}: expected a weight_block_size of two sizes in quantization_config, got "
            f"{shown(stored)}"
        )
    return FLOAT8.format(*sizes)


def _head_table(record: Record, weights: str, about_target: str, licence: str) -> str:
    draft, head = record["draft_config"], record["head"]
    attention, method = draft["attention"], head["method"]
    switches = [
        key
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if draft.get(key)
    ]
    reads = (
        f"boundary layers {', '.join(map(str, draft['aux_layers']))}"
        if draft["aux_layers"]
        else "the hidden state after the final norm"
    )
    rows = [
        ("target", f"{head['target']} {about_target}".rstrip()),
        ("format", FORMATS[method].format(weights=weights)),
        (
            "head",
            f"{_layers(draft)}, {draft['hidden_size']} wide, {attention['num_heads']} heads, "
            f"{attention['num_kv_heads']} KV heads, MLP {draft['intermediate_size']:,}; "
            f"{head['parameters'] / 1e6:.1f} M parameters; reads {reads}",
        ),
    ]
    if seen := _context(draft):
        rows.append(("context", seen))
    if switches:
        rows.append(("switches", f"true: {', '.join(f'`{key}`' for key in switches)}"))
    words = record["vocabulary"]
    if (
        draft["maps_vocabulary"]
        if "maps_vocabulary" in draft
        else draft["draft_vocab_size"] != draft["vocab_size"]
    ):
        covered = (
            f"{words['coverage']:.1%} of the training answers' tokens, "
            f"{words['held_out_coverage']:.1%} of held-out ones"
        )
        rows.append(("draft vocabulary", f"{words['size']:,} tokens: {covered}"))
    rows.append(("licence", licence))
    return "\n| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows)


def _layers(draft: Record) -> str:
    """Return the number and the kind of a head's layers, and the block that they draft."""
    if "windows" not in draft:
        return "one Llama layer"
    count, size = len(draft["windows"]), draft["draft_block_size"]
    drafts = size if draft["sample_from_anchor"] else size - 1
    return f"{count} Qwen3 layer{'s' if count > 1 else ''} that draft {drafts} tokens a pass"


def _context(draft: Record) -> str | None:
    """Return how much context a head with a window sees; None for one that sees all of it."""
    windows = draft.get("windows") or [draft.get("sliding_window")]  # a block head's, by layer
    sizes = [window for window in windows if window]
    if not sizes:
        return None
    some = "" if len(sizes) == len(windows) else f" in {len(sizes)} of {len(windows)} layers"
    return f"the last {max(sizes):,} tokens{some}"


def _acceptance(found: Sequence[Record]) -> str:
    if not found:
        return "Not evaluated.\n"
    lines = ["| prompts | mean acceptance length | per position |", "|---|---|---|"]
    for run in found:
        positions = " / ".join(f"{x:.3f}".removeprefix("0") for x in run["per_position_acceptance"])
        counts = (
            f"{run['num_accepted_tokens']:,} of {run['num_draft_tokens']:,} drafts in "
            f"{run['num_drafts']:,} rounds"
        )
        lines.append(
            f"| {_about_run(run)} | {run['mean_acceptance_length']:.3f} ({counts}) | {positions} |"
        )
        for name, part in run.get("by_prompt_length", {}).items():
            positions = " / ".join(
                f"{x:.3f}".removeprefix("0") for x in part["per_position_acceptance"]
            )
            lines.append(
                f"| prompt tokens: {name} | {part['mean_acceptance_length']:.3f} | {positions} |"
            )
    return (
        "First turns in the chat template, temperature 0, `jaxspec train evaluate`:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _about_run(run: Record) -> str:
    """Return the settings of an evaluation, as far as its record has them."""
    prompts = f"{run['prompts']} prompts"
    if run.get("prompts_from") is not None:
        prompts += f" of {run['prompts_from']}"
    known = [prompts, run["dtype"], f"K = {run['num_speculative_tokens']}"]
    if "max_tokens" in run:
        known.append(f"at most {run['max_tokens']} tokens")
    return ", ".join(known)


def lengths_of(path: Path, head: Path, record: Record) -> dict[str, Any]:
    """Return greedy acceptance by prompt length, over all data sets of an acceptance record.

    path:   what `jaxspec acceptance` wrote for the head
    record: training.json of the head's folder

    ConfigError for a record of another head, or without rounds at temperature 0.
    """
    measured = read_json(path)
    try:
        K, settings = measured["num_speculative_tokens"], measured["settings"]
        _check_same_head(path, settings["draft"], settings["method"], head, record)
        found = [
            result.counts
            for result in map(Result.from_dict, measured["results"])
            if result.case.temperature == 0 and result.case.num_speculative_tokens == K
        ]
        if not found:
            raise ConfigError(
                f"{path}: expected acceptance at temperature 0 with K = {K}, got none"
            )
        parts = by_prompt_length(join(found))
        if not parts:
            raise ConfigError(f"{path}: expected rounds of prompts of known length, got none")
        return {
            "date": measured["date"],
            "device": measured["devices"][0]["kind"],
            "dtype": settings["dtype"],
            "max_tokens": settings["max_tokens"],
            "num_speculative_tokens": K,
            "by_prompt_length": {name: measured_figures(part) for name, part in parts.items()},
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(
            f"{path}: expected what `jaxspec acceptance --output-json` wrote, "
            f"got {type(e).__name__}: {e}"
        ) from e


def _check_same_head(path: Path, draft: str, method: str, head: Path, record: Record) -> None:
    """Raise ConfigError for acceptance of another head, by its method and its folder.

    A folder that is not on this machine goes by its name.
    """
    expected, named = head.resolve(), Path(draft).expanduser()
    if method != record["head"]["method"]:
        raise ConfigError(
            f"{path}: expected acceptance of this {record['head']['method']} head, got that of a "
            f"draft with method {method!r}"
        )
    is_same = named.resolve() == expected if named.is_dir() else named.name == expected.name
    if not is_same:
        raise ConfigError(f"{path}: expected acceptance of the head {head}, got that of {draft!r}")


def _by_length(record: Record) -> str:
    """Return the table of acceptance by prompt length, each row beside the shortest prompts."""
    found = record.get("acceptance_by_length")
    if found is None:
        return ""
    parts = found["by_prompt_length"]
    first, *_ = (part["mean_acceptance_length"] for part in parts.values())
    lines = [
        "| tokens of the prompt | prompts | mean acceptance length | share of the shortest's "
        "| per position |",
        "|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        length, error = (part[f"mean_acceptance_length{end}"] for end in ("", "_standard_error"))
        positions = " / ".join(f"{x:.3f}".removeprefix("0") for x in part["per_position"])
        lines.append(
            f"| {name} | {part['num_prompts']} | {length:.3f} ± {error:.3f} | {length / first:.2f} "
            f"| {positions} |"
        )
    return (
        f"By the prompt's length (`jaxspec acceptance`, temperature 0, "
        f"K = {found['num_speculative_tokens']}, at most {found['max_tokens']} tokens, "
        f"{found['dtype']}, {found['device']}, {found['date']}):\n\n" + "\n".join(lines) + "\n"
    )


def _held_out(record: Record) -> str:
    last = record["history"][-1] if record.get("history") else {}
    if "held_out_accepted" not in last:
        return ""
    accepted = last["held_out_accepted"]
    shares = " / ".join(f"{x:.3f}".removeprefix("0") for x in accepted[:3])
    return (
        f"On held-out chats, along the target's greedy text, {shares} of the rows accept 1, 2, 3 "
        "drafts. Each row counts once there. A drafting engine starts again where a draft failed, "
        "so its figures are lower.\n"
    )


def _data(record: Record) -> str:
    runs = record.get("generation", [])
    chats = record["chats"]

    def total(key: str) -> int:
        return sum(run[key] for run in runs)

    text = (
        f"Written by the target itself (`jaxspec/training/generation.py`): {chats['chats']:,} "
        f"chats with {chats['tokens'] / 1e6:.1f} M tokens, {chats['answer_tokens'] / 1e6:.1f} M of "
        f"them in answers. {chats['greedy_share']:.0%} of the answers are greedy, the rest sampled."
    )
    if not runs:
        return text + "\n"
    sources = {
        kind: sum(run["sources"].get(kind, 0) for run in runs)
        for kind in ("opened", "free", "file")
    }
    pace = " + ".join(f"{run['tokens_per_second']:,.0f}" for run in runs)
    longest = max(run["config"]["max_len"] for run in runs)
    return text + (
        f" No chat is longer than {longest} tokens: longer contexts are outside the training "
        "data.\n\n"
        f"{len(runs)} process{'es' if len(runs) > 1 else ''} wrote "
        f"{total('num_sampled_tokens') / 1e6:.1f} M tokens in "
        f"{max(run['seconds'] for run in runs):.0f} s ({pace} tokens per second):\n\n"
        f"- {sources['opened']:,} chats whose user's turn starts with a line of "
        "`jaxspec/training/openings.json`;\n"
        f"- {sources['free']:,} free-running chats, whose user's turn the target samples at "
        "temperature 0.8 to 1;\n"
        f"- answers to {sources['file']:,} prompts of files.\n\n"
        f"{total('dropped_user_turns'):,} user's turns were dropped because they did not end, "
        "repeated or held special tokens. "
        f"{_removed(total('removed_by_overlap'))} 13 consecutive words with {_kept_out(runs)}.\n"
    )


def _removed(count: int) -> str:
    if count == 1:
        return "1 prompt was removed because it shares"
    return f"{count:,} prompts were removed because they share"


def _kept_out(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompts that chats keep out; older records do not name them."""
    names = dict.fromkeys(name for run in runs for name in run.get("kept_out", ()))
    if not names:
        return "the prompts that heads are evaluated on"
    return f"prompts of {' and '.join(names)}, or repeat a shorter one of these"


def _recipe(record: Record) -> str:
    cfg, history = record["train_config"], record.get("history", [{}])
    last = history[-1]
    method = record["head"]["method"]
    if method in ("dspark", "dflash"):
        loss = (
            f"Blocks at one anchor for every {cfg['tokens_per_block']} tokens. The loss of draft k "
            f"is {1 - cfg['overlap_weight']:.1f} cross entropy + {cfg['overlap_weight']:.1f} total "
            f"variation, times {cfg['decay']}^k; {cfg['argmax_weight']:.0%} of the target's "
            "distribution is moved to its first choice."
        )
    else:
        loss = (
            f"Training-time test over {cfg['num_steps']} steps. The loss is the cross entropy on "
            f"answer tokens, with weights {cfg['decay']}^i. {1 - cfg['argmax_weight']:.0%} of it "
            "is with the target's distribution over the draft's vocabulary, "
            f"{cfg['argmax_weight']:.0%} with its first choice."
        )
    if method == "eagle":
        loss += (
            f" {cfg['feature_weight']} times the smooth L1 on the target's hidden state after its "
            "final norm is added."
        )
    rule = (
        "Muon for the matrices except `lm_head`, Adam for the rest:"
        if cfg["optimizer"] == "muon"
        else "AdamW:"
    )
    start = (
        f" Began from the weights of `{record['head']['init']}`."
        if record["head"].get("init")
        else ""
    )
    return (
        f"    jaxspec train {shlex.join(record['command'])}\n\n"
        f"{loss} {rule} learning rate "
        f"{cfg['learning_rate']:g} with {cfg['warmup_steps']} warm-up steps and a cosine over the "
        f"time budget, {cfg['tokens_per_batch']:,} tokens a step, float32 masters.{start} "
        f"{last.get('step', 0):,} steps, {last.get('tokens', 0) / 1e6:.1f} M tokens in "
        f"{last.get('seconds', 0):.0f} s on {record['devices']} {record['device']}, jax "
        f"{record['jax']}, {record['date']}. [docs/training.md](../../docs/training.md) explains "
        "the pieces. `training.json` beside this file holds settings and history.\n"
    )
