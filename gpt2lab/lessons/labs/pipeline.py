"""What lesson 07 measures besides its own pipeline: micro-batches' speed, and what autograd keeps of a stage."""

import time

import torch

from ...model import GPT2, GPT2Config


def rows_a_second(rows: int = 32, trials: int = 15) -> dict[int, float]:
    """Rows a second of one block's forward, by the number of micro-batches that `rows` are cut into: best of trials."""
    block = GPT2(GPT2Config(vocab_size=8, n_positions=16, n_layer=1, n_head=4, n_embd=128)).float().h["0"]
    speed = {}
    with torch.no_grad():
        for micros in (1, 2, 4, 8, 16, 32):
            x, best = torch.randn(rows // micros, 16, 128, dtype=torch.float32), float("inf")
            for _ in range(trials):
                begin = time.perf_counter()
                block(x, torch.arange(16))
                best = min(best, time.perf_counter() - begin)
            speed[micros] = rows / micros / best
    return speed


def bytes_kept(model: GPT2, forward) -> int:
    """Bytes that autograd keeps of `forward()` until its backward, weights left out."""
    kept, weights = {}, {p.data_ptr() for p in model.parameters()}

    def note(t):
        if t.data_ptr() not in weights:
            kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        forward()
    return sum(kept.values())
