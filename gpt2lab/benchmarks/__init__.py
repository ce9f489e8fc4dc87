"""Benchmarks: ours against a rival in the same run. Each file has `run(args)`; `races` has their options."""
