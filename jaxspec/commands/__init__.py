"""The sub-commands of `jaxspec`, a module each.

program     the command itself: its sub-commands by name, and --version
generate    generate offline, with speculation and without
bench       time rounds
throughput  run the engine under load
train       train a draft head
acceptance  measure acceptance, and compare it with what theory expects
doctor      find out why a head's drafts are rejected
plan        plan the memory of a target and a draft on a GPU
convert     quantise a checkpoint

A module has `app`, its command line, and a line in COMMANDS of `program`.
"""
