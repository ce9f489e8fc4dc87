"""Expert parallelism: neighbours of the data axis share out a mixture's experts, and tokens travel to theirs.

With n ranks on the axis "ep", rank r holds experts r E/n to (r+1) E/n of every mixture, and all else whole. The other
dp/n ranks hold copies of the same experts (axis "edp"), so gradients of experts are summed over those alone.

Lepikhin et al. 2020, "GShard", section 3; Rajbhandari et al. 2022, "DeepSpeed-MoE", arXiv:2201.05596, section 5.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..experts.mixture import Here, mixtures
from ..experts.rows import Dispatch
from ..ranks import comm
from ..ranks.mesh import Axis, Mesh
from . import spec


def apply_expert(model, mesh: Mesh) -> None:
    """Leave each rank its experts of every mixture; with tensor parallelism also its slice of each.

    Forward: how many rows go to each expert (E - E/n numbers), the rows by an all-to-all with uneven parts, and the
    experts' output back by another. Backward: both again, the other way round. A shared expert computes while the
    first of them travels, in backward too. Where a group's tokens lie on several ranks, their counts are gathered.
    With `node` ranks a machine each exchange is two, within the machine and then between machines (Rajbhandari et al.
    2022, section 5.3): every row travels twice at most, and of n-1 messages only n/node - 1 leave the machine.
    With tensor parallelism the experts' hidden features are cut: one sum of (B, T, C), as in a dense layer.
    Bytes per rank and mixture: 2 C numbers a row that leaves and 2 C a row that comes, of 8 bytes E - E/n for counts.
    """
    for block in model.h.values():
        if block.mlp in mixtures(model):
            edge = getattr(block.attn.c_proj, "edge", None)
            block.mlp.ranks = SpreadExperts(mesh, edge, block.mlp.config)
            _keep_experts(block.mlp, mesh["ep"])
            if edge is not None:
                for part in [*block.mlp.experts.values(), *([block.mlp.shared] if block.mlp.shared else [])]:
                    _cut(part, edge.axis)
            if block.mlp.router.bias is not None:
                spec.mark(block.mlp.router.bias, load=True)


def _keep_experts(mixture, axis: Axis) -> None:
    """Only this rank's experts stay, under the names that they have in the whole model."""
    if axis.size > 1:
        mine = torch.arange(mixture.config.experts).tensor_split(axis.size)[axis.rank].tolist()
        mixture.experts = nn.ModuleDict({str(e): mixture.experts[str(e)] for e in mine})
        for p in mixture.experts.parameters():
            spec.mark(p, expert=True)


def _cut(expert, axis: Axis) -> None:
    """This rank's slice of the hidden features of an expert; its output is a partial sum over the ranks."""
    for linear in (expert.c_fc, expert.c_gate):
        if linear is not None:
            linear.weight = spec.cut(linear.weight, axis, 0)
            linear.bias = None if linear.bias is None else spec.cut(linear.bias, axis, 0)
    expert.c_proj = PartialLinear(expert.c_proj, axis)


class PartialLinear(nn.Module):
    """A linear layer of which this rank has a slice of the inputs; the sum is taken later, with one rank's bias."""

    def __init__(self, linear: nn.Linear, axis: Axis):
        super().__init__()
        self.weight, self.bias, self.first = spec.cut(linear.weight, axis, 1), linear.bias, axis.rank == 0
        if self.bias is not None:
            spec.mark(self.bias, partial=(*spec.of(self.bias).partial, axis.name))

    def forward(self, x):  # (m, hidden / n) -> (m, C)
        return F.linear(x, self.weight, None if self.bias is None else self.bias * self.first)


class SpreadExperts(Here):
    """Tokens of a group on several ranks, experts on several ranks: how each gets to the other."""

    def __init__(self, mesh: Mesh, edge, config):
        self.axis = mesh["ep"]
        if edge is not None:  # all tokens, of whose output each rank computes a part; the sum of these parts
            self.enter, self.leave = edge.enter, edge.leave
        self.inside, self.between = mesh["ep_inside"], mesh["ep_between"]
        self.group = {"row": mesh["cp"], "batch": mesh["dp", "cp"], "rank": Axis()}[config.group]

    def loads(self, counts) -> tuple[torch.Tensor, int]:
        """Everybody's counts. Bytes per rank: 8 (n-1) G k E."""
        found = comm.gather_flat(counts.flatten(), self.group)
        return found.view(self.group.size, *counts.shape), self.group.rank

    def send(self, rows, counts):
        """Ask how many rows will come, and begin the exchange; of a hierarchical one, the last hop."""
        hops, counts = [], counts.view(self.between.size, self.inside.size, -1)
        # Blocks of rows before each hop: (n/m, m, E/n), then (m, n/m, E/n).
        for axis in (self.inside, self.between):
            order, counts = regrouped(counts), counts.transpose(0, 1)
            if axis.size > 1:
                rows = _Wait.apply(rows, hops[-1][1]) if hops else rows
                table = torch.stack(comm.all_to_all(counts.unbind(), axis))
                exchange = RowExchange(axis, counts.sum((1, 2)).tolist(), table.sum((1, 2)).tolist())
                rows = _Start.apply(_ordered(rows, order), exchange)
                hops.append((order, exchange))
                counts = table
        return rows, counts.flatten(0, 1), hops

    def arrive(self, sent):
        """The rows of all ranks, sorted by expert."""
        coming, table, hops = sent  # table (n, E/n): rows from each rank for each expert here
        order, rows = regrouped(table), _Wait.apply(coming, hops[-1][1]) if hops else coming
        return _ordered(rows, order), table.sum(0), (order, hops)

    def back(self, rows, way):
        """The output of every row to the rank that sent it, by the same hops."""
        order, hops = way
        rows = _ordered(rows, order, back=True)
        for order, there in reversed(hops):
            sent = RowExchange(there.axis, there.coming, there.going)
            rows = _ordered(_Wait.apply(_Start.apply(rows, sent), sent), order, back=True)
        return rows


def regrouped(counts):
    """The order that puts rows, in blocks of sizes `counts` (a, b, ...), into blocks (b, a, ...); None: no change."""
    if 1 in counts.shape[:2]:
        return None
    turned = counts.transpose(0, 1)
    places = torch.arange(counts.numel(), device=counts.device).view_as(turned).transpose(0, 1)
    return places.flatten().repeat_interleave(counts.flatten()).argsort(stable=True)


def _ordered(rows, order, back: bool = False):
    return rows if order is None else Dispatch.apply(rows, order.argsort() if back else order)


class RowExchange:
    """An all-to-all of rows: how many go to each rank of the axis and come from it; under way in one direction."""

    def __init__(self, axis: Axis, going: list[int], coming: list[int]):
        self.axis, self.going, self.coming, self.handle = axis, going, coming, None

    def start(self, rows, going: list[int], coming: list[int]):
        """Begin, and give what stands for the rows that will have come: of their shape, without memory."""
        shapes = [(count, rows.size(1)) for count in coming]
        self.handle = comm.all_to_all(rows.split(going), self.axis, shapes, async_op=True)
        return rows.new_zeros(1).expand(sum(self.coming), rows.size(1))

    def wait(self):
        """The rows that came, in the order of the ranks."""
        parts, self.handle = self.handle.wait(), None
        return torch.cat(parts)


class _Start(torch.autograd.Function):
    """Forward: begin the exchange. Backward: wait for the one that `_Wait` has begun the other way."""

    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.start(rows, exchange.going, exchange.coming)

    @staticmethod
    def backward(ctx, stand_in):
        return ctx.exchange.wait(), None


class _Wait(torch.autograd.Function):
    """Forward: wait for what `_Start` has begun. Backward: begin to send the gradients the way back."""

    @staticmethod
    def forward(ctx, stand_in, exchange):
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange.start(grad, ctx.exchange.coming, ctx.exchange.going), None


def bytes_sent(rows, width: int, experts: int, element: int = 4, passes: int = 1) -> list[tuple[int, int]]:
    """(bytes, messages) that each rank sends for one mixture, forward and backward.

    `rows[i][j]` rows of rank i have their expert on rank j; `passes` is 2 where forward runs twice (recompute).
    """
    n, sent = len(rows), []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        out, back = sum(rows[i][j] for j in others), sum(rows[j][i] for j in others)
        full = sum(rows[i][j] > 0 for j in others) + sum(rows[j][i] > 0 for j in others)
        size = (passes + 1) * (out + back) * width * element + passes * 8 * (n - 1) * experts // n
        sent.append((size, (passes + 1) * full + passes * (n - 1)))
    return sent


def check(config, plan, rows: int, length: int) -> None:
    """Raise ValueError where the experts do not divide, or a group's tokens are not where its room is counted."""
    experts, n = config.experts, plan.ep
    if experts is None:
        if n > 1:
            raise ValueError(
                f"ep={n} has no experts to share out: this model is dense. Use ep=1, or a model with experts."
            )
        return
    if plan.dp % n:
        fits = ", ".join(str(d) for d in range(1, plan.dp + 1) if plan.dp % d == 0)
        raise ValueError(
            f"ep={n} does not divide the replicas dp={plan.dp} ({plan.dp} % {n} = {plan.dp % n}). Use ep={fits}."
        )
    if experts.experts % n:
        fits = ", ".join(str(d) for d in range(1, n + 1) if experts.experts % d == 0 and plan.dp % d == 0)
        raise ValueError(
            f"{experts.experts} experts cannot be shared out over ep={n} ranks ({experts.experts} % {n} = "
            f"{experts.experts % n}). Use ep={fits}, or {n * -(-experts.experts // n)} experts."
        )
    if n % plan.node:
        fits = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise ValueError(
            f"node={plan.node} does not divide the ranks ep={n} among machines ({n} % {plan.node} = "
            f"{n % plan.node}). Use node={fits}."
        )
    if n > 1 and (plan.data.startswith("server") or plan.data == "owner"):
        raise ValueError(
            f"data={plan.data} keeps every tensor on all replicas, but ep={n} does not. Use data=bucket."
        )
    if plan.asynchronous:
        raise ValueError(
            f"schedule={plan.schedule} mixes weights of several steps, and no serial model says what a router then "
            "balances. Use a synchronous schedule such as 1f1b, or a dense model."
        )
    _check_groups(experts, plan)


def _check_groups(experts, plan) -> None:
    """Raise ValueError where a group's tokens would be seen only in part, or in another order than the serial one."""
    said = f"group={experts.group}"
    if experts.group == "batch" and plan.micro > 1:
        raise ValueError(
            f"{said} needs the whole batch at once, but micro={plan.micro} cuts it. Use group=row, or micro=1."
        )
    spread = plan.cp > 1 or plan.sp or (experts.group == "batch" and plan.dp > 1)
    if experts.router == "expert_choice" and spread:
        raise ValueError(
            f"Expert choice compares all tokens of a group ({said}), and {plan} puts them on several ranks. "
            "Use group=row without cp and sp, or another router."
        )
    in_order = plan.layout == "contiguous" and experts.group != "batch"
    if experts.capacity is not None and plan.cp > 1 and not in_order:
        raise ValueError(
            f"A capacity counts the tokens of {said} in their order, which layout={plan.layout}, cp={plan.cp} does not "
            "keep. Use layout=contiguous and group=row, or no capacity."
        )
