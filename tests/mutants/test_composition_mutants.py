"""Bugs that show only when strategies are combined; each is planted, and the comparison with serial must notice it."""

from planting import bugs, controls, is_caught

from gpt2lab.corpus.batches import Batch
from gpt2lab.experts.mixture import Mixture
from gpt2lab.parallel import accumulate, chunked_loss, finish
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.plan import Parallel
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, EXPERTS
from gpt2lab.train import Trainer


def in_place_of_all_replicas(axis):
    return lambda right: lambda mesh, names: right(mesh, axis if names == ("dp", "cp") else names)


BUGS = {
    "the norm counts tensor-parallel replicas twice":
        (finish._counted_here, '(*p.spec.replicas, "tp")', "p.spec.replicas", "dp=2,tp=2"),
    "the tied copy counts in the norm": (finish.gradient_norm, "not p.spec.tied_copy and ", "", "pp=2,tp=2"),
    "the norm is the stage's own":
        (finish.gradient_norm, "if not p", "if mesh['pp'].rank == 0 and not p", "pp=2,dp=2"),
    "the tied gradient is not summed": (Pipeline.tie, "and tensors:", "and False:", "pp=2,dp=2"),
    "the tied gradient is summed over all stages and tensor ranks":
        (Pipeline.tie, "summed([t.grad for t in tensors]", "summed(summed([t.grad for t in tensors], mesh['tp'])",
         "pp=2,tp=2 raises=Mismatch"),
    "the loss is divided by the micro-batches once more":
        (PipelineStep._through, "/ unit.total", "/ unit.total / 2", "pp=2,dp=2,micro=2"),
    "the loss is divided by the replica's own tokens":
        (accumulate.micro_loss, "/ micro.total", "/ (micro.targets != -100).sum() / 2", "dp=2,tp=2"),
    "gradients are summed over data ranks only":
        (Mesh, "__getitem__", in_place_of_all_replicas("dp"), "dp=2,cp=2"),
    "gradients are summed over the wrong axis":
        (Mesh, "__getitem__", in_place_of_all_replicas("tp"), "dp=2,tp=2 raises=Mismatch"),
    "partial gradients stay partial": (finish.sum_partial, "if grads:", "if False:", "tp=2,dp=2,sp=on"),
    "partial gradients are summed over the data axis":
        (finish.sum_partial, "mesh[name]", "mesh['dp']", "tp=2,dp=2,sp=on,zero=2"),
    "rows are dealt by the global rank":
        (Parallel.mine, 'dp = self.mesh["dp"]', "dp = self.mesh.world", "dp=2,tp=2 raises=Mismatch"),
    "positions start at zero on every context rank":
        (Batch.columns, "self.positions[index]", "self.positions[index] - self.positions[index][0]",
         "cp=2,tp=2 raises=ValueError"),
    "the reported loss counts tensor-parallel ranks":
        (Trainer._global_losses, 'part if mesh["tp"].rank == 0 else torch.zeros_like(part)', "part",
         "dp=2,tp=2"),
    "each rank clips by its shard":
        (finish.clip, "if limit",
         "norm = torch.cat([p.tensor.grad.flatten() for p in pieces]).norm().item()\n    if limit", "dp=2,zero=1,tp=2"),
}  # fmt: skip


@bugs(BUGS)
def test_the_bug_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, check, CONFIG), "nobody noticed"


@controls(BUGS)
def test_without_a_bug_nothing_is_noticed(pools, check):
    assert not is_caught(pools, None, check, CONFIG, 1e-10)


# Computed in torch's default dtype inside a run in float64: off by some 1e-8, and only where that is float32.
IN_THE_DEFAULT_DTYPE = {
    "the reported loss": (Trainer._global_losses, "torch.float64", "torch.get_default_dtype()", "dp=2"),
    "the norms of a stream":
        (Trainer.stream, "torch.tensor(squares, dtype=torch.float64)", "torch.tensor(squares)",
         "pp=2,schedule=pipedream"),
    "the shares of the experts": (Mixture.room, ".double()", "", "dp=2,ep=2"),
    "the sum of a chunked loss":
        (chunked_loss._ChunkedLoss.forward, "x.new_zeros((), dtype=torch.float64)", "torch.zeros(())",
         "dp=2,loss=chunked"),
}  # fmt: skip


@bugs(IN_THE_DEFAULT_DTYPE)
def test_what_is_computed_in_the_default_dtype_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, check, EXPERTS if "ep=" in check else CONFIG, 1e-10), "nobody noticed"
