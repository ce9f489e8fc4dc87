"""Random plans for random models, sensible and not, and a process group that only pretends to have other ranks."""

from contextlib import contextmanager

import torch.distributed as dist
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt2lab.model import GPT2Config
from gpt2lab.parallel.context.exchanges import ALIASES, EXCHANGES
from gpt2lab.parallel.context.layouts import LAYOUTS
from gpt2lab.parallel.data import FORMS
from gpt2lab.plan import Plan
from gpt2lab.ranks import mesh
from gpt2lab.schedules.registry import NAMES


@st.composite
def models(draw) -> GPT2Config:
    """Small models of odd sizes, down to one layer, one head and two tokens."""
    heads = draw(st.integers(1, 6))
    return GPT2Config(
        vocab_size=draw(st.integers(2, 40)),
        n_positions=16,
        n_layer=draw(st.integers(1, 5)),
        n_head=heads,
        n_embd=heads
        * draw(st.sampled_from([8, 10])),  # with fewer, norms of nearly equal numbers: all rounding
        window=draw(st.none() | st.integers(1, 8)),
    )


@st.composite
def plans(draw, most: int = 8) -> Plan:
    """Plans of up to `most` ranks an axis; an option leaves its default in one case of four."""
    size = st.one_of(st.just(1), st.integers(1, 3), st.integers(1, most))
    other = lambda default, *choices: draw(st.sampled_from([default] * 3 * len(choices) + list(choices)))
    return Plan(
        pp=draw(size),
        dp=draw(size),
        cp=draw(size),
        tp=draw(size),
        micro=draw(st.sampled_from([1, 1, 2, 3, 4])),
        data=other("bucket", *FORMS, "owner", "post"),
        bucket=other(1024, 0, 1),
        zero=other(0, 1, 2, 3, 4),
        schedule=other("1f1b", *NAMES, "1b1f"),
        chunks=other(2, 1, 3, 4),
        layout=other("contiguous", *LAYOUTS, "striped"),
        exchange=other("kv", *EXCHANGES, *ALIASES, "letters"),
        sp=other(False, True),
        loss=other("whole", "chunked", "half"),
        recompute=other(False, True),
    )


@st.composite
def cases(draw, most: int = 8):
    """(plan, config, rows, length)."""
    return draw(plans(most)), draw(models()), draw(st.integers(1, 9)), draw(st.integers(1, 18))


@contextmanager
def pretended(rank: int, world: int):
    """Inside, this process is one rank of many; the others do not exist, and calls to them give nonsense."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    right, mesh._timeout = mesh._timeout, lambda: None
    try:
        yield
    finally:
        mesh._timeout = right
        dist.destroy_process_group()
