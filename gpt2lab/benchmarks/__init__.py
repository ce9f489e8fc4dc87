"""Benchmarks: ours against a rival in the same run. Each file has `add_arguments(parser)` and `run(args)`."""
