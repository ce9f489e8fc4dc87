"""PipeDream with replicated stages: the ranks of a stage take micro-batches in turn and update together.

When each replica of a stage has run a backward, their gradients are added up (one all-reduce of the stage's weights)
and all of them make the same update: a version for each round. Nobody divides, so a datum moves every stage as far, of
however many replicas.

Narayanan et al. 2019, "PipeDream", sections 3.2 and 3.3.
"""

from ...emulate import Emulator
from ...model import GPT2, GPT2Config
from ...parallel import finish
from ...parallel.data import Naive
from ...parallel.pipeline.versions import Asynchronous
from ...ranks import comm
from ...ranks.mesh import Mesh
from ...schedules.asynchronous import free_running, make_stream
from ...train import Recipe, make_optimizer
from .instruments import in_float64
from .staleness import homes_of


@in_float64()
def train(
    rank: int,
    world_size: int,
    scheme: str,
    stages: tuple[int, ...],
    config: GPT2Config,
    batches,
    recipe: Recipe,
):
    """One rank of a pipeline whose stage s has stages[s] replicas: losses, its weights by name, its reads, its traffic.

    The loss of a batch is known on the rank of the last stage that had it, and zero elsewhere.
    """
    mesh, model = Mesh(pp=world_size), GPT2(config).double()
    order = free_running(stages, max(stages))
    engine = Asynchronous(model, mesh, order, lambda count: make_stream(scheme, stages, count))
    sync = Naive(model, mesh.axis("replicas", [order.ranks_of(s) for s in range(len(stages))]))
    held = sync.pieces
    sync.pieces = [p for p in held if not p.spec.tied_copy]
    optimizer = make_optimizer(sync.pieces, recipe)
    comm.clear_log()

    def update():
        engine.tie(held, mesh)
        sync.finish()
        norm = finish.gradient_norm(sync.pieces, mesh, engine.norm_axis)
        finish.clip(sync.pieces, norm, recipe.clip)
        optimizer.step()
        optimizer.zero_grad()

    losses = engine.stream([[batch] for batch in batches], None, sync, update)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return losses, weights, list(engine.record), dict(comm.traffic())


def emulate(scheme: str, stages: tuple[int, ...], config: GPT2Config, batches, recipe: Recipe) -> Emulator:
    """The same in one process."""
    start = {n: p.detach() for n, p in GPT2(config).double().named_parameters()}
    stream = make_stream(scheme, stages, len(batches))
    return Emulator(config, start, stream, homes_of(config, len(stages)), recipe).run(batches)
