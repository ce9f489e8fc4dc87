"""Checkpoints and published weights: written and read on any mesh, complete or not at all.

checkpoint    a run's folder of checkpoints: written, found, resumed on another mesh
writing       each rank writes its own boxes of every tensor, and one of them gives the folder its name
reading       digests first, then the boxes that a rank needs; nothing that is read can run
huggingface   the published weights, in and out, as `transformers` reads them
"""
