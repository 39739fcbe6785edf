"""Train an EAGLE-3 head for a target on the target's own text.

  all        generate chats, train on them, evaluate      (--max-minutes is a wall-clock budget for the whole)
  generate   only write the chats (chats.npz)
  train      train on a chats.npz, evaluate
  evaluate   acceptance of a head through the real propose and verify
  split, join   cut a file into pieces and put them together again

A newcomer's run, with a GPU:  python scripts/train_draft.py all --output my-head --prompts questions.jsonl --max-minutes 25
Without one, to see it work:   python scripts/train_draft.py all --dry-run --output /tmp/dry
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import models
from jaxspec.cli import errors_as_sentences
from jaxspec.config import AttentionConfig, ConfigError, RopeConfig, SpeculativeConfig
from jaxspec.drafts import eagle3
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.params import Params, init_random
from jaxspec.prompts import read_jsonl
from jaxspec.training.checkpoint import WEIGHTS, join_file, save_draft, split_file
from jaxspec.training.data import Chats, OverlapFilter
from jaxspec.training.evaluation import evaluate_acceptance
from jaxspec.training.generation import ChatFormat, GenerationConfig, generate_chats
from jaxspec.training.loop import TrainConfig, initial_params, train
from jaxspec.training.vocabulary import choose_vocabulary, coverage

START = time.monotonic()
PIECE_BYTES = 15 << 20


def log(line: str) -> None:
    print(f"[{time.monotonic() - START:7.1f} s] {line}", flush=True)


@dataclasses.dataclass
class Target:
    """A loaded target and its words. tokenizer is None in a dry run."""

    name: str
    cfg: models.TargetConfig
    params: Params
    chat: ChatFormat
    tokenizer: Any

    def encode_chat(self, prompt: str) -> np.ndarray:
        if self.tokenizer is None:
            words = [8 + hash_word(word) % (self.cfg.vocab_size - 8) for word in prompt.split()[:12]]
            return np.asarray([*self.chat.before_user, *words, *self.chat.before_answer], np.int32)
        return np.asarray(self.tokenizer.encode_chat([{"role": "user", "content": prompt}]), np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens.tolist())


def hash_word(word: str) -> int:
    return sum(i * ord(c) for i, c in enumerate(word, 1))


def load(args: argparse.Namespace) -> Target:
    if args.dry_run:
        attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
        cfg = models.TargetConfig("llama", 128, 32, 48, 3, attention, 1e-5, 2048, True)
        params = init_random(models.family(cfg).param_specs(cfg), jax.random.key(0), jnp.dtype(args.dtype))
        return Target("dry-run", cfg, params, ChatFormat((1, 4, 5), (2, 6, 7), (2,), (0, 1, 2)), None)
    from jaxspec.loading import load_tokenizer, resolve
    from jaxspec.loading.model import load_target

    folder = resolve(args.target, kind="target")
    tokenizer = load_tokenizer(folder)
    cfg, params = load_target(folder, jnp.dtype(args.dtype))
    return Target(args.target_name or args.target or folder.name, cfg, params, ChatFormat.from_tokenizer(tokenizer), tokenizer)


def shrink(args: argparse.Namespace) -> None:
    """The sizes of a dry run: every code path, in seconds on a CPU."""
    args.draft_vocab_size, args.aux_layers = 96, (1, 2, 3)
    args.num_slots, args.prefill_rows, args.max_len, args.max_chats = 16, 8, 64, 48
    args.buckets, args.tokens_per_batch, args.max_steps, args.ttt_steps, args.held_out = (48,), 192, 12, 3, 8
    args.max_user_tokens, args.max_answer_tokens, args.eval_tokens, args.warmup_steps = 12, 24, 16, 4


def generate(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Write OUTPUT/chats.npz; returns the counts for the card."""
    cfg = GenerationConfig(
        num_slots=args.num_slots,
        max_len=args.max_len,
        prefill_rows=args.prefill_rows,
        block_size=16 if args.dry_run else 64,
        max_user_tokens=args.max_user_tokens,
        max_answer_tokens=args.max_answer_tokens,
        greedy_share=args.greedy_share,
        seed=args.seed,
    )
    overlap = OverlapFilter(read_jsonl(args.eval_prompts) if args.eval_prompts else [])
    texts = [prompt for path in args.prompts for prompt in read_jsonl(path) if overlap.admits(prompt)]
    removed = overlap.removed
    encoded = [ids for text in texts if len(ids := target.encode_chat(text)) <= cfg.max_len // 2]
    np.random.default_rng(cfg.seed).shuffle(encoded)
    log(f"generate: {len(encoded)} prompts from files, {removed} removed for a 13-gram of the evaluation set")
    chats, report = generate_chats(
        cfg,
        target.cfg,
        target.params,
        target.chat,
        dtype=target.params["norm"].dtype,
        deadline=time.monotonic() + 60 * args.generate_minutes,
        max_chats=args.max_chats,
        prompts=encoded,
        decode_text=target.decode,
        overlap=overlap,
        log=log,
    )
    record = dataclasses.asdict(report) | {
        "tokens_per_second": report.tokens_per_second,
        "removed_by_overlap": overlap.removed,
        "mean_length": float(chats.lengths.mean()) if len(chats) else 0.0,
        "config": dataclasses.asdict(cfg),
    }
    log(f"generate: {json.dumps(record)}")
    for i in range(min(args.show, len(chats))):
        log(f"generate: example: {target.decode(chats.sequence(i))!r}")
    args.output.mkdir(parents=True, exist_ok=True)
    chats.save(args.output / "chats.npz")
    return record


def draft_config(args: argparse.Namespace, target: models.TargetConfig) -> Eagle3Config:
    n = target.num_layers
    return Eagle3Config(
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=args.intermediate_size or target.intermediate_size,
        num_layers=1,
        attention=dataclasses.replace(target.attention, qk_norm=False, qkv_bias=False, o_bias=False),
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=args.draft_vocab_size,
        aux_layers=tuple(args.aux_layers) if args.aux_layers else (2, n // 2, n - 3),
        norm_before_residual=args.norm_before_residual,
        fc_norm=args.fc_norm,
        norm_output=args.norm_output,
    )


def fit(args: argparse.Namespace, target: Target, chats: Chats, deadline: float, records: dict[str, Any]) -> Path:
    """Train, saving on the way; returns the head's folder."""
    if len(chats) <= args.held_out:
        raise ConfigError(f"training data: expected more than the {args.held_out} held-out chats, got {len(chats)}")
    training, held_out = chats.split(args.held_out)
    counts = training.answer_counts(target.cfg.vocab_size)
    if args.init:
        draft, params = load_head(args.init, target, jnp.float32)
        ids = np.asarray(params["draft_to_target"])
        params = {name: params[name] for name in eagle3.param_specs(draft)}
    else:
        always = {*target.chat.stop_token_ids, *target.chat.special_token_ids, *target.chat.before_answer}
        ids = choose_vocabulary(counts, args.draft_vocab_size, always)
        draft = draft_config(args, target.cfg)
        params = initial_params(draft, target.cfg, target.params, ids, args.seed)
    held_out_counts = held_out.answer_counts(target.cfg.vocab_size)
    records["vocabulary"] = {"size": len(ids), "coverage": coverage(counts, ids), "held_out_coverage": coverage(held_out_counts, ids)}
    cfg = TrainConfig(
        num_steps=args.ttt_steps,
        decay=args.decay,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        clip=args.clip,
        buckets=tuple(args.buckets),
        tokens_per_batch=args.tokens_per_batch,
        remat=args.remat,
        seed=args.seed,
        log_every=4 if args.dry_run else 50,
    )
    records["train_config"], records["draft_config"] = dataclasses.asdict(cfg), dataclasses.asdict(draft)
    log(f"train: {len(training)} chats, {int(training.lengths.sum())} tokens, {training.num_answer_tokens} of them answers")
    log(f"train: vocabulary {records['vocabulary']}")
    log(f"train: {draft}")
    head = args.output / "head"

    def save(params: Params, step: int, record: dict[str, Any]) -> None:
        save_draft(head, draft, params, ids, target=target.name, max_position_embeddings=target.cfg.max_position_embeddings)
        split_file(head / WEIGHTS, args.output / "pieces", PIECE_BYTES)
        (args.output / "pieces" / "config.json").write_bytes((head / "config.json").read_bytes())
        write_records(args, records | {"last": record})
        log(f"train: saved step {step} to {head}")

    _, records["history"] = train(
        cfg,
        draft,
        target.cfg,
        target.params,
        params,
        ids,
        training,
        held_out,
        max_steps=args.max_steps,
        deadline=deadline,
        save=save,
        log=log,
    )
    write_records(args, records)
    return head


def load_head(folder: Path, target: Target, dtype: Any) -> tuple[Eagle3Config, Params]:
    from jaxspec.loading.model import load_draft

    return load_draft(folder, target.cfg, target.params, SpeculativeConfig(model=str(folder)), dtype)


def evaluate(args: argparse.Namespace, target: Target, head: Path, records: dict[str, Any]) -> None:
    draft, params = load_head(head, target, target.params["norm"].dtype)
    if args.eval_prompts:
        prompts = [target.encode_chat(prompt) for prompt in read_jsonl(args.eval_prompts)]
    elif args.dry_run:
        prompts = [target.encode_chat(f"prompt number {i} of a dry run") for i in range(3)]
    else:
        return log("evaluate: no --eval-prompts, nothing evaluated")
    begin = time.monotonic()
    metrics, answers = evaluate_acceptance(
        target.cfg,
        target.params,
        draft,
        params,
        prompts,
        stop_token_ids=target.chat.stop_token_ids,
        num_speculative_tokens=args.num_speculative_tokens,
        max_tokens=args.eval_tokens,
        dtype=target.params["norm"].dtype,
    )
    records["evaluation"] = metrics.to_dict() | {"prompts": len(prompts), "output_tokens": int(sum(map(len, answers)))}
    write_records(args, records)
    positions = " / ".join(f"{x:.3f}" for x in metrics.per_position_acceptance)
    log(
        f"evaluate: {len(prompts)} prompts, K={args.num_speculative_tokens}, T=0, {time.monotonic() - begin:.1f} s: "
        f"mean acceptance length {metrics.mean_acceptance_length:.3f}, per position {positions}, {metrics.num_drafts} drafts"
    )
    for i in range(min(args.show, len(answers))):
        log(f"evaluate: example: {target.decode(answers[i])!r}")


def write_records(args: argparse.Namespace, records: dict[str, Any]) -> None:
    device = jax.devices()[0]
    about = {"device": device.device_kind, "jax": jax.__version__, "command": sys.argv[1:], "seconds": time.monotonic() - START}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "training.json").write_text(json.dumps(about | records, indent=1, default=str) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = common.add_argument
    add("--target", help="folder, .gguf file or hub id of the target (default: SmolLM2-135M-Instruct)")
    add("--target-name", help="what the head's config calls its target (default: the folder's name)")
    add("--output", type=Path, required=True, help="chats.npz, head/, pieces/ and training.json go here")
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="the target's weights, and what everything is computed in; masters are float32",
    )
    add("--dry-run", action="store_true", help="a tiny random target, a minute on a CPU")
    add("--max-minutes", type=float, default=25.0, help="wall-clock budget of the whole command; evaluation's share is kept back")
    add("--evaluate-minutes", type=float, default=2.0)
    add("--seed", type=int, default=0)
    add("--show", type=int, default=3, help="examples to print")
    data = common.add_argument_group("data")
    data.add_argument("--generate-minutes", type=float, default=8.0)
    data.add_argument(
        "--prompts", type=Path, action="append", default=[], help="jsonl of seed prompts ('question', 'prompt' or 'turns'); repeatable"
    )
    data.add_argument("--num-slots", type=int, default=1024, help="rows that decode together")
    data.add_argument("--prefill-rows", type=int, default=128)
    data.add_argument("--max-len", type=int, default=512)
    data.add_argument("--max-user-tokens", type=int, default=160)
    data.add_argument("--max-answer-tokens", type=int, default=320)
    data.add_argument("--max-chats", type=int, default=1_000_000)
    data.add_argument("--greedy-share", type=float, default=0.6, help="answers decoded greedily; the rest at temperatures 0.6 to 1")
    data.add_argument("--chats", type=Path, help="train: a chats.npz of an earlier run (default: OUTPUT/chats.npz)")
    head = common.add_argument_group("head")
    head.add_argument(
        "--init", type=Path, help="start from this head's weights and vocabulary (the other flags of this group are then not read)"
    )
    head.add_argument("--draft-vocab-size", type=int, default=12_000)
    head.add_argument("--aux-layers", type=int, nargs="+", help="boundary ids of the target's layers (default: 2, n // 2, n - 3)")
    head.add_argument("--intermediate-size", type=int, help="of the draft's MLP (default: the target's)")
    head.add_argument("--norm-before-residual", action=argparse.BooleanOptionalAction, default=True)
    head.add_argument("--fc-norm", action=argparse.BooleanOptionalAction, default=True)
    head.add_argument("--norm-output", action=argparse.BooleanOptionalAction, default=True)
    train = common.add_argument_group("training")
    train.add_argument("--ttt-steps", type=int, default=5, help="draft steps of the training-time test")
    train.add_argument("--decay", type=float, default=0.8, help="weight of each further draft step")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--warmup-steps", type=int, default=200)
    train.add_argument("--weight-decay", type=float, default=0.01)
    train.add_argument("--clip", type=float, default=0.5, help="global norm of the gradient")
    train.add_argument("--tokens-per-batch", type=int, default=16384)
    train.add_argument("--buckets", type=int, nargs="+", default=[256, 384, 512], help="sequence lengths that are compiled")
    train.add_argument("--max-steps", type=int, default=1_000_000)
    train.add_argument("--held-out", type=int, default=512, help="chats kept for validation")
    train.add_argument("--remat", action=argparse.BooleanOptionalAction, default=False, help="recompute logits in the backward pass")
    evaluation = common.add_argument_group("evaluation")
    evaluation.add_argument("--eval-prompts", type=Path, help="jsonl in MT-bench's form; its 13-grams are kept out of the training prompts")
    evaluation.add_argument("--eval-tokens", type=int, default=256)
    evaluation.add_argument("--num-speculative-tokens", type=int, default=3)
    evaluation.add_argument("--head", type=Path, help="evaluate: the head's folder (default: OUTPUT/head)")
    for name in ("all", "generate", "train", "evaluate"):
        commands.add_parser(name, parents=[common], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    split = commands.add_parser("split", help="FILE -> FOLDER/FILE.000, ...")
    split.add_argument("file", type=Path)
    split.add_argument("folder", type=Path)
    join = commands.add_parser("join", help="FOLDER/FILE.000, ... -> FILE")
    join.add_argument("folder", type=Path)
    join.add_argument("file", type=Path)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    with errors_as_sentences():
        run(args)
    return 0


def run(args: argparse.Namespace) -> None:
    if args.command == "split":
        return print(*split_file(args.file, args.folder, PIECE_BYTES), sep="\n")
    if args.command == "join":
        return join_file(args.folder, args.file)
    if args.dry_run:
        shrink(args)
    log(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    target = load(args)
    log(f"target {target.name}: {target.cfg}")
    records: dict[str, Any] = {}
    head = args.head or args.output / "head"
    if args.command in ("all", "generate"):
        records["generation"] = generate(args, target)
    if args.command in ("all", "train"):
        chats = Chats.load(args.chats or args.output / "chats.npz")
        head = fit(args, target, chats, START + 60 * (args.max_minutes - args.evaluate_minutes), records)
    if args.command != "generate":
        evaluate(args, target, head, records)


if __name__ == "__main__":
    sys.exit(main())
