"""Look at how a head of your own is read: python docs/examples/own_head.py [TARGET HEAD].

The method, the layers and the norms come from the head's files; a WARNING says what was guessed.
If few drafts are accepted, `jaxspec doctor TARGET HEAD` says which reading is accepted more.
"""

import logging
import sys

from jaxspec import LLM, SamplingParams

logging.basicConfig(level=logging.WARNING)
target, head = sys.argv[1:] or [None, "smollm2-135m-instruct-eagle"]
llm = LLM(target, speculative_config={"model": head, "num_speculative_tokens": 3})
print(llm.describe())
question = [{"role": "user", "content": "Why is the sky blue?"}]
outputs = llm.chat(question, SamplingParams(temperature=0, max_tokens=48))
rates = ", ".join(f"{rate:.2f}" for rate in llm.metrics.per_position_acceptance)
print(f"{outputs[0].text}\naccepted at each position: {rates}")
