"""Benchmarks: named dimensions with random weights, the least that a round must move and compute, and how either is timed.

scripts/bench.py (whole rounds) and scripts/bench_kernels.py (single ops) are the command lines.
"""
