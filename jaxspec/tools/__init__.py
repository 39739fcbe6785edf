"""The parts that the scripts share.

cli             main functions as programs, and errors as one sentence
lasting_stdout  standard output that a run outlasts
flags           flags from the fields of dataclasses
report          tables and JSON
prompts         prompts from files and data sets
losslessness    where two decodings of a prompt part, and how near to a tie the target was
measurements    recorded measurements as tables of a page
known_models    config.json of common models, by hub id
memory_plan     what a target and a draft take of a GPU, from their configs alone
acceptance/     acceptance by round: expected, recorded, summarised, shown
benchmark/      named dimensions, cases, lower bounds, timing
"""
