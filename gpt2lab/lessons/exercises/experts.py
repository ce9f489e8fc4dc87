"""Checkers of lesson 12: gating with room, rows to experts and back, combine's backward, bytes, places of experts."""

from copy import deepcopy
from numbers import Integral

import torch

from ...ranks import comm
from ...ranks.mesh import Mesh
from . import Task, close, live, refuse, returned, run_there, scored
from .differences import CHANGED, UNROLLED, listed, named, randoms
from .engine import by_chance, called
from .guards import PACKAGE, without_autograd
from .ranked import counted, sent
from .watching import Seen, no_gradient, unread, watched


def gating(answer) -> None:
    """Exercise: experts, weights and who finds room, of scores (N, E)."""
    generator = torch.Generator().manual_seed(0)
    for sizes in ((6, 4, 6), (9, 3, 4), (16, 4, 5), (16, 8, 2)):
        _gated(answer, generator, *sizes)
    drawn = lambda chance: [chance.randint(*ends) for ends in ((1, 24), (2, 12), (1, 9))]
    by_chance(lambda chance: _gated(answer, generator, *drawn(chance)), 5)


def _gated(answer, generator, tokens: int, experts: int, room: int) -> None:
    p = torch.randn(tokens, experts, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    scores = p.clone().requires_grad_()
    case = f"{tokens} tokens, {experts} experts with room for {room}"
    chosen, weights, kept, learnt = run_there(_routed, answer, p, room, case)
    best = scores.topk(2, -1)
    want = best.values / best.values.sum(-1, keepdim=True)
    assert chosen.shape == (tokens, 2) and torch.equal(chosen, best.indices), (
        f"{case}: token 0 should ask for experts {best.indices[0].tolist()}, not {chosen[:1].flatten().tolist()}"
    )
    assert not chosen.is_floating_point(), f"{case}: experts are whole numbers, not {chosen.dtype}"
    sums = weights.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums)), (
        f"{case}: the two weights of a token add up to {sums.min():.3f}, not to 1; dropping must not change them"
    )
    close(weights, want, f"{case}: the weights")
    assert learnt is not None and torch.allclose(learnt, _pulled(want, scores)), (
        f"{case}: no gradient comes from the weights to the scores, or a wrong one, and the router cannot learn"
    )
    assert kept.shape == (tokens, 2) and kept.dtype == torch.bool, (
        f"{case}: kept is True or False for each choice, not {kept.dtype} of shape {tuple(kept.shape)}"
    )
    taken = torch.bincount(chosen[kept], minlength=experts)
    assert taken.max() <= room, f"{case}: an expert got {int(taken.max())} tokens, but has room for {room}"
    right = _served(best.indices, experts, room)
    lost = (right & ~kept)[:, 1] & ~right[:, 0]
    assert not lost.any() or (kept & ~right).any(), (
        f"{case}: token {int(lost.int().argmax())} finds no room at its first expert, but at its second one"
    )
    assert kept.sum() == right.sum(), f"{case}: {int(right.sum())} choices fit, yours keeps {int(kept.sum())}"
    assert torch.equal(kept[:, 0], right[:, 0]), f"{case}: first choices go first, in the order of the tokens"
    assert torch.equal(kept, right), f"{case}: second choices wait behind *all* first ones, in token order"


def _routed(answer, p, room: int, case: str) -> tuple:
    """Experts, weights and who finds room, and the gradient that comes from the weights to the scores, or None."""
    scores = p.clone().requires_grad_()
    found = named("experts", "weights", "kept")(called(answer, (scores, room), case), case)
    assert torch.equal(scores, p), f"{case}: {CHANGED}"
    found = [_tensor(one) for one in found.values()]
    learnt = _pulled(found[1], scores) if found[1].requires_grad else None
    return *(one.detach() for one in found), learnt


def _tensor(found):
    """What an answer gave, which may be a list of tensors or of lists, as a tensor."""
    parts = [_tensor(one) for one in found] if isinstance(found, UNROLLED | list | tuple) else []
    return torch.stack(parts) if parts else torch.as_tensor(found)


def _pulled(weights, scores):
    """The gradient of the weights, each times its number from 1 on, at the scores."""
    pull = torch.arange(1.0, weights.numel() + 1, dtype=weights.dtype).view_as(weights)
    return torch.autograd.grad((weights * pull).sum(), scores, allow_unused=True)[0]


def _served(chosen, experts, room):
    queue, kept = [0] * experts, torch.zeros_like(chosen, dtype=torch.bool)
    for choice in range(chosen.size(1)):
        for token, e in enumerate(chosen[:, choice].tolist()):
            kept[token, choice] = queue[e] < room
            queue[e] += 1
    return kept


CASES = (
    (3, ((3, 0, 2, 1, 1, 0), (1, 4, 0, 2, 0, 3), (2, 1, 1, 0, 4, 1))),
    (5, ((2, 0, 1, 3, 1, 2, 0, 1), (1, 1, 0, 2, 0, 3, 2, 0))),
)
"""Features of a row, and how many rows each rank has for each expert: of three ranks for six, of two for eight."""


def exchange(there, back) -> None:
    """Exercise: rows to the ranks of their experts and back, with uneven counts, on three and on two live ranks."""
    for width, counts in CASES:
        seen, uncounted = zip(*live(_travel, there, back, width, counts, ranks=len(counts)), strict=True)
        for source, target, left in unread(seen):
            said = f"rank {source} starts {left} messages to rank {target} that it never receives"
            raise AssertionError(f"{said}: they are counted by nobody")
        assert not any(uncounted), next(filter(None, uncounted))[0]


def _rows(rank: int, width: int, counts):
    """The rows of a rank: each has its name, and numbers that no formula gives."""
    names = [100.0 * rank + 10 * e + i for e, count in enumerate(counts[rank]) for i in range(1, count + 1)]
    return _with_more(torch.tensor(names, dtype=torch.float64), width, rank)


def _with_more(names, width: int, seed: int):
    return torch.cat([names[:, None], *randoms(seed, (len(names), width - 1))], 1)


def _coming(rank: int, width: int, counts):
    """The rows that come to a rank, and what its experts make of them."""
    every = torch.cat([_rows(r, width, counts) for r in range(len(counts))])
    rows = every[every[:, 0] // 10 % 10 // (len(counts[0]) // len(counts)) == rank]
    return rows, _with_more(-rows[:, 0], width, 100 + rank)


def _travel(rank, world_size, there, back, width, counts) -> Seen:
    axis, own, who = Mesh(dp=world_size, ep=world_size)["ep"], torch.tensor(counts[rank]), f"rank {rank}"
    rows, (come, made) = _rows(rank, width, counts), _coming(rank, width, counts)
    results = torch.cat([_coming(r, width, counts)[1] for r in range(world_size)])
    home, given = results[-results[:, 0] // 100 == rank], [t.requires_grad_() for t in (rows, made)]
    before = rows, made, own = rows + 0, made + 0, own
    kept = [t.detach().clone() for t in before]
    table = torch.tensor(counts).view(world_size, world_size, -1)[:, rank]
    names = lambda rows: rows[:, 0].long().tolist()
    with counted() as uncounted, watched() as seen:
        got, told = named("rows", "the table")(there(rows, own, axis), "`there`").values()
        told = _tensor(told)
        assert told.tolist() == table.tolist(), (
            f"{who}: your table of counts is {told.tolist()}, but {table.tolist()} rows come"
        )
        assert names(got) == names(come), f"{who}: rows {names(come)} should arrive, got {names(got)}"
        again = returned(back(made, told, own, axis), "back")
        assert names(again) == names(home), (
            f"{who}: its own rows should come home, in their order; got {names(again)}"
        )
    assert all(map(torch.equal, (*before, told.long()), (*kept, table))), f"{who}: {CHANGED}"
    assert ("gather_objects", axis.name) not in comm.traffic(), (
        "rows and counts are tensors: send them by all_to_all, where bytes are counted"
    )
    moved, each = sent(), table.size(1)
    away = (come[:, 0] // 100 != rank).sum() + (rows[:, 0] // 10 % 10 // each != rank).sum()
    out, numbers = int(away) * width * 8, 8 * (own.numel() - each)
    said = f"{who} sent {moved} bytes; the rows that have to travel are {out} bytes, and counts, told once, {numbers}"
    sums, gathered = 8 * (world_size - 1), 8 * own.numel() * (world_size - 1)
    assert moved <= out + numbers + sums or moved == out + gathered, said
    assert moved >= out, f"{said}. Did rows travel uncounted, or with fewer digits?"
    for way, y, right, x in (("there", got, come, given[0]), ("back", again, home, given[1])):
        for row, all_of_it in zip(y, right, strict=True):
            assert torch.equal(row, all_of_it), (
                f"{who}: row {abs(row[0]):g} comes {way} with its name only, and not with all that was in it"
            )
        assert not no_gradient(y, x), (
            f"{who}: no right gradient comes through `{way}`, so experts cannot be trained"
        )
    return Seen(seen.sent, seen.asked), uncounted


GRADIENTS = "the gradient of the rows", "the gradient of the weights (a row times its token's gradient)"


def _rows_of(token: list[int], width: int) -> tuple:
    """A gradient of each token, rows and weights that go to these tokens."""
    n = len(token)
    return *randoms(1, (max(token) + 1, width), (n, width), (n,)), torch.tensor(token)


def _by_autograd(grad, rows, weights, token) -> dict:
    y = torch.zeros_like(grad).index_add(0, token, rows.requires_grad_() * weights.requires_grad_()[:, None])
    return dict(zip(GRADIENTS, torch.autograd.grad(y, (rows, weights), grad), strict=True))


combine_backward = Task(
    _by_autograd,
    shown={"six rows of three features": _rows_of([2, 0, 3, 0, 2, 2], 3)},
    what="other rows",
    drawn=lambda chance: _rows_of(chance.choices(range(6), k=chance.randint(1, 9)), chance.randint(1, 7)),
    call=without_autograd,
    like=named(*GRADIENTS),
    count=5,
)
"""Exercise: gradients of rows and weights, given that of y[token] += weight * row."""


def traffic(answer) -> None:
    """Exercise: bytes that each rank sends in a forward and a backward of one mixture, counted on four live ranks."""
    found = live(_counted, ranks=4)
    rows = [row for row, _ in found]
    for rank, (_, moved) in enumerate(found):
        got = _predicted(answer, rows, rank, 24, 8, 8)
        n, stay = 24 * 8, rows[rank][rank]  # bytes of a row, rows that stay at home
        travel = _away(rows, rank)
        refuse(
            f"rank {rank}, {got} bytes",
            {
                "this is the forward alone: gradients travel the same ways back": got == moved - travel * n,
                "this also counts rows whose expert is at home": got == moved + 4 * stay * n,
                "this leaves out the counts, which travel first: 6 numbers of 8 bytes": got == moved - 8 * 6,
                f"{got - moved + 48} bytes of it are counts, and one number of 8 bytes travels for each of the 6 "
                "experts of other ranks": 0 < got - moved + 48 <= 96 and got != moved,
            },
        )
        close(
            got, moved, f"rank {rank} with rows {rows}, width 24, 8 experts, 8 bytes a number: counted bytes"
        )
    rows = [[5, 1, 2], [3, 7, 4], [6, 8, 9]]  # not run: four ranks have just shown the formula to be right
    for rank, travel in enumerate((3 + 9, 7 + 9, 14 + 6)):
        words = "width 10, 12 experts, 2 bytes a number (and still 8 a count)"
        got = _predicted(answer, rows, rank, 10, 12, 2)
        close(got, 2 * travel * 10 * 2 + 8 * 8, f"rank {rank} of three, {words}")
    by_chance(lambda chance: _drawn_traffic(answer, chance))


def _away(rows: list[list[int]], rank: int) -> int:
    """Rows that a rank sends to others' experts, and back from its own."""
    return sum(rows[rank]) + sum(row[rank] for row in rows) - 2 * rows[rank][rank]


def _drawn_traffic(answer, chance) -> None:
    n, each, width, element = (chance.randint(1, 9) for _ in range(4))
    rank, rows = chance.randrange(n), [[chance.randint(0, 9) for _ in range(n)] for _ in range(n)]
    got = _predicted(answer, rows, rank, width, n * each, element)
    words = f"rank {rank} with rows {rows}, width {width}, {n * each} experts, {element} bytes a number"
    close(got, 2 * _away(rows, rank) * width * element + 8 * (n - 1) * each, words)


def _predicted(answer, rows, rank: int, *sizes: int):
    case, mine = f"rank {rank} of {len(rows)}", deepcopy(rows)
    got = returned(called(answer, (mine, rank, *sizes), case, (PACKAGE,)))
    assert mine == rows, f"{case}: {CHANGED}"
    return got


def _counted(rank, world_size):
    from dataclasses import replace

    from ...experts.mixture import mixtures
    from ...reference import EXPERTS, example_batch
    from ...train import Trainer
    from ..labs.instruments import built

    config = replace(EXPERTS, n_layer=2)
    parallel = built(f"dp={world_size},ep={world_size}", config)
    comm.clear_log()
    Trainer(parallel).gradients(example_batch(config, 7, 11))
    moved = sum(event.bytes for event in comm.log if event.axis == "ep")
    return mixtures(parallel.model)[0].kept.view(world_size, -1).sum(1).tolist(), moved


ASKED = ((240, 24, 60, 36, 36, 24, 12, 48), (120, 36, 96, 12, 24, 60, 48, 24), (60, 120, 24, 48, 72, 12, 36, 24),
         (84, 36, 108, 24, 12, 48, 24, 72))  # fmt: skip
"""The puzzle: rows of each of four ranks for each of eight experts."""

SLOTS, BAR, BEST = 3, 900, 818
"""Experts for which a rank has room, the bar, and the least of all places of three experts on each of four ranks."""


def placed(answer) -> str:
    """Exercise: the experts of each of four ranks, with room for copies; the score is the time of the layer."""
    ranks = listed(returned(answer()))
    assert len(ranks) == len(ASKED) and all(isinstance(held, list) for held in ranks), (
        f"return four lists of experts, one a rank, not {ranks!r}"
    )
    for rank, held in enumerate(ranks):
        strange = [e for e in held if not isinstance(e, Integral) or e not in range(len(ASKED[0]))]
        assert not strange, f"rank {rank}: {strange[0]!r} is none of the experts 0 to {len(ASKED[0]) - 1}"
        assert len(held) <= SLOTS, f"rank {rank} has room for {SLOTS} experts, and you give it {len(held)}"
        twice = [e for e in held if held.count(e) > 1]
        assert not twice, f"expert {twice[0]} is twice on rank {rank}: one copy would do"
    missing = set(range(len(ASKED[0]))).difference(*ranks)
    assert not missing, f"expert {min(missing)} is on no rank: where do its rows go?"
    return scored(time_of_layer(ranks), "units of time", bar=BAR, best=BEST)


def time_of_layer(ranks) -> float:
    """A unit for each row that the busiest rank computes, and two, there and back, for each that its link carries.

    A row stays where its expert is at home; else the rows of a rank are shared out evenly among the expert's copies.
    """
    rows = routes(ranks)
    computed = [sum(column) for column in zip(*rows, strict=True)]
    # A link carries both ways at once.
    links = [max(sum(rows[r]) - rows[r][r], computed[r] - rows[r][r]) for r in range(len(rows))]
    return max(computed) + 2 * max(links)


def routes(ranks) -> list[list[float]]:
    """[i][j]: how many rows of rank i are computed on rank j."""
    rows = [[0.0] * len(ranks) for _ in ranks]
    for i, asked in enumerate(ASKED):
        for expert, count in enumerate(asked):
            homes = [i] if expert in ranks[i] else [r for r, held in enumerate(ranks) if expert in held]
            for j in homes:
                rows[i][j] += count / len(homes)
    return rows
