"""The host's side of generation: requests in, text out. No model mathematics."""
