"""Benchmarks: named dimensions with random weights, the floor of a round, and timing.

The command lines are scripts/bench.py (whole rounds), bench_kernels.py (single ops),
bench_throughput.py (an engine under load) and plot_roofline.py (the picture).
"""
