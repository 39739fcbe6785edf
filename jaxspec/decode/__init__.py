"""The device's side of generation: prefill, the round, and the programs that they compile to.

state           DecodeState: what requests carry from round to round
prefill         chunks of prompts through target and draft together
round           propose, verify, commit; plain decoding is a round with K = 0
adaptive        how many drafts a request's acceptance so far makes worthwhile
fallback        drafts looked up in the text, for requests whose head does not pay
verify          the target's pass over [next token, drafts], and rejection sampling
row_budget      the requests that take part in a verify pass of few rows
slots           small programs that put requests into slots of the state, move and clear them
packed          small arrays of the host that reach a program in one copy
spread          a program on several devices, and how they share its arrays
mailboxes       the memory that devices write to each other
kept_jit        jax.jit, with compiled programs from disk
programs        compilation modes: one program per round, one per draft step, or none
several_rounds  several rounds as one program
"""
