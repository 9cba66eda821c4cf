"""Benchmarks of speed and memory. Timings are noisy, so results are ratios measured in interleaved rounds."""
