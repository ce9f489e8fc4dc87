"""Pipeline parallelism: layers in stages on several ranks; micro-batches follow each other through them.

engine           runs any schedule of `gpt2lab.schedules` on a rank
step             one training step: what is held between forward and backward, operation by operation
stages           which layers are on which stage, and which parameters two stages hold
mailbox          messages between stages, posted so that ranks cannot deadlock
split_backward   the two halves of a backward: the input's gradient, then the weights'
token_slices     TeraPipe: slices of a sequence, with the keys and values of earlier ones
generate         texts through a pipeline
"""
