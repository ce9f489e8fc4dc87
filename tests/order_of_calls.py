"""The order in which each rank posts calls, computes, and awaits them, as text: one line for each rank of a plan.

`+all_reduce.dp` is a call of an axis that begins (of a message with the position of the other rank: `+send.pp>1`),
`-all_reduce.dp.1184` one that is over, with the bytes this rank sent, and `12` are twelve matrix products.
"""

from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from planting import planted
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab import Ranks
from gpt2lab.compositions import PAIRS, WITH_EXPERTS
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.processes import status_board
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
SIZES = 7, 11  # rows and tokens of the batch: nothing divides


class Products(TorchDispatchMode):
    """Counts the matrix products of this thread into a list."""

    def __init__(self, found: list):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in PRODUCTS:
            if not self.found or not isinstance(self.found[-1], int):
                self.found.append(0)
            self.found[-1] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded():
    """The list into which everything inside the block is written, in order."""
    found, ended = [], 0
    comm.clear_log()

    def over():
        nonlocal ended
        for event in list(comm.log)[ended:]:
            found.append(f"-{event.op}.{event.axis}.{event.bytes}")
        ended = len(comm.log)

    def begins(right):
        def announce(channel, number, signature, axis_name, peers, *agree):
            over()
            op, *rest = signature.split()
            peer = f">{peers[0]}" if op in ("send", "recv") else ""
            found.append(f"+{op}.{axis_name}{peer}")
            return right(channel, number, signature, axis_name, peers, *agree)

        return announce

    def ends(right):
        def leave(*args):
            right(*args)
            over()

        return leave

    with planted(status_board, "announce", begins), planted(status_board, "leave", ends), Products(found):
        yield found
    over()


def of_a_step(rank, world_size, plan: str, config) -> str:
    """The order of calls of one step (of an asynchronous plan: three) on this rank."""
    trainer = trainer_by(plan, config, dtype=torch.float32)
    batches = [example_batch(config, *SIZES)] * (3 if trainer.parallel.plan.asynchronous else 1)
    trainer.stream(batches)
    with recorded() as found:
        trainer.stream(batches)
    return " ".join(shortened(list(map(str, found))))


def shortened(words: list[str]) -> list[str]:
    """Repetitions of up to 60 words written once: `3x( ... )`."""
    out, i = [], 0
    while i < len(words):
        best = (0, 1, 1)
        for width in range(1, 61):
            times = 1
            while words[i + times * width : i + (times + 1) * width] == words[i : i + width]:
                times += 1
            best = max(best, ((times - 1) * width, width, times), key=lambda b: b[0])
        saved, width, times = best
        inner = words[i : i + width]
        out += [f"{times}x(", *inner, ")"] if saved else inner
        i += width * times
    return out


SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8, window=3)
DEEP = GPT2Config(vocab_size=37, n_positions=16, n_layer=6, n_head=2, n_embd=8)  # for stages
TABLE = Path(__file__).with_suffix(".txt")
OF_SMALL = """
    dp=2 dp=2,bucket=1 dp=2,micro=2,zero=1 dp=2,zero=2 dp=2,zero=3 dp=2,data=naive dp=2,data=servers
    dp=4,zero=3,shard=2 tp=2 tp=2,sp=on cp=2 cp=2,exchange=ring,layout=zigzag cp=2,exchange=heads
    cp=3,exchange=halo-kv
"""
OF_DEEP = """
    pp=2,micro=3 pp=2,micro=3,schedule=zb_h1 pp=3,micro=4,schedule=interleaved pp=2,micro=2,schedule=chimera
    pp=2,micro=2,schedule=zb_v pp=2,micro=2,schedule=terapipe pp=2,schedule=pipedream pp=2,micro=2,schedule=2bw
"""
PLANS = dict.fromkeys(OF_SMALL.split(), SMALL) | dict.fromkeys(OF_DEEP.split(), DEEP)
PLANS |= {c.plan: c.config for c in (PAIRS[4], PAIRS[18], WITH_EXPERTS[5])}


def written() -> dict[str, list[str]]:
    """The table: for each plan the lines of its ranks."""
    rows = [row.split("\n") for row in TABLE.read_text().strip().split("\n\n")]
    return {plan: lines for plan, *lines in rows}


if __name__ == "__main__":  # after a change of the order that is meant
    with ExitStack() as stack:
        sizes = {Plan.parse(plan).world for plan in PLANS}
        pools = {n: stack.enter_context(Ranks(n, echo=False)) for n in sizes}
        rows = {
            plan: pools[Plan.parse(plan).world].run(of_a_step, plan, config) for plan, config in PLANS.items()
        }
    TABLE.write_text("\n\n".join("\n".join((plan, *lines)) for plan, lines in rows.items()) + "\n")
