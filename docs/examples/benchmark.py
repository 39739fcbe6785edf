"""Compare speed with and without drafts: python docs/examples/benchmark.py [TARGET HEAD]."""

import sys

from jaxspec import LLM, SamplingParams

target, head = sys.argv[1:] or [None, "smollm2-135m-instruct-eagle3"]
llm = LLM(target, speculative_config={"model": head, "num_speculative_tokens": 3}, max_num_seqs=1)
params = SamplingParams(temperature=0, max_tokens=64)
questions = ("Give me three tips for good sleep.", "How does a rainbow form?")
chats = [[{"role": "user", "content": question}] for question in questions]
speeds = []
for each in (llm, llm.on_same_weights(speculative=False)):
    each.warmup_for(chats, [params] * len(chats))  # compile first
    each.generate(chats, params)
    times = each.timings
    speeds.append(times.num_output_tokens / (times.prefill_seconds + times.decode_seconds))
print(
    f"{speeds[0]:.1f} tokens/s with drafts, {speeds[1]:.1f} without: {speeds[0] / speeds[1]:.2f}x"
)
print(f"tokens a round: {llm.metrics.mean_acceptance_length:.2f}")
