"""Train an EAGLE-3 or EAGLE-1 head for a target on the target's own text.

  all        generate chats, train on them, evaluate (--max-minutes limits all of it)
  generate   only write the chats (OUTPUT/chats.npz)
  train      train on one or more chats.npz, evaluate
  evaluate   acceptance of a head through the real propose and verify
  card       write a head's README.md from its training.json
  split, join   cut a file into pieces and put them together again

With a GPU:      python scripts/train_draft.py all --output my-head --prompts questions.jsonl
On a CPU:        python scripts/train_draft.py all --dry-run --output /tmp/dry

Training uses every visible GPU. To write more text, start one `generate` on each GPU
(CUDA_VISIBLE_DEVICES=i, --seed i, --shard i/n, --output gi), then
`train --chats g0/chats.npz g1/chats.npz`. --resume continues a run of fixed length (--max-steps).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax

from jaxspec.config import ConfigError
from jaxspec.tools.cli import errors_as_sentences
from jaxspec.tools.lasting_stdout import lasting_stdout
from jaxspec.tools.prompts import read_jsonl
from jaxspec.training.card import write_card
from jaxspec.training.chat_files import CHATS, read_chats, write_chats
from jaxspec.training.chat_target import load_chat_target
from jaxspec.training.checkpoint import PIECE_BYTES, join_file, split_file
from jaxspec.training.config import TrainConfig
from jaxspec.training.data import OverlapFilter
from jaxspec.training.dry_run import EVALUATION_PROMPTS, dry_target
from jaxspec.training.evaluation import EvaluationConfig, evaluate_head
from jaxspec.training.generation import GenerationConfig
from jaxspec.training.heads import HeadConfig
from jaxspec.training.objective import FORWARDS
from jaxspec.training.run import RunConfig, train_head
from jaxspec.training.run_record import RunRecord

START = time.monotonic()
DRY_RUN = {  # the sizes of a dry run: every code path, in seconds on a CPU
    "draft_vocab_size": 96,
    "aux_layers": (1, 2, 3),
    "intermediate_size": None,
    "num_slots": 16,
    "prefill_rows": 8,
    "max_len": 64,
    "max_chats": 48,
    "max_user_tokens": 12,
    "max_answer_tokens": 24,
    "buckets": (48,),
    "tokens_per_batch": 192,
    "max_steps": 12,
    "warmup_steps": 4,
    "ttt_steps": 3,
    "held_out": 8,
    "eval_tokens": 16,
}


def log(line: str) -> None:
    print(f"[{time.monotonic() - START:7.1f} s] {line}", flush=True)


def general_flags(common: argparse.ArgumentParser) -> None:
    add = common.add_argument
    add(
        "--target",
        help="folder, .gguf file or hub id of the target (default: SmolLM2-135M-Instruct)",
    )
    add(
        "--target-name", help="what the head's config calls its target (default: the folder's name)"
    )
    add(
        "--output",
        type=Path,
        required=True,
        help="chats.npz, head/, pieces/ and training.json go here",
    )
    add(
        "--method",
        default="eagle3",
        choices=sorted(FORWARDS),
        help="eagle: EAGLE-1, with the target's whole vocabulary",
    )
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="the target's weights, and what everything is computed in; masters are float32",
    )
    add("--dry-run", action="store_true", help="a tiny random target, a minute on a CPU")
    add(
        "--max-minutes",
        type=float,
        default=25.0,
        help="wall-clock budget of the whole command; evaluation's share is kept back",
    )
    add("--evaluate-minutes", type=float, default=2.0)
    add("--seed", type=int, default=0)
    add("--show", type=int, default=3, help="examples to print")


def data_flags(common: argparse.ArgumentParser) -> None:
    add = common.add_argument_group("data").add_argument
    add("--generate-minutes", type=float, default=8.0)
    add(
        "--prompts",
        type=Path,
        action="append",
        default=[],
        help="jsonl of seed prompts ('question', 'prompt' or 'turns'); repeatable",
    )
    add("--num-slots", type=int, default=1024, help="rows that decode together")
    add("--prefill-rows", type=int, default=128)
    add("--max-len", type=int, default=512)
    add("--max-user-tokens", type=int, default=160)
    add("--max-answer-tokens", type=int, default=320)
    add("--max-chats", type=int, default=1_000_000)
    add(
        "--greedy-share",
        type=float,
        default=0.6,
        help="answers decoded greedily; the rest at temperatures 0.6 to 1",
    )
    add(
        "--opened-share",
        type=float,
        default=0.5,
        help="user's turns that begin with one of jaxspec's openings",
    )
    add(
        "--shard",
        default="0/1",
        help="i/n: of the prompts in files, take every n-th from the i-th on",
    )
    add(
        "--chats",
        type=Path,
        nargs="+",
        help="train: chats.npz of earlier runs, merged (default: OUTPUT/chats.npz)",
    )


def head_flags(common: argparse.ArgumentParser) -> None:
    add = common.add_argument_group("head").add_argument
    add(
        "--init",
        type=Path,
        help="continue from this head's weights; the vocabulary may differ, the MLP be wider",
    )
    add("--draft-vocab-size", type=int, default=12_000)
    add(
        "--aux-layers",
        type=int,
        nargs="+",
        help="boundary ids of the target's layers (default: 2, n // 2, n - 3)",
    )
    add("--intermediate-size", type=int, help="of the draft's MLP (default: the target's)")
    add("--norm-before-residual", action=argparse.BooleanOptionalAction, default=True)
    add("--fc-norm", action=argparse.BooleanOptionalAction, default=True)
    add("--norm-output", action=argparse.BooleanOptionalAction, default=True)


def training_flags(common: argparse.ArgumentParser) -> None:
    add = common.add_argument_group("training").add_argument
    add("--ttt-steps", type=int, default=5, help="draft steps of the training-time test")
    add("--decay", type=float, default=0.8, help="weight of each further draft step")
    add(
        "--argmax-weight",
        type=float,
        default=0.0,
        help="share of the loss on the target's first choice alone",
    )
    add(
        "--feature-weight",
        type=float,
        default=0.1,
        help="eagle: weight of the hidden state's smooth L1",
    )
    add(
        "--optimizer",
        default="adamw",
        choices=("adamw", "muon"),
        help="muon: for the matrices but lm_head",
    )
    add("--learning-rate", type=float, default=1e-3)
    add("--warmup-steps", type=int, default=200)
    add("--weight-decay", type=float, default=0.01)
    add("--clip", type=float, default=0.5, help="global norm of the gradient")
    add("--tokens-per-batch", type=int, default=16384, help="of one step, over all GPUs")
    add(
        "--accumulation",
        type=int,
        default=1,
        help="micro-batches of a step, one after the other: less memory",
    )
    add(
        "--keep-state",
        action="store_true",
        help="save the optimiser's state beside the head (OUTPUT/state)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from OUTPUT/state; the same curve, if --max-steps ends the run",
    )
    add(
        "--save-seconds",
        type=float,
        default=150.0,
        help="how often the head is saved and evaluated",
    )
    add(
        "--buckets",
        type=int,
        nargs="+",
        default=[256, 384, 512],
        help="sequence lengths that are compiled",
    )
    add("--max-steps", type=int, default=1_000_000)
    add("--held-out", type=int, default=512, help="chats kept for validation")
    add(
        "--remat",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="recompute logits in the backward pass",
    )


def evaluation_flags(common: argparse.ArgumentParser) -> None:
    add = common.add_argument_group("evaluation").add_argument
    add(
        "--eval-prompts",
        type=Path,
        help="jsonl in MT-bench's form; its 13-grams are kept out of the training prompts",
    )
    add("--eval-tokens", type=int, default=256)
    add("--num-speculative-tokens", type=int, default=3)
    add("--head", type=Path, help="evaluate: the head's folder (default: OUTPUT/head)")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(
        add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for add_flags in (general_flags, data_flags, head_flags, training_flags, evaluation_flags):
        add_flags(common)
    for name in ("all", "generate", "train", "evaluate"):
        commands.add_parser(
            name, parents=[common], formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
    about = commands.add_parser("card", help="HEAD/training.json -> HEAD/README.md")
    about.add_argument("head", type=Path)
    about.add_argument(
        "--evaluation",
        type=Path,
        action="append",
        default=[],
        help="an evaluation.json of `evaluate` to add to training.json",
    )
    about.add_argument(
        "--about-target", default="", help="what follows the target's name: its licence, its file"
    )
    about.add_argument("--licence", default="Apache-2.0", help="the head's")
    about.add_argument(
        "--note", action="append", default=[], help="a paragraph of the card; repeatable"
    )
    split = commands.add_parser("split", help="FILE -> FOLDER/FILE.000, ...")
    split.add_argument("file", type=Path)
    split.add_argument("folder", type=Path)
    join = commands.add_parser("join", help="FOLDER/FILE.000, ... -> FILE")
    join.add_argument("folder", type=Path)
    join.add_argument("file", type=Path)
    return top


def generation_config(args: argparse.Namespace) -> GenerationConfig:
    return GenerationConfig(
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


def shard(text: str) -> tuple[int, int]:
    """ "1/3" -> (1, 3)."""
    mine, slash, of = text.partition("/")
    if not (slash and mine.isdigit() and of.isdigit() and int(mine) < int(of)):
        raise ConfigError(f"--shard: expected i/n with i from 0 to n - 1, got {text!r}")
    return int(mine), int(of)


def head_config(args: argparse.Namespace) -> HeadConfig:
    return HeadConfig(
        method=args.method,
        draft_vocab_size=args.draft_vocab_size,
        intermediate_size=args.intermediate_size,
        aux_layers=tuple(args.aux_layers) if args.aux_layers else None,
        norm_before_residual=args.norm_before_residual,
        fc_norm=args.fc_norm,
        norm_output=args.norm_output,
        init=args.init,
        seed=args.seed,
    )


def train_config(args: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
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


def run_config(args: argparse.Namespace, evaluation: EvaluationConfig) -> RunConfig:
    return RunConfig(
        head_config(args),
        train_config(args),
        evaluation,
        held_out=args.held_out,
        max_steps=args.max_steps,
        save_seconds=args.save_seconds,
        keep_state=args.keep_state,
        resume=args.resume,
    )


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    with lasting_stdout(), errors_as_sentences():
        if args.command == "split":
            print(*split_file(args.file, args.folder, PIECE_BYTES), sep="\n")
        elif args.command == "join":
            join_file(args.folder, args.file)
        elif args.command == "card":
            write_card(
                args.head,
                args.evaluation,
                about_target=args.about_target,
                licence=args.licence,
                notes=args.note,
            )
        else:
            run(args)
    return 0


def run(args: argparse.Namespace) -> None:
    """The stages that a command is made of."""
    if args.dry_run:
        vars(args).update(DRY_RUN)
    eval_prompts = read_jsonl(args.eval_prompts) if args.eval_prompts else []
    measured = eval_prompts or (EVALUATION_PROMPTS if args.dry_run else ())
    evaluation = EvaluationConfig(tuple(measured), args.num_speculative_tokens, args.eval_tokens)
    log(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    target = (
        dry_target(args.dtype)
        if args.dry_run
        else load_chat_target(args.target, args.dtype, name=args.target_name)
    )
    log(f"target {target.name}: {target.cfg}")
    record = RunRecord(
        args.output / ("evaluation.json" if args.command == "evaluate" else "training.json"),
        sys.argv[1:],
        START,
    )
    if args.command in ("all", "generate"):
        write_chats(
            generation_config(args),
            target,
            args.output,
            prompt_files=args.prompts,
            shard=shard(args.shard),
            overlap=OverlapFilter(eval_prompts),
            minutes=args.generate_minutes,
            max_chats=args.max_chats,
            show=args.show,
            log=log,
        )
    if args.command in ("all", "train"):
        chats, about_chats = read_chats(args.chats or [args.output / CHATS], target.cfg.vocab_size)
        record.entries |= about_chats
        deadline = START + 60 * (args.max_minutes - args.evaluate_minutes)
        train_head(
            run_config(args, evaluation),
            target,
            chats,
            args.output,
            deadline=deadline,
            record=record,
            log=log,
        )
    if args.command == "evaluate":
        evaluate_head(
            evaluation,
            target,
            args.head or args.output / "head",
            args.method,
            record,
            log=log,
            show=args.show,
        )


if __name__ == "__main__":
    sys.exit(main())
