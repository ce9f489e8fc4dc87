"""What is written to disk and read back: on any mesh, whole or not at all.

checkpoint    a run's folder of checkpoints: written, found again, resumed on another mesh
sharded       each rank writes its own boxes of every tensor
state         state.json: the step, and a digest of every file and of itself
index         torch's list of tensors, read without running what a file says
boxes         where a rank's piece lies in the whole tensor
huggingface   the published weights, in and out, as `transformers` reads them
llmc          the same model as llm.c reads it
"""
