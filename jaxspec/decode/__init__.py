"""The device's side of generation: prefill and the round, and the programs that they compile to."""
