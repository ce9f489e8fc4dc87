"""Checkers of lesson 06: which rows of the fused q, k, v a rank holds, f and g, the vocabulary-parallel loss."""

import torch
import torch.nn.functional as F

from ...model import GPT2, GPT2Config
from . import close, closed, live, returned
from .collectives import used_twice
from .engine import by_chance, called


def qkv(answer) -> None:
    """Exercise: the rows of c_attn.weight that belong to one rank, by heads."""
    for width, heads, ranks in ((8, 4, 2), (24, 6, 3), (16, 4, 4)):
        _qkv_of(answer, width, heads, ranks)
    by_chance(lambda chance: _qkv_of(answer, *_sizes(chance)))


def _sizes(chance) -> tuple[int, int, int]:
    """A width, heads, and ranks that divide them."""
    ranks = chance.randint(1, 8)
    heads = ranks * chance.randint(1, 3)
    return heads * chance.randint(1, 5), heads, ranks


def _qkv_of(answer, width: int, heads: int, ranks: int) -> None:
    case = f"{heads} heads of width {width // heads} on {ranks} ranks"
    dealt = [
        [int(row) for row in returned(called(answer, (r, ranks, heads, width), case))] for r in range(ranks)
    ]
    every = sorted(row for rows in dealt for row in rows)
    assert every == list(range(3 * width)), f"{case}: some rows are on no rank or on two, {dealt}"
    third = {row // width for row in dealt[0]}
    assert third == {0, 1, 2}, f"{case}: rank 0 needs its part of q, of k and of v, not only {sorted(third)}"
    head = width // heads
    for rank, rows in enumerate(dealt):
        parts = [row // width for row in rows]
        assert parts == sorted(parts), (
            f"{case}: rank {rank} should hold its q, then its k, then its v, because chunk(3) cuts them apart; "
            f"yours are {rows}"
        )
        q, k, v = ([row % width for row in rows if row // width == part] for part in range(3))
        assert q == k == v, f"{case}: rank {rank} has q of rows {q}, but k of {k}"
        cut = [h for h in range(heads) if 0 < sum(row // head == h for row in q) < head]
        assert not cut, f"{case}: head {cut[:1]} is cut in two on rank {rank}"
        first = rank * heads // ranks * head
        assert rows[0] == first, f"{case}: rank {rank} should begin with row {first}, not {rows[0]}"
        assert q == [*range(first, first + width // ranks)], (
            f"{case}: the heads of rank {rank} are no neighbours"
        )


def edges(f, g) -> None:
    """Exercise: Megatron's f and g as autograd functions, tried in a two-layer MLP on three ranks."""
    x, up, down = _mlp()
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    (F.gelu(whole[0] @ whole[1]) @ whole[2]).square().sum().backward()
    found = live(_mlp_on_a_rank, f, g, x, up, down, ranks=3, what="three live ranks")
    once = 3 * 4 * 8 * 4 // 3  # an all-reduce of y (3, 4) in float64, 2 (n - 1)/n of its bytes
    for rank, (loss, of_x, of_up, sent, names, same, again) in enumerate(found):
        assert names == ["MyF", "MyG"], (
            f"autograd sees {names}: f and g should be MyF and MyG, with your backward"
        )
        assert same, "g changed the partial sums that it was given: all_reduce into a new tensor"
        close(loss, (F.gelu(x @ up) @ down).square().sum(), "the loss: g has to sum in forward")
        right = whole[1].grad.tensor_split(3, 1)[rank]
        assert not torch.allclose(of_up, 3 * right), (
            "the gradient of the weights is n times too large: g sums in backward as well"
        )
        close(of_up, right, "the gradient of the first matrix")
        close(of_x, whole[0].grad, "the gradient of x, for which f has to sum in backward")
        close(
            again[0],
            whole[0].grad,
            "the gradient of x when f and g are called once more, along another axis, before backward: ctx belongs to "
            "one call, a class to all",
        )
        assert sent == 2 * once, (
            f"rank {rank} sent {sent} bytes; one all-reduce forward (g) and one backward (f) are {2 * once}"
        )
    kept = live(used_twice, f, ranks=2)
    close(kept[0], 2 + 1, "the gradient of f(x) + x on two ranks: backward must not change what it is given")


def _mlp():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((3, 4), (4, 6), (6, 4))]


def _mlp_on_a_rank(rank, world_size, f, g, x, up, down):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis = Mesh(tp=world_size)["tp"]
    comm.clear_log()
    x = x.clone().requires_grad_()
    up = up.tensor_split(world_size, 1)[rank].clone().requires_grad_()
    entered = f(x, axis)
    y = F.gelu(entered @ up) @ down.tensor_split(world_size, 0)[rank]
    before, left = y.detach().clone(), g(y, axis)
    loss = left.square().sum()
    loss.backward()
    names = [type(t.grad_fn).__name__.removesuffix("Backward") for t in (entered, left)]
    sent = sum(size for _, size, _ in comm.traffic().values())
    same = torch.equal(before, y)
    again = _with_another_axis(f, g, x.detach(), up.detach(), down.tensor_split(world_size, 0)[rank], axis)
    return loss.item(), x.grad, up.grad, sent, names, same, again


def _with_another_axis(f, g, x, up, down, axis):
    """The gradient of x (1, 3, 4) in the same MLP, where f and g are also called along an axis of one rank."""
    from ...ranks.mesh import Mesh

    alone = Mesh(tp=axis.size, dp=1)["dp"]
    x = x[None].requires_grad_()
    loss = g(F.gelu(f(x, axis) @ up) @ down, axis).square().sum()
    g(f(torch.ones(2, requires_grad=True), alone), alone)
    loss.backward()
    return x.grad


def attention(answer) -> None:
    """Exercise: the attention of a GPT-2 block by heads on three and on two live ranks, forward and backward."""
    for n, heads, width, words in ((3, 6, 4, "three live ranks"), (2, 12, 2, "two live ranks")):
        _attention_on_ranks(answer, n, heads, width, words)


def _attention_on_ranks(answer, n: int, heads: int, width: int, what: str) -> None:
    attn, x = _attention(heads, width)
    x.requires_grad_()
    y = attn(x, None)
    y.square().sum().backward()
    found = live(_attention_on_a_rank, answer, heads, width, ranks=n, what=what)
    for rank, (out, *_) in enumerate(found):
        close(out, y, f"the output on rank {rank}{' of two' * (n < 3)}", 1e-9)
    rows, tokens, channels = x.shape
    four_products, scores_and_sums = 4 * channels, 2 * tokens
    serial = 2 * rows * tokens * channels * (four_products + scores_and_sums)
    for rank, (_, of_x, grads, flops, sent) in enumerate(found):
        close(of_x, x.grad, f"the gradient of x on rank {rank}: every rank's heads read x", 1e-9)
        assert flops <= serial / n, (
            f"rank {rank} computes {flops / serial:.0%} of what one process does, not 1/{n}: only its own heads"
        )
        once = 2 * 2 * x.numel() * 8 * (n - 1) // n  # an all-reduce of x forward and one backward
        assert sent == once, f"rank {rank} sent {sent} bytes; g forward and f backward are {once}"
        close(
            grads["c_proj.bias"], attn.c_proj.bias.grad, f"the gradient of c_proj.bias on rank {rank}", 1e-9
        )
    for name in ("c_attn.weight", "c_attn.bias", "c_proj.weight"):
        total = sum(grads[name] for _, _, grads, *_ in found)
        close(total, attn.get_parameter(name).grad, f"the ranks' parts of the gradient of {name}", 1e-9)


def _attention(heads: int, width: int):
    """A GPT-2 attention, and an input (2, 5, C)."""
    config = GPT2Config(vocab_size=8, n_positions=8, n_layer=1, n_head=heads, n_embd=heads * width)
    attn = GPT2(config).double().h["0"].attn
    generator = torch.Generator().manual_seed(1)
    for p in attn.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 5
    return attn, torch.randn(2, 5, heads * width, generator=generator, dtype=torch.float64)


def _flops(run) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _attention_on_a_rank(rank, world_size, answer, heads, width):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, (attn, x), kept = Mesh(tp=world_size)["tp"], _attention(heads, width), []
    x.requires_grad_()
    comm.clear_log()
    flops = _flops(lambda: kept.append(answer(x, attn, axis)))
    kept[0].square().sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in attn.named_parameters()}
    return kept[0].detach(), x.grad, grads, flops, sum(size for _, size, _ in comm.traffic().values())


def vocabulary_loss(answer) -> None:
    """Exercise: the loss of logits that are cut along the vocabulary, 37 tokens on three ranks."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([0, 12, 13, 24, 25, 36])  # the first and the last token of each rank
    for scale, what in ((1.0, "small logits"), (3000.0, "logits up to 9000")):
        logits = scale * torch.randn(6, 37, generator=generator, dtype=torch.float64)
        expected = F.cross_entropy(logits, targets, reduction="sum").item()
        found = live(_loss_on_a_rank, answer, logits, targets, ranks=3, what=what)
        assert all(same for *_, same in found), "your function changed the logits it was given; make new ones"
        found = [of_one[:2] for of_one in found]
        assert all(value == value and abs(value) != float("inf") for value, _ in found), (
            f"{what}: the exponentials overflow. Subtract the largest logit of *all* ranks first"
        )
        local = [v for v, _ in found]
        assert max(local) - min(local) < 1e-9 * max(1, abs(expected)), (
            f"{what}: the ranks disagree, {local}: something was not summed over the ranks"
        )
        close(local[0], expected, f"{what}: the loss on rank 0")
        sent, few = max(size for _, size in found), 5 * 6 * 8 * 4 // 3  # all-reduces of five numbers a token
        assert sent <= few, (
            f"the logits themselves travelled: {sent} bytes sent, as they are {12 * 6 * 8} or more on each rank; a few "
            f"numbers a token suffice, at most {few}: each rank has its own part of the maximum and of the sum"
        )


def _loss_on_a_rank(rank, world_size, answer, logits, targets):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, sizes = Mesh(tp=world_size)["tp"], comm.split_sizes(logits.size(-1), world_size)
    comm.clear_log()
    mine = logits.split(sizes, -1)[rank].clone()
    with closed("gpt2lab.parallel"):
        value = returned(answer(mine, targets, sum(sizes[:rank]), axis))
    sent = sum(size for _, size, _ in comm.traffic().values())
    return float(value), sent, torch.equal(mine, logits.split(sizes, -1)[rank])


def gathered_columns(answer) -> None:
    """Exercise: columns gathered forward, and what backward does then, in a net of three matrices, on live ranks."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    x, weights = draw(5, 4), [draw(4, 6), draw(6, 9), draw(9, 3)]
    whole, y = [w.clone().requires_grad_() for w in weights], x
    for w in whole:
        y = F.gelu(y @ w)
    y.square().sum().backward()
    found = live(_columns_on_a_rank, answer, x, weights, ranks=3, what="three live ranks")
    for rank, (out, *_, name) in enumerate(found):
        close(
            out, y, f"the output on rank {rank}: the ranks' columns side by side, in the order of the ranks"
        )
        assert name == "MyGatherBackward", (
            f"autograd sees {name}: gather by MyGather, with a backward of your own"
        )
    gather = (
        2 * 5 * 18 // 3 * 8
    )  # numbers of 5 rows of 6, 9 and 3 columns: two others' parts pass through a rank
    for rank, (_, grads, forward, backward, _) in enumerate(found):
        assert forward == gather, f"rank {rank} sent {forward} bytes forward; three all-gathers are {gather}"
        for layer in (2, 1, 0):
            got, want = grads[layer], whole[layer].grad.tensor_split(3, 1)[rank]
            assert layer < 2 or backward or not torch.allclose(got, want / 3), (
                "the last matrix gets a third of its gradient: each rank asked for 1/3, and nobody added the requests"
            )
            close(got, want, f"the gradient of matrix {layer} on rank {rank}", 1e-9)
        assert backward == gather, f"rank {rank} sent {backward} bytes backward; {gather} are enough"


def _columns_on_a_rank(rank, world_size, answer, x, weights):
    """The output, this rank's gradients with the seed 1/n, bytes sent forward and backward, and autograd's function."""
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, sent = Mesh(tp=world_size)["tp"], lambda: sum(size for _, size, _ in comm.traffic().values())
    mine = [w.tensor_split(world_size, 1)[rank].clone().requires_grad_() for w in weights]
    comm.clear_log()
    for w in mine:
        x = answer(F.gelu(x @ w), axis)
    forward = sent()
    x.square().sum().backward(torch.tensor(1 / world_size, dtype=x.dtype))
    return x.detach(), [w.grad for w in mine], forward, sent() - forward, type(x.grad_fn).__name__
