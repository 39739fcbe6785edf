"""From logits to tokens.

params     SamplingParams: what a request asks for, and its validation
rows       a request's parameters as rows of a SamplingState
state      SamplingState on the device, random streams, Gumbel-max
logits     logits processing, row by row of the verify window
logprobs   log-probabilities of tokens, on the device and as dictionaries
synthetic  acceptance schedules of the synthetic rule
"""
