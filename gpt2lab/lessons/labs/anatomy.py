"""What lesson 01 runs on GPT-2 besides its own code: memory, speed, tokenising, decoding and files, measured."""

import tempfile
import time
import tracemalloc
from pathlib import Path

import torch

from ...corpus import encoding, shakespeare
from ...corpus.shards import Shard, tokenise, write_shard
from ...generate import KVCache, next_logits
from ...model import GPT2, GPT2Config
from .instruments import kept_for_backward
from .llmc_files import read_debug, read_weights, write_debug, write_weights

# ---- activations


def saved_bytes(model: GPT2, batch) -> int:
    """Bytes that forward saves for backward, parameters not counted: torch is asked for each tensor."""
    forward = lambda: model.loss(model(batch.tokens), batch.targets)
    return sum(kept_for_backward(forward, model.parameters())[1].values())


def activation_bytes(config: GPT2Config, B: int, T: int, recompute: bool = False) -> int:
    """Bytes that forward saves, by formula: layers, head and loss in float32, token numbers in int64."""
    L, C, H, V = config.n_layer, config.n_embd, config.n_head, config.vocab_size
    layers = L * B * T * C if recompute else L * (16 * B * T * C + 4 * B * T + B * H * T)
    head = 2 * B * T * C + 2 * B * T + B * T * V
    return 4 * (layers + head + 1) + 8 * (2 * B * T + T)


# ---- tokens


def tokenised(copies: int) -> tuple[float, float, bool]:
    """Peak MB of Python's memory while `copies` copies of a text become a list and a shard, and whether both agree."""
    text = encoding().decode(shakespeare()[:30_000].tolist()) + "\n"
    parts = (text[i : i + 4096] for _ in range(copies) for i in range(0, len(text), 4096))
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        shard = write_shard(Path(folder, "shard.bin"), tokenise(parts))
        stream = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tracemalloc.start()
        whole = encoding().encode(text * copies)
        listed = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return listed / 1e6, stream / 1e6, whole == shard[:].tolist()


# ---- decoding


def per_token(config: GPT2Config, prompt: list[int], cached: bool) -> list[float]:
    """Milliseconds for each of 100 new tokens, the fastest of four runs."""

    def once():
        rows, kept, times = [list(prompt)], KVCache(128) if cached else None, []
        for _ in range(100):
            start = time.perf_counter()
            rows[0].append(int(next_logits(model, rows, kept).argmax()))
            times.append(1000 * (time.perf_counter() - start))
        return times

    model = GPT2(config)
    return [min(trials) for trials in zip(*(once() for _ in range(4)), strict=True)]


# ---- files


def refused(read, path: Path, offset: int) -> str:
    """What `read(path)` says after the number at this place of the header has been changed; then it is put back."""
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 * offset] + (7).to_bytes(4, "little") + whole[4 * offset + 4 :])
    try:
        read(path)
        return "was read"
    except ValueError as error:
        return str(error).replace(str(path), path.name).split(". ")[0]
    finally:
        path.write_bytes(whole)


def files(model: GPT2, batch) -> dict[str, object]:
    """llm.c's weights and debug state of a float32 model: sizes, what comes back, and what is refused."""
    logits = model(batch.tokens)
    loss = model.loss(logits, batch.targets) / batch.total
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        weights, state, shard = (Path(folder, f"{name}.bin") for name in ("nano", "state", "tokens"))
        write_weights(model, weights)
        write_debug(state, model.config, batch.tokens, batch.targets, logits, loss.item(), grads)
        write_shard(shard, [[1, 2, 3]])
        again, back = read_weights(weights), read_debug(state, model.config)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        kept = all(torch.equal(back[4][n], g) for n, g in grads.items()) and torch.equal(back[2], logits)
        return {
            "bytes": weights.stat().st_size,
            "weights, bit for bit": same,
            "logits and gradients, bit for bit": kept,
            "weights, wrong magic": refused(read_weights, weights, 0),
            "weights, wrong version": refused(read_weights, weights, 1),
            "debug state, wrong magic": refused(lambda path: read_debug(path, model.config), state, 0),
            "debug state, wrong version": refused(lambda path: read_debug(path, model.config), state, 1),
            "shard, wrong magic": refused(Shard, shard, 0),
            "shard, wrong size": refused(Shard, shard, 2),
        }
