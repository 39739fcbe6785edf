"""Print text as it grows: python docs/examples/stream.py [TARGET HEAD]."""

import sys

from jaxspec import LLM, SamplingParams

target, head = sys.argv[1:] or [None, "smollm2-135m-instruct-eagle3"]
llm = LLM(target, speculative_config={"model": head, "num_speculative_tokens": 3})
chat = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
for increment in llm.stream([chat], SamplingParams(temperature=0.7, seed=1, max_tokens=64)):
    print(increment.text, end="", flush=True)
print(f"\nfinished: {increment.finish_reason}")
