"""Benchmarks: named dimensions with random weights, the least that a round must move and compute, and how either is timed.

The command lines: scripts/bench.py (whole rounds), bench_kernels.py (single ops), bench_throughput.py (an engine under load) and
plot_roofline.py (the picture).
"""
