"""Ours beside the peers' way of the same step, in one run on one machine: `python -m benchmarks`."""
