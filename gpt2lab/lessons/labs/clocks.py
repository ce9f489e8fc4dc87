"""What lesson 02 runs besides its own code: links and cores, wrong stopwatches, first iterations, a roofline."""

import time

import torch

from ...corpus import Batches, shakespeare
from ...machine.timing import alone, trials
from ...model import GPT2, PRESETS
from ...ranks import comm
from ...ranks.mesh import Mesh
from .instruments import seconds_of

SIZES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
PRINTED = {  # bytes a second, as a lecture quotes them
    "H100 NVL, pair of boards, 7.8 TB/s": 7.8e12,
    "NVLink 4, 18 links, 900 GB/s": 900e9,
    "PCIe 7.0 x16, 242 GB/s": 242e9,
    "Ethernet, 0.2 GB/s": 0.2e9,
}
DERIVED = {"InfiniBand (NVLink / 4.5)": 200e9}
LADDER = {
    "H100 NVL memory, one board": 3.9e12,
    "NVLink 4, both directions": 900e9,
    "PCIe 7.0 x16": 242e9,
    "Ethernet": 0.2e9,
}


def ping_pong(rank: int, world_size: int, size: int) -> list[tuple[float, float]]:
    """(start, end) of round trips of `size` bytes between two ranks."""
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(size, dtype=torch.uint8)

    def round_trip():
        if rank == 0:
            comm.send(x, axis, 1)
            comm.recv(x, axis, 1)
        else:
            comm.send(comm.recv(x, axis, 0), axis, 0)

    return trials(round_trip, count=9, ready=lambda: comm.barrier(axis))


def in_a_window(step, axis, length: float = 0.15) -> float:
    """Calls of `step` a second in a window common to all ranks; each goes on until it is over: none works alone."""
    step()
    begin = max(comm.gather_objects(time.perf_counter(), axis)) + 0.01
    count, now = 0.0, time.perf_counter()
    while now < begin + length:
        start = now
        step()
        now = time.perf_counter()
        count += max(min(now, begin + length) - max(start, begin), 0.0) / (now - start)
    return count / length


def step_times(rank, world_size, threads, count, touch=True, warm=True, rehearse=False) -> tuple[list, list]:
    """Seconds and losses of `count` training steps of nano.

    `touch`: gradients and both moments exist, and their pages are in memory, before the first step. `warm`: the threads
    of the pool have started. `rehearse`: a whole step of another model comes first.
    """
    torch.set_num_threads(threads)
    if rehearse:
        step_times(rank, world_size, threads, 1, touch=False, warm=False)
    batches, model = Batches(shakespeare(), rows=2, length=32), GPT2(PRESETS["nano"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for p in model.parameters() if touch else ():
        p.grad = torch.zeros_like(p)
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    if warm:
        x = torch.randn(256, 256)
        for _ in range(20):
            x = torch.tanh(x @ x)
    times, losses = [], []
    for step in range(count):
        batch = batches.at(step)
        start = time.perf_counter()
        loss = model.loss(model(batch.tokens), batch.targets) / batch.total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return times, losses


# ---- a roofline


def roofline() -> dict[str, list[tuple[float, float]]]:
    """(operations a byte, operations a second) of one core: additions of vectors, and products of square matrices.

    A product of n x n reads or writes 3 n^2 numbers for 2 n^3 operations, an addition 3 n numbers for n.
    """

    def rate(call, operations: float) -> float:
        repeats = max(1, int(2e6 / operations))
        many = lambda: [call() for _ in range(repeats)]
        call()
        return operations * repeats / min(seconds_of(many, 7, warmup=0))

    found = {"vectors added": [], "matrices multiplied": []}
    for n in (16, 256, 4096, 1 << 16, 1 << 24):
        a, b, c = torch.ones(3, n)
        found["vectors added"].append((1 / 12, rate(lambda a=a, b=b, c=c: torch.add(a, b, out=c), n)))
    for n in (4, 8, 16, 32, 64, 128, 256, 512):
        a, b, c = torch.randn(3, n, n)
        point = n / 6, rate(lambda a=a, b=b, c=c: torch.mm(a, b, out=c), 2 * n**3)
        found["matrices multiplied"].append(point)
    return found


# ---- a GPU's streams


def streams(n: int = 8192) -> tuple:
    """Whether a product and a copy give the same on two CUDA streams as on one, and the times of both."""
    X, main = torch.randn(n, n, device="cuda"), torch.cuda.current_stream()
    Y = torch.randn(n, n).pin_memory()  # 1: only from pinned memory can a copy run by itself
    lanes = torch.cuda.Stream(), torch.cuda.Stream()

    def sequential():
        return X @ X, Y.to("cuda", non_blocking=True)

    def overlapped():
        results = []
        for stream, work in zip(lanes, (lambda: X @ X, lambda: Y.to("cuda", non_blocking=True)), strict=True):
            stream.wait_stream(main)  # 2: X has to be there first
            with torch.cuda.stream(stream):
                results.append(work())
        for stream, result in zip(lanes, results, strict=True):
            main.wait_stream(stream)
            result.record_stream(main)  # 3: this memory is in use on the main stream too
        return tuple(results)

    same = all(torch.equal(a, b) for a, b in zip(sequential(), overlapped(), strict=True))
    return same, alone(trials(sequential)), alone(trials(overlapped))  # `trials` synchronises
