"""Benchmarks: ratios measured in one run, interleaved. Never tests: timings are noisy."""
