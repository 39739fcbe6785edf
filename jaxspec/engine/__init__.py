"""The host's side of generation: requests in, text out. No model mathematics.

driver               calls of any thread share one engine
replicas             several engines behind one queue
engine               the loop: schedule, dispatch, read results; the only place that waits
scheduler            admission, prefill chunks, reservation, preemption; no jax
request              a request while it runs
runner               what the scheduler decides: chooses programs, fills their arrays, dispatches
resident_state       the resident state, and all that uses the devices, in each process
request_rows         requests to NumPy rows, for slots and prefill
draft_choice         how many drafts requests and rounds have, by acceptance and cost
round_configs        the static description of each program
pass_bytes           the bytes of a target's weights that a pass reads on one device
totals               totals over the running requests, from which programs are chosen
variants             which programs are compiled, and which of them serve given features
program_choice       which program serves a batch, on the state as it is
rehearsal            compiles all that an admission will run
background           runs compilations in threads: while rounds run, and side by side in warm-up
background_compiler  what may run without a compilation, and compilation while others run
first_logits         whether the logits of the first prefill overflowed
memory               the sizes of the KV cache's pools
prefill_tiles        the arrays of a prefill call, on the host
block_tables         block tables of the running requests, on the host and on the device
buckets              the few shapes that programs are compiled for
warmup_shapes        which features and shapes requests will need
warmup_run           compiles given features and shapes, and runs each program once
inputs               prompt types
input_processor      prompts and parameters to checked requests
detokenizer          text as it grows, and stop strings
outputs              RequestOutput, CompletionOutput, Increment, EngineError
output_processor     generated tokens to increments and outputs
metrics              acceptance counts and latencies, as vLLM defines them
progress             bars of finished requests and compiled programs on standard error
"""
