"""From logits to tokens.

params       SamplingParams: how a request is sampled, and its validation
limits       how much one request may ask for
processors/  logits processors: one file for each feature of SamplingParams
rows         a request's parameters as rows of a SamplingState
state        SamplingState on the device, random streams, Gumbel-max
logits       logits processing, row by row of the verify window
loop_rows    the results of a loop's steps, which kernels write
logprobs     log-probabilities of tokens, on the device and as dictionaries
synthetic    acceptance schedules of the synthetic rule
"""
