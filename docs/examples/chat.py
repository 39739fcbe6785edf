"""Chat with a model: python docs/examples/chat.py [TARGET HEAD]."""

import sys

from jaxspec import LLM, SamplingParams

target, head = sys.argv[1:] or [None, "smollm2-135m-instruct-eagle3"]
llm = LLM(target, speculative_config={"model": head, "num_speculative_tokens": 3})
chat = [{"role": "user", "content": "Name three primary colours."}]
for question in (None, "Which two of them make green?"):
    if question:
        chat.append({"role": "user", "content": question})
    (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=48))
    print(f"{chat[-1]['content']}\n  {output.text}")
    chat.append({"role": "assistant", "content": output.text})
print(f"tokens a round: {llm.metrics.mean_acceptance_length:.2f}")
