"""Train an EAGLE-3, DSpark, DFlash or EAGLE-1 head for a target on the target's own text.

With a GPU:      jaxspec train all --output my-head --prompts questions.jsonl
On a CPU:        jaxspec train all --dry-run --output /tmp/dry

Training uses every visible GPU. To write more text, start one `generate` on each GPU
(CUDA_VISIBLE_DEVICES=i, --seed i, --shard i/n, --output gi), then
`train --chats g0/chats.npz --chats g1/chats.npz`. --resume continues a run of fixed length
(--max-steps).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import typer

from jaxspec.config import ConfigError
from jaxspec.loading import keep_compiled_programs
from jaxspec.loading.new_file import write_text
from jaxspec.tools.cli import commands, one_of, option
from jaxspec.tools.flags import Flag, Given, flag, given_of
from jaxspec.tools.prompts import dataset_name, read_prompts
from jaxspec.training.averaging import average_heads
from jaxspec.training.card import write_card
from jaxspec.training.chat_files import CHATS, read_chats, write_chats
from jaxspec.training.chat_target import ChatTarget, load_chat_target
from jaxspec.training.checkpoint import PIECE_BYTES, join_file, split_file
from jaxspec.training.config import TrainConfig, check_seed
from jaxspec.training.data import OverlapFilter
from jaxspec.training.dry_run import EVALUATION_PROMPTS, dry_target
from jaxspec.training.evaluation import EvaluationConfig, evaluate_head
from jaxspec.training.generation import GenerationConfig
from jaxspec.training.heads import HeadConfig
from jaxspec.training.long_prompts import LongPromptConfig, long_prompts, read_texts
from jaxspec.training.methods import METHODS
from jaxspec.training.run import RunConfig, train_head
from jaxspec.training.run_record import RunRecord
from jaxspec.training.task_prompts import TaskPromptConfig, read_tasks, task_prompts

DTYPES = ("bfloat16", "float32")
# The sizes of a dry run: every code path, in seconds on a CPU.
DRY_GENERATION = {
    "num_slots": 16,
    "prefill_rows": 8,
    "max_len": 64,
    "block_size": 16,
    "max_user_tokens": 12,
    "max_answer_tokens": 24,
}
DRY_CHATS = 48
DRY_HEAD = {"draft_vocab_size": 96, "aux_layers": (1, 2, 3), "intermediate_size": None}
DRY_TRAINING = {
    "buckets": (48,),
    "tokens_per_batch": 192,
    "warmup_steps": 4,
    "num_steps": 3,
    "log_every": 4,
}
DRY_RUN = {"max_steps": 12, "held_out": 8}
DRY_EVALUATION = {"max_tokens": 16}


@dataclass(frozen=True)
class StageOptions:
    """The target, the folder of the results, and the time that a command may take."""

    output: Path | None = flag(
        None, "The folder that gets chats.npz, head/, pieces/ and training.json; required."
    )
    target: str | None = flag(
        None, "Folder, .gguf file or hub id of the target. [default: SmolLM2-135M-Instruct]"
    )
    target_name: str | None = flag(
        None, "What the head's config calls its target. [default: the folder's name]"
    )
    method: str = flag(
        "eagle3", "eagle3, dspark, dflash, or eagle: EAGLE-1, with the target's whole vocabulary."
    )
    dtype: str = flag(
        "bfloat16",
        "bfloat16 or float32: of the target's weights and of the arithmetic; masters are float32.",
    )
    dry_run: bool = flag(False, "Use a tiny random target: a minute on a CPU.")
    max_minutes: float = flag(
        25.0, "Wall clock of the whole command; evaluation's share is kept back."
    )
    evaluate_minutes: float = flag(2.0, "That share.")
    seed: int = flag(0, "Seed of everything that is drawn.")
    show: int = flag(3, "Examples to print.")

    def check(self) -> Path:
        """Return the output folder; ConfigError for a wrong option."""
        if self.output is None:
            raise ConfigError("--output: expected a folder, got none")
        one_of("--method", self.method, sorted(METHODS))
        one_of("--dtype", self.dtype, DTYPES)
        check_seed(self.seed)
        if not self.max_minutes >= 0.0:
            raise ConfigError(f"--max-minutes: expected a number from 0, got {self.max_minutes}")
        if not 0.0 <= self.evaluate_minutes < math.inf:
            raise ConfigError(
                f"--evaluate-minutes: expected a finite number from 0, got {self.evaluate_minutes}"
            )
        return self.output

    def load(self) -> ChatTarget:
        """Return the target that is trained for."""
        if self.dry_run:
            return dry_target(self.dtype)
        return load_chat_target(self.target, self.dtype, name=self.target_name)


@dataclass(frozen=True)
class DataOptions:
    """The chats that are written and trained on."""

    generate_minutes: float = flag(8.0, "Wall clock of writing chats.")
    prompts: list[str] | None = flag(
        None,
        "JSON Lines of seed prompts ('question', 'prompt' or 'turns') or a hub id; "
        "may be repeated.",
    )
    max_chats: int = flag(1_000_000, "At most this many chats.")
    shard: str = flag("0/1", "i/n: of the prompts in files, every n-th from the i-th on.")
    chats: list[Path] | None = flag(
        None, "For train: chats.npz of earlier runs; may be repeated. [default: OUTPUT/chats.npz]"
    )

    def check(self) -> None:
        """Raise ConfigError for a wrong option."""
        if not 0.0 < self.generate_minutes < math.inf:
            raise ConfigError(
                f"--generate-minutes: expected a finite number above 0, got {self.generate_minutes}"
            )
        if self.max_chats < 1:
            raise ConfigError(f"--max-chats: expected at least 1, got {self.max_chats}")
        self.place()

    def place(self) -> tuple[int, int]:
        """Return (i, n) of the shard; ConfigError for anything else."""
        mine, slash, of = self.shard.partition("/")
        are_numbers = all(n.isascii() and n.isdecimal() for n in (mine, of))
        if not (slash and are_numbers and int(mine) < int(of)):
            raise ConfigError(f"--shard: expected i/n with i from 0 to n - 1, got {self.shard!r}")
        return int(mine), int(of)


@dataclass(frozen=True)
class EvaluationOptions:
    """The prompts that the head is measured on, and those that chats keep out besides."""

    eval_prompts: str | None = flag(
        None,
        "JSON Lines in MT-bench's form or a hub id. Writing chats leaves out prompts that share "
        "13 words in a row with one of them, or repeat a shorter one.",
    )
    keep_out: list[str] | None = flag(
        None,
        "JSON Lines or a hub id of other prompts that are left out likewise, such as those that "
        "choose among heads; may be repeated.",
    )
    head: Path | None = flag(None, "For evaluate: the head's folder. [default: OUTPUT/head]")

    def read(self) -> list[str]:
        """Return the prompts, none without --eval-prompts."""
        name = self.eval_prompts
        return [] if name is None else read_prompts(name, "--eval-prompts")

    def kept_out(self, measured: list[str]) -> OverlapFilter:
        """Return the filter that keeps out `measured`, which read() returned, and --keep-out's."""
        prompts, names = list(measured), [] if self.name is None else [self.name]
        for name in self.keep_out or ():
            prompts += read_prompts(name, "--keep-out")
            names.append(dataset_name(name))
        return OverlapFilter(prompts, sources=names)

    @property
    def name(self) -> str | None:
        """What the record calls the prompts; None without --eval-prompts."""
        return None if self.eval_prompts is None else dataset_name(self.eval_prompts)


Generation = Annotated[
    Given,
    given_of(
        GenerationConfig,
        "num_slots",
        "prefill_rows",
        "max_len",
        "max_user_tokens",
        "max_answer_tokens",
        "greedy_share",
        "opened_share",
        "file_share",
        "chat_turns",
    ),
]
Head = Annotated[
    Given,
    given_of(
        HeadConfig,
        "init",
        "draft_vocab_size",
        "aux_layers",
        "intermediate_size",
        "norm_before_residual",
        "fc_norm",
        "norm_output",
        "block_drafts",
        "num_layers",
        "num_kv_heads",
        "window",
        "markov_rank",
        "markov_kind",
        "confidence",
        "mask_token_id",
    ),
]
Training = Annotated[
    Given,
    given_of(
        TrainConfig,
        "decay",
        "argmax_weight",
        "feature_weight",
        "overlap_weight",
        "confidence_weight",
        "tokens_per_block",
        "pack",
        "optimizer",
        "learning_rate",
        "warmup_steps",
        "weight_decay",
        "clip",
        "tokens_per_batch",
        "accumulation",
        "buckets",
        "remat",
        num_steps=Flag(names=("--ttt-steps",)),
    ),
]
Run = Annotated[
    Given,
    given_of(
        RunConfig,
        "max_steps",
        "held_out",
        "data_parallel_size",
        "save_seconds",
        "keep_state",
        "resume",
    ),
]
Evaluation = Annotated[
    Given,
    given_of(
        EvaluationConfig,
        "num_speculative_tokens",
        max_tokens=Flag(names=("--eval-tokens",)),
        max_num_seqs=Flag(names=("--eval-seqs",)),
    ),
]


def stage(name: str, summary: str) -> Callable[..., None]:
    """Return the main function of a stage. All stages take the same flags."""

    def main(
        options: StageOptions,
        data: DataOptions,
        generation: Generation,
        head: Head,
        training: Training,
        run: Run,
        evaluating: EvaluationOptions,
        evaluation: Evaluation,
    ) -> None:
        output, prompts = options.check(), evaluating.read()
        if name in ("all", "generate"):
            data.check()
        if options.dry_run:
            generation, head = {**generation, **DRY_GENERATION}, {**head, **DRY_HEAD}
            training, run = {**training, **DRY_TRAINING}, {**run, **DRY_RUN}
            evaluation = {**evaluation, **DRY_EVALUATION}
        measured = prompts or (EVALUATION_PROMPTS if options.dry_run else ())
        seed = options.seed
        run_stage(
            name,
            options,
            data,
            output,
            generation=GenerationConfig(**generation, seed=seed),
            run=RunConfig(
                HeadConfig(**head, method=options.method, seed=seed),
                TrainConfig(**training, seed=seed),
                EvaluationConfig(tuple(measured), evaluating.name, **evaluation),
                **run,
            ),
            head=evaluating.head or output / "head",
            kept_out=evaluating.kept_out(prompts),
        )

    main.__doc__ = summary
    return main


def run_stage(
    name: str,
    options: StageOptions,
    data: DataOptions,
    output: Path,
    *,
    generation: GenerationConfig,
    run: RunConfig,
    head: Path,
    kept_out: OverlapFilter,
) -> None:
    """Run the stages that a command is made of.

    head: the folder that is evaluated. kept_out: removes the prompts that heads are measured on or
        chosen by.
    """
    begun = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - begun:7.1f} s] {line}", flush=True)

    keep_compiled_programs()
    log(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    target = options.load()
    log(f"target {target.name}: {target.cfg}")
    record = RunRecord(
        output / ("evaluation.json" if name == "evaluate" else "training.json"),
        sys.argv[1:],
        begun,
    )
    if name in ("all", "generate"):
        write_chats(
            generation,
            target,
            output,
            prompt_sets=data.prompts or (),
            shard=data.place(),
            overlap=kept_out,
            minutes=data.generate_minutes,
            max_chats=DRY_CHATS if options.dry_run else data.max_chats,
            show=options.show,
            log=log,
        )
    if name in ("all", "train"):
        chats, about_chats = read_chats(data.chats or [output / CHATS], target.cfg.vocab_size)
        record.entries |= about_chats
        deadline = begun + 60 * (options.max_minutes - options.evaluate_minutes)
        train_head(run, target, chats, output, deadline=deadline, record=record, log=log)
    if name == "evaluate":
        evaluate_head(
            run.evaluation, target, head, options.method, record, log=log, show=options.show
        )


def card(
    head: Annotated[Path, typer.Argument(help="A folder with training.json.")],
    evaluation: Annotated[
        list[Path] | None,
        option("An evaluation.json of `evaluate` to add to training.json; may be repeated."),
    ] = None,
    acceptance: Annotated[
        Path | None,
        option("A JSON file of `jaxspec acceptance`: its lengths join training.json."),
    ] = None,
    about_target: Annotated[
        str, option("What follows the target's name: its licence, its file.")
    ] = "",
    licence: Annotated[str, option("The head's.")] = "Apache-2.0",
    note: Annotated[list[str] | None, option("A paragraph of the card; may be repeated.")] = None,
) -> None:
    """Write HEAD/README.md from HEAD/training.json."""
    write_card(
        head,
        evaluation or (),
        acceptance,
        about_target=about_target,
        licence=licence,
        notes=note or (),
    )


LongPrompts = Annotated[Given, given_of(LongPromptConfig, "count", "lengths", "seed")]
TaskPrompts = Annotated[Given, given_of(TaskPromptConfig, "count", "seed")]


def write_long_prompts(
    output: Annotated[Path, typer.Argument(help="The JSON Lines file to write.")],
    texts: Annotated[list[Path], typer.Argument(help="Folders of code and prose.")],
    settings: LongPrompts,
) -> None:
    """Write long prompts, for --prompts, from the code and prose under some folders."""
    _write_prompts(output, long_prompts(LongPromptConfig(**settings), read_texts(texts)))


def write_task_prompts(
    output: Annotated[Path, typer.Argument(help="The JSON Lines file to write.")],
    settings: TaskPrompts,
) -> None:
    """Write short prompts of many kinds, for --prompts."""
    _write_prompts(output, task_prompts(TaskPromptConfig(**settings), read_tasks()))


def _write_prompts(output: Path, prompts: Iterable[str]) -> None:
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    write_text(output, "".join(lines))
    print(f"{output}: {len(lines)} prompts, {sum(map(len, lines))} characters")


def average(
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    heads: Annotated[
        list[Path], typer.Argument(help="Heads of one config and one vocabulary, two or more.")
    ],
) -> None:
    """Write a head whose weights are the means of those of several heads."""
    average_heads(out, heads)
    print(f"{out}: the means of {len(heads)} heads")


def split(file: Path, folder: Path) -> None:
    """Cut FILE into FOLDER/FILE.000, ..."""
    print(*split_file(file, folder, PIECE_BYTES), sep="\n")


def join(folder: Path, file: Path) -> None:
    """Put FOLDER/FILE.000, ... together as FILE."""
    join_file(folder, file)


app = commands(
    {
        "all": stage("all", "Generate chats, train on them and evaluate, in --max-minutes."),
        "generate": stage("generate", "Write the chats only (OUTPUT/chats.npz)."),
        "train": stage("train", "Train on one or more chats.npz, and evaluate."),
        "evaluate": stage("evaluate", "Measure a head's acceptance in the engine."),
        "long-prompts": write_long_prompts,
        "task-prompts": write_task_prompts,
        "average": average,
        "card": card,
        "split": split,
        "join": join,
    },
    help=__doc__,
)
