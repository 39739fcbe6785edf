"""Train an EAGLE-3 or EAGLE-1 head for a target on the target's own text.

  all        generate chats, train on them, evaluate      (--max-minutes is a wall-clock budget for the whole)
  generate   only write the chats (OUTPUT/chats.npz)
  train      train on one or more chats.npz, evaluate
  evaluate   acceptance of a head through the real propose and verify
  card       write a head's README.md from its training.json
  split, join   cut a file into pieces and put them together again

A newcomer's run, with a GPU:  python scripts/train_draft.py all --output my-head --prompts questions.jsonl --max-minutes 25
Without one, to see it work:   python scripts/train_draft.py all --dry-run --output /tmp/dry

Training uses every visible GPU. To write more text, start one `generate` a GPU (CUDA_VISIBLE_DEVICES=i, --seed i, --shard i/n,
--output gi), then `train --chats g0/chats.npz g1/chats.npz`. A run of fixed length (--max-steps) that was killed goes on with --resume.
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
from jaxspec.drafts import DraftConfig
from jaxspec.params import Params, init_random
from jaxspec.prompts import read_jsonl
from jaxspec.training.card import card
from jaxspec.training.checkpoint import WEIGHTS, join_file, save_draft, split_file
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import Chats, OverlapFilter, merge
from jaxspec.training.evaluation import evaluate_acceptance
from jaxspec.training.generation import ChatFormat, GenerationConfig, generate_chats
from jaxspec.training.heads import continued_params, eagle3_config, eagle_config, initial_params
from jaxspec.training.loop import TrainState, data_mesh, init_train_state, train
from jaxspec.training.objective import FORWARDS
from jaxspec.training.openings import all_openings
from jaxspec.training.plot import plot_history
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

    def encode(self, text: str) -> np.ndarray:
        """The words alone, without a template."""
        if self.tokenizer is None:
            return np.asarray([8 + hash_word(word) % (self.cfg.vocab_size - 8) for word in text.split()[:3]], np.int32)
        return np.asarray(self.tokenizer.hf.encode(text, add_special_tokens=False), np.int32)

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
    args.intermediate_size = None
    args.max_user_tokens, args.max_answer_tokens, args.eval_tokens, args.warmup_steps = 12, 24, 16, 4


def generate(args: argparse.Namespace, target: Target, eval_prompts: list[str]) -> dict[str, Any]:
    """Write OUTPUT/chats.npz; returns the counts for the card."""
    cfg = GenerationConfig(
        num_slots=args.num_slots,
        max_len=args.max_len,
        prefill_rows=args.prefill_rows,
        block_size=16 if args.dry_run else 64,
        max_user_tokens=args.max_user_tokens,
        max_answer_tokens=args.max_answer_tokens,
        greedy_share=args.greedy_share,
        opened_share=args.opened_share,
        seed=args.seed,
    )
    overlap = OverlapFilter(eval_prompts)
    texts = [prompt for path in args.prompts for prompt in read_jsonl(path) if overlap.admits(prompt)]
    removed = overlap.removed
    mine, of = shard(args.shard)
    encoded = [ids for text in texts[mine::of] if len(ids := target.encode_chat(text)) <= cfg.max_len // 2]
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
        openings=[target.encode(text) for text in all_openings()],
        decode_text=target.decode,
        overlap=overlap,
        log=log,
    )
    record = dataclasses.asdict(report) | {
        "tokens_per_second": report.tokens_per_second,
        "removed_by_overlap": overlap.removed,
        "mean_length": float(chats.lengths.mean()) if len(chats) else 0.0,
        "device": jax.devices()[0].device_kind,
        "config": dataclasses.asdict(cfg),
    }
    log(f"generate: {json.dumps(record)}")
    for i in range(min(args.show, len(chats))):
        log(f"generate: example: {target.decode(chats.sequence(i))!r}")
    args.output.mkdir(parents=True, exist_ok=True)
    chats.save(args.output / "chats.npz")
    (args.output / "generation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def shard(text: str) -> tuple[int, int]:
    """ "1/3" -> (1, 3)."""
    mine, slash, of = text.partition("/")
    if not (slash and mine.isdigit() and of.isdigit() and int(mine) < int(of)):
        raise ConfigError(f"--shard: expected i/n with i from 0 to n - 1, got {text!r}")
    return int(mine), int(of)


def load_chats(paths: list[Path], records: dict[str, Any]) -> Chats:
    """The chats of all files, merged; what their generation.json says goes into the record."""
    about = [path.with_name("generation.json") for path in paths]
    records["generation"] = [json.loads(path.read_text(encoding="utf-8")) for path in about if path.is_file()]
    chats = merge([Chats.load(path) for path in paths])
    records["chats"] = {
        "files": len(paths),
        "chats": len(chats),
        "tokens": int(chats.lengths.sum()),
        "answer_tokens": chats.num_answer_tokens,
        "greedy_share": float(np.mean(chats.temperature == 0)),
    }
    return chats


def new_head(args: argparse.Namespace, target: Target, counts: np.ndarray) -> tuple[DraftConfig, Params, np.ndarray]:
    """(config, first weights, target ids of its vocabulary) of the head to train."""
    if args.method == "eagle":
        draft, ids = eagle_config(target.cfg, intermediate_size=args.intermediate_size), np.arange(target.cfg.vocab_size)
    else:
        always = {*target.chat.stop_token_ids, *target.chat.special_token_ids, *target.chat.before_answer}
        ids = choose_vocabulary(counts, args.draft_vocab_size, always)
        draft = eagle3_config(
            target.cfg,
            draft_vocab_size=args.draft_vocab_size,
            intermediate_size=args.intermediate_size,
            aux_layers=tuple(args.aux_layers) if args.aux_layers else None,
            norm_before_residual=args.norm_before_residual,
            fc_norm=args.fc_norm,
            norm_output=args.norm_output,
        )
    params = initial_params(draft, target.cfg, target.params, ids, args.seed)
    if args.init:
        _, old = load_head(args, args.init, target, jnp.float32)
        params = continued_params(draft, params, ids, old, np.asarray(old.get("draft_to_target", ids)))
    return draft, params, ids


def fit(args: argparse.Namespace, target: Target, chats: Chats, eval_prompts: list[str], deadline: float, records: dict[str, Any]) -> Path:
    """Train, saving and evaluating on the way; returns the head's folder."""
    if len(chats) <= args.held_out:
        raise ConfigError(f"training data: expected more than the {args.held_out} held-out chats, got {len(chats)}")
    training, held_out = chats.split(args.held_out)
    counts = training.answer_counts(target.cfg.vocab_size)
    draft, params, ids = new_head(args, target, counts)
    held_out_counts = held_out.answer_counts(target.cfg.vocab_size)
    records["vocabulary"] = {"size": len(ids), "coverage": coverage(counts, ids), "held_out_coverage": coverage(held_out_counts, ids)}
    cfg = TrainConfig(
        num_steps=args.ttt_steps,
        decay=args.decay,
        argmax_weight=args.argmax_weight,
        feature_weight=args.feature_weight,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        clip=args.clip,
        buckets=tuple(args.buckets),
        tokens_per_batch=args.tokens_per_batch,
        accumulation=args.accumulation,
        remat=args.remat,
        seed=args.seed,
        log_every=4 if args.dry_run else 50,
    )
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    records["head"] = {"method": args.method, "parameters": num_parameters, "target": target.name, "init": args.init}
    records["train_config"], records["draft_config"] = dataclasses.asdict(cfg), dataclasses.asdict(draft)
    log(f"train: {len(training)} chats, {int(training.lengths.sum())} tokens, {training.num_answer_tokens} of them answers")
    log(f"train: vocabulary {records['vocabulary']}, {num_parameters} parameters, {jax.device_count()} devices")
    log(f"train: {draft}")
    head = args.output / "head"

    def save(state: TrainState, step: int) -> dict[str, Any]:
        save_draft(head, draft, state.params, ids, target=target.name, max_position_embeddings=target.cfg.max_position_embeddings)
        split_file(head / WEIGHTS, args.output / "pieces", PIECE_BYTES)
        (args.output / "pieces" / "config.json").write_bytes((head / "config.json").read_bytes())
        write_records(args, records)
        log(f"train: saved step {step} to {head}")
        if args.keep_state:
            from jaxspec.training.resume import save_state

            save_state(args.output / "state", state)
        return {"acceptance": found} if (found := evaluate(args, target, head, eval_prompts, records)) else {}

    state = init_train_state(cfg, params)
    records["history"] = []
    if args.resume:
        from jaxspec.training.resume import restore_state

        state = restore_state(args.output / "state", state)
        records["history"] = earlier_history(args.output / "training.json", int(state.step))
        log(f"train: goes on from step {int(state.step)}")
    train(
        cfg,
        draft,
        target.cfg,
        target.params,
        state,
        ids,
        training,
        held_out,
        mesh=data_mesh(),
        max_steps=args.max_steps,
        deadline=deadline,
        save=save,
        save_every_seconds=args.save_seconds,
        log=log,
        history=records["history"],
    )
    write_records(args, records)
    try:
        plot_history(records["history"], args.output / "loss.png")
    except ImportError as e:
        log(f"train: no loss.png: {e} (the extra 'train' brings it)")
    return head


def earlier_history(path: Path, step: int) -> list[dict[str, Any]]:
    """What the run that is gone on with had recorded up to this step."""
    recorded = json.loads(path.read_text(encoding="utf-8")).get("history", []) if path.is_file() else []
    return [entry for entry in recorded if entry["step"] <= step]


def load_head(args: argparse.Namespace, folder: Path, target: Target, dtype: Any) -> tuple[DraftConfig, Params]:
    from jaxspec.loading.model import load_draft

    return load_draft(folder, target.cfg, target.params, SpeculativeConfig(model=str(folder), method=args.method), dtype)


def evaluate(args: argparse.Namespace, target: Target, head: Path, eval_prompts: list[str], records: dict[str, Any]) -> dict[str, Any]:
    """Acceptance of the saved head through the real propose and verify; the counts, empty without prompts."""
    dtype = target.params["norm"].dtype
    draft, params = load_head(args, head, target, dtype)
    if eval_prompts:
        prompts = [target.encode_chat(prompt) for prompt in eval_prompts]
    elif args.dry_run:
        prompts = [target.encode_chat(f"prompt number {i} of a dry run") for i in range(3)]
    else:
        log("evaluate: no --eval-prompts, nothing evaluated")
        return {}
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
        dtype=dtype,
    )
    found = metrics.to_dict() | {"prompts": len(prompts), "output_tokens": int(sum(map(len, answers))), "dtype": str(dtype)}
    records["evaluation"] = found
    write_records(args, records)
    positions = " / ".join(f"{x:.3f}" for x in metrics.per_position_acceptance)
    log(
        f"evaluate: {len(prompts)} prompts, K={args.num_speculative_tokens}, T=0, {dtype}, {time.monotonic() - begin:.1f} s: "
        f"mean acceptance length {metrics.mean_acceptance_length:.3f}, per position {positions}, {metrics.num_drafts} drafts"
    )
    if args.command == "evaluate":
        for i in range(min(args.show, len(answers))):
            log(f"evaluate: example: {target.decode(answers[i])!r}")
    return found


def write_records(args: argparse.Namespace, records: dict[str, Any]) -> None:
    device = jax.devices()[0]
    about = {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": sys.argv[1:],
        "seconds": round(time.monotonic() - START, 1),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    name = "evaluation.json" if args.command == "evaluate" else "training.json"
    (args.output / name).write_text(json.dumps(about | records, indent=1, default=str) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = common.add_argument
    add("--target", help="folder, .gguf file or hub id of the target (default: SmolLM2-135M-Instruct)")
    add("--target-name", help="what the head's config calls its target (default: the folder's name)")
    add("--output", type=Path, required=True, help="chats.npz, head/, pieces/ and training.json go here")
    add("--method", default="eagle3", choices=sorted(FORWARDS), help="eagle: EAGLE-1, with the target's whole vocabulary")
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
    data.add_argument("--opened-share", type=float, default=0.5, help="user's turns that begin with one of jaxspec's openings")
    data.add_argument("--shard", default="0/1", help="i/n: of the prompts in files, take every n-th from the i-th on")
    data.add_argument("--chats", type=Path, nargs="+", help="train: chats.npz of earlier runs, merged (default: OUTPUT/chats.npz)")
    head = common.add_argument_group("head")
    head.add_argument("--init", type=Path, help="continue from this head's weights; the vocabulary may differ and the MLP may be wider")
    head.add_argument("--draft-vocab-size", type=int, default=12_000)
    head.add_argument("--aux-layers", type=int, nargs="+", help="boundary ids of the target's layers (default: 2, n // 2, n - 3)")
    head.add_argument("--intermediate-size", type=int, help="of the draft's MLP (default: the target's)")
    head.add_argument("--norm-before-residual", action=argparse.BooleanOptionalAction, default=True)
    head.add_argument("--fc-norm", action=argparse.BooleanOptionalAction, default=True)
    head.add_argument("--norm-output", action=argparse.BooleanOptionalAction, default=True)
    train = common.add_argument_group("training")
    train.add_argument("--ttt-steps", type=int, default=5, help="draft steps of the training-time test")
    train.add_argument("--decay", type=float, default=0.8, help="weight of each further draft step")
    train.add_argument("--argmax-weight", type=float, default=0.0, help="share of the loss on the target's first choice alone")
    train.add_argument("--feature-weight", type=float, default=0.1, help="eagle: weight of the hidden state's smooth L1")
    train.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"), help="muon: for the matrices but lm_head")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--warmup-steps", type=int, default=200)
    train.add_argument("--weight-decay", type=float, default=0.01)
    train.add_argument("--clip", type=float, default=0.5, help="global norm of the gradient")
    train.add_argument("--tokens-per-batch", type=int, default=16384, help="of one step, over all GPUs")
    train.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step, one after the other: less memory")
    train.add_argument("--keep-state", action="store_true", help="save the optimiser's state beside the head (OUTPUT/state)")
    train.add_argument("--resume", action="store_true", help="go on from OUTPUT/state; the same curve, if --max-steps ends the run")
    train.add_argument("--save-seconds", type=float, default=150.0, help="how often the head is saved and evaluated")
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
    about = commands.add_parser("card", help="HEAD/training.json -> HEAD/README.md")
    about.add_argument("head", type=Path)
    about.add_argument(
        "--evaluation", type=Path, action="append", default=[], help="an evaluation.json of `evaluate` to add to training.json"
    )
    about.add_argument("--about-target", default="", help="what follows the target's name: its licence, its file")
    about.add_argument("--licence", default="Apache-2.0", help="the head's")
    about.add_argument("--note", action="append", default=[], help="a paragraph of the card; repeatable")
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
    if args.command == "card":
        record = json.loads((args.head / "training.json").read_text(encoding="utf-8"))
        more = [json.loads(path.read_text(encoding="utf-8"))["evaluation"] for path in args.evaluation]
        record["evaluations"] = record.get("evaluations", []) + more
        (args.head / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (args.head / "README.md").write_text(
            card(args.head.name, record, about_target=args.about_target, licence=args.licence, notes=args.note), encoding="utf-8"
        )
        return
    if args.dry_run:
        shrink(args)
    eval_prompts = read_jsonl(args.eval_prompts) if args.eval_prompts else []
    log(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    target = load(args)
    log(f"target {target.name}: {target.cfg}")
    records: dict[str, Any] = {}
    if args.command in ("all", "generate"):
        generate(args, target, eval_prompts)
    if args.command in ("all", "train"):
        chats = load_chats(args.chats or [args.output / "chats.npz"], records)
        fit(args, target, chats, eval_prompts, START + 60 * (args.max_minutes - args.evaluate_minutes), records)
    if args.command == "evaluate":
        evaluate(args, target, args.head or args.output / "head", eval_prompts, records)


if __name__ == "__main__":
    sys.exit(main())
