"""Benchmarks: stock and ours side by side, in one run. ``python -m benchmarks --help``."""
