"""From logits to tokens: a request's parameters, their rows on the device, logits processors, random streams, logprobs."""
