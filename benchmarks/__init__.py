"""Measured comparisons; `python -m benchmarks` runs them."""
