"""Checkpoints and published weights: written and read on any mesh, complete or not at all.

checkpoint    a run's folder of checkpoints: written, found, resumed on another mesh
sharded       each rank writes its own boxes of every tensor
state         state.json: the step, and a digest of every file and of itself
index         torch's list of tensors, read without running what a file says
boxes         where a rank's part of a parameter is in the whole tensor
huggingface   the published weights, in and out, as `transformers` reads them
llmc          the same model as llm.c reads it
"""
