"""Mesh-TensorFlow: every legal layout of the MLP and of a block on 2 x 2 live ranks, forward and backward."""

import pytest
import torch
from sharding_cases import CONFIG, run_program

from gpt2lab.lessons.labs.sharding import BLOCK as BLOCK_NAMES
from gpt2lab.lessons.labs.sharding import MLP as MLP_NAMES
from gpt2lab.model import MLP, Block
from gpt2lab.sharding import named
from gpt2lab.sharding.gpt2 import captured_module, plain_attention
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.propagate import propagate

MESH = {"x": 2, "y": 2}


def prepared(kind):
    """A module with weights of its own, its graph, its inputs, and what serial PyTorch gives."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    module, others = (MLP(CONFIG), tuple) if kind == "mlp" else (Block(CONFIG, 0), lambda: (torch.arange(5),))
    module = module.double()
    if kind == "block":
        module.attn.core = plain_attention
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(draw(*p.shape) / 4)
    x, of_y = draw(3, 5, CONFIG.n_embd).requires_grad_(), draw(3, 5, CONFIG.n_embd)
    table = MLP_NAMES if kind == "mlp" else BLOCK_NAMES
    params = dict(module.named_parameters())
    graph = captured_module(module, x, {n: table[n] for n in ("x", *params)}, others)
    y = module(x, *others())
    y.backward(of_y)
    given = {"x": x.detach(), "grad y": of_y} | {n: p.detach() for n, p in params.items()}
    want = {"y": y.detach(), "grad x": x.grad} | {f"grad {n}": p.grad for n, p in params.items()}
    return table, graph, given, want


def run_all(rank, world_size, programs, given, want):
    return [run_program(rank, world_size, one, given, want)[:2] for one in programs]


CASES = [("mlp", 21, 1), ("block", 63, 9), pytest.param("block", 63, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind, count, step", CASES)
def test_every_legal_layout_equals_the_serial_run(pools, kind, count, step):
    """All of the MLP's; of the block's every ninth, and all where slow tests are asked for."""
    table, graph, given, want = prepared(kind)
    layouts = named.legal_layouts(table, MESH)
    assert len(layouts) == count
    layouts = layouts[::step]
    programs = [
        partition(graph, propagate(graph, named.marks(graph, one, table), MESH), MESH) for one in layouts
    ]
    for found in pools[4].run(run_all, programs, given, want):
        assert len(found) == len(layouts) and all(error <= 1e-10 for error, _ in found)


def test_an_illegal_layout_is_refused():
    _, graph, _, _ = prepared("mlp")
    with pytest.raises(
        ValueError, match="hidden has the dimensions batch and ff, and both are on mesh axis 'x'"
    ):
        named.marks(graph, {"batch": "x", "ff": "x"}, MLP_NAMES)
    with pytest.raises(ValueError, match="no tensor has a dimension 'colour'. There are batch, embd"):
        named.marks(graph, {"colour": "x"}, MLP_NAMES)


def test_how_many_there_are():
    """All pairs of the MLP's four dimensions meet in a tensor: each axis takes another one, or none: 5 x 5 - 4."""
    assert len(named.legal_layouts(MLP_NAMES, {"x": 2})) == 5
    assert {"heads": "y", "ff": "y", "batch": "x"} in named.legal_layouts(BLOCK_NAMES, MESH)
    assert {"heads": "y", "width": "y"} not in named.legal_layouts(BLOCK_NAMES, MESH)
