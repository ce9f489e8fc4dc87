"""GPT-2 partitioned by marks and run on live ranks, beside the serial run and the package's own strategies."""

from functools import cache

import torch

from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.sharding import reshard
from gpt2lab.sharding.capture import captured_gpt2
from gpt2lab.sharding.interpret import Interpreter

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)
ROWS, LENGTH = 7, 11


@cache
def graph(update=None, config=CONFIG):
    """The captured step."""
    return captured_gpt2(config, ROWS, LENGTH, update)


@cache
def inputs(config=CONFIG) -> dict:
    """Weights far from initialisation, and a batch in which rows have unequally many targets."""
    batch = example_batch(config, ROWS, LENGTH)
    return {**example_weights(config), "tokens": batch.tokens, "targets": batch.targets}


@cache
def serial(config=CONFIG) -> dict:
    """The summed loss and every gradient of plain PyTorch."""
    model = GPT2(config).double()
    values = inputs(config)
    model.load_state_dict({n: values[n] for n, _ in model.named_parameters()})
    loss = model.loss(model(values["tokens"]), values["targets"])
    loss.backward()
    return {"loss": loss.detach()} | {f"grad {n}": p.grad for n, p in model.named_parameters()}


def run_program(rank, world_size, program, given, want):
    """(largest relative error of all results, bytes sent, messages sent, calls by operation) of one rank."""
    axes = reshard.live_axes(program.mesh)
    interpreter = Interpreter(program, axes)
    comm.clear_log()
    found = interpreter.run(given)
    sent = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
    worst = 0.0
    for result, part in found.items():
        node = program.graph.nodes[program.graph.outputs[result]]
        right = reshard.shard(want[result].reshape(node.shape), program.results[result], axes).reshape(
            part.shape
        )
        error = ((part - right).abs().max() / want[result].abs().max()).item()
        worst = error if not error <= worst else worst
    return worst, *sent, {op: (calls, size) for (op, _), (calls, size, _) in comm.traffic().items()}


def handwritten(rank, world_size, plan):
    """What the package's own strategy sends for the same gradients: {(operation, axis): (calls, bytes)}."""
    from gpt2lab.plan import build
    from gpt2lab.ranks.mesh import Mesh
    from gpt2lab.verify import Plan

    torch.set_default_dtype(torch.float64)
    plan = Plan.parse(plan)
    parallel = build(plan, CONFIG, Mesh(pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp), torch.float64)
    parallel.load(example_weights(CONFIG))
    batch = example_batch(CONFIG, ROWS, LENGTH)
    comm.clear_log()
    with torch.enable_grad():
        parallel.engine.run(parallel.mine(batch), None, parallel.sync)
    parallel.sync.finish()
    torch.set_default_dtype(torch.float32)
    return {key: (calls, size) for key, (calls, size, _) in comm.traffic().items()}
