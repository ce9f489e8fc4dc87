"""Benchmarks: ours against a rival in the same run. `race` says how, `races` with which options; the rest is who."""
