"""What splitting a sequence costs each rank: work of every kernel, bytes and messages, memory. Exact, by formula.

Plain Python. Pairs are (query, key) pairs for one head and one row of the batch; a *row* of traffic is one token's q
(or k, or v) of one layer: B C numbers.
"""

from fractions import Fraction

from ...machine.arguments import checked
from ...ranks.traffic import all_gather_cost, all_reduce_cost, reduce_scatter_cost, split_sizes
from .layouts import TokenLayout, loans, seen
from .paths import reach, ring_path

KERNELS = {
    "forward": lambda t, total: t + 1,
    "dQ": lambda t, total: t + 1,
    "dK,dV by query": lambda t, total: t + 1,
    "dK,dV by key": lambda t, total: total - t,
    "softmax backward": lambda t, total: (t + 1) ** 2,
    "MLP": lambda t, total: 1,
}
"""Work of token t in a sequence of `total`, per kernel. Whose token the work belongs to decides the balance: dK, dV
can be summed up by the owner of the query or by that of the key; llm.c's softmax backward is quadratic in a row."""


def work(table: TokenLayout, kernel: str) -> list[int]:
    """The work of every rank in one kernel, counted token by token."""
    cost = KERNELS[kernel]
    return [sum(cost(t, table.tokens) for t in mine) for mine in table.positions]


def imbalance(loads) -> Fraction:
    """The busiest rank's load over the mean: 1 is balanced, and the step takes this many times as long as it could."""
    return Fraction(max(loads) * len(loads), sum(loads))


@checked(rank=0, window=0)
def pairs(table: TokenLayout, rank: int, window: int | None = None) -> int:
    """How many (query, key) pairs attention really needs on a rank: row t has t + 1 of them, or window + 1 at most."""
    longest = table.tokens if window is None else window + 1
    return sum(min(t + 1, longest) for t in table.positions[rank])


@checked(rank=0, numbers=0, window=0)
def sent(
    exchange: str, table: TokenLayout, rank: int, numbers: int, window: int | None = None
) -> dict[str, tuple]:
    """What a rank sends in one layer: {"forward": (numbers, messages), "backward": (numbers, messages)}.

    `numbers` = B C counts one row; times 4 these are bytes of float32. Messages are those of the bandwidth-optimal
    algorithm: N-1 for a gather or a reduce-scatter, 2 (N-1) for an all-reduce, one for each send, or part of an
    all-to-all that is not empty.
    """
    rows = {"qkv": 3, "halo-x": 1}.get("-".join(exchange.split("-")[:2]), 2) * numbers
    n, c, total = table.ranks, table.sizes, table.tokens
    if exchange == "heads":
        own, rest = numbers * c[rank] * (n - 1) // n, numbers * (total - c[rank]) // n
        parts = (n - 1) * (c[rank] > 0) + sum(size > 0 for r, size in enumerate(c) if r != rank)
        return {"forward": (3 * own + rest, parts), "backward": (own + 3 * rest, parts)}
    if exchange in ("ring", "double-ring"):
        way = ring_path(exchange, n)
        hops, held = reach(table, window, way), [way.source(rank, h) for h in range(n)]
        passed = [c[s] for h, s in enumerate(held) if hops[s] > h]
        returned = [c[s] for h, s in enumerate(held) if hops[s] >= h > 0]
        both = rows * (sum(passed) + sum(returned)), len(passed) + len(returned)
        return {"forward": (rows * sum(passed), len(passed)), "backward": both}
    if exchange in GATHERED:
        chunks = [rows * size for size in c]
        back = all_reduce_cost(split_sizes(sum(chunks), n), rank)
        if exchange == "kv":
            back = reduce_scatter_cost(chunks, rank)
        elif exchange == "kv-roots":  # its groups are fixed, so a window spares nothing
            sliced = table.name in ("contiguous", "unequal")
            back = (sum(chunks[:rank]), rank) if sliced else (sum(chunks) - chunks[rank], n - 1)
        return {"forward": all_gather_cost(chunks, rank), "backward": back}
    deals = loans_of(exchange)(table, window)
    lent = lambda side, r: [rows * (a.stop - a.start) for a in deals if getattr(a, side) == r]
    found = {}
    for way, side in ("forward", "source"), ("backward", "target"):
        found[way] = sum(lent(side, rank)), len(lent(side, rank))
        if exchange.endswith("-allgather"):  # all loans to all ranks
            found[way] = all_gather_cost([sum(lent(side, r)) for r in range(n)], rank)
    return found


GATHERED = ("qkv", "kv", "kv-allreduce", "kv-roots")  # all rows to all ranks


def loans_of(exchange: str):
    """The table of loans of an exchange that lends only what is needed. Raises ValueError for one that does not."""
    if exchange == "triangle":
        return seen
    if exchange.startswith("halo-"):
        return loans
    raise ValueError(
        f"there is no formula for an exchange called {exchange!r}. Use a name of parallel/context."
    )


@checked(tokens=1, ranks=2)
def break_even_window(tokens: int, ranks: int) -> Fraction:
    """The halo width up to which exchanging the input's halo on both sides sends less than exchanging heads.

    Heads send 4 (N-1)/N^2 T C numbers a layer and rank, halos 2 w C: equal at w = 2 (N-1) T / N^2.
    """
    return Fraction(2 * (ranks - 1) * tokens, ranks * ranks)


def activations(config, rows: int, table: TokenLayout, rank: int, gathered: int = 3) -> dict[str, int]:
    """llm.c's 23 activation tensors, in numbers, on one rank: a factor T becomes the rank's own tokens.

    Except: of q, k, v the `gathered` ones (3 in the source, 2 for k and v alone, 0 in a ring) stay as long as the
    sequence, and the rows of preatt and att are the rank's own while their columns are those of all ranks.
    """
    layers, c, heads, v = config.n_layer, config.n_embd, config.n_head, config.vocab_size
    own, total = rows * len(table.positions[rank]), table.tokens
    every = rows * total
    per_token = {"encoded": c, "lnf": c, "lnf_mean": 1, "lnf_rstd": 1, "logits": v, "probs": v, "losses": 1}
    means = ("ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd")
    widths = dict.fromkeys(("ln1", "atty", "attproj", "residual2", "ln2", "fcproj", "residual3"), c)
    per_layer = dict.fromkeys(means, 1) | widths | {"fch": 4 * c, "fch_gelu": 4 * c}
    found = {name: own * size for name, size in per_token.items()}
    found |= {name: layers * own * size for name, size in per_layer.items()}
    found["qkv"] = layers * c * (gathered * every + (3 - gathered) * own)
    found["preatt"] = found["att"] = layers * heads * own * total
    return found


def kept_numbers(config, rows: int, table: TokenLayout, rank: int, exchange: str) -> int:
    """How many numbers one block of *our* model keeps on a rank between forward and backward.

    For each own token 12 C + 4 outside of attention, C for its output and H for its log-sum-exps; then q, k, v: the
    own ones, and a copy of all keys and values (gathered), of those that are needed (triangle, halo), or none (ring).
    With halo-x the layer's input and q, k, v are longer by the halo. Raises ValueError for an unknown exchange.
    """
    c, heads, n = config.n_embd, config.n_head, table.ranks
    own, every = rows * len(table.positions[rank]), rows * table.tokens
    base = own * (12 * c + 4)
    if exchange == "heads":
        return base + own * c + every * (4 * c + heads) // n
    if exchange == "qkv":
        return base + own * (3 * c + heads) + every * 3 * c
    if exchange in ("ring", "double-ring"):
        return base + own * (4 * c + heads)
    borrowed = every - own
    if exchange not in GATHERED:
        deals = loans_of(exchange)(table, config.window)
        borrowed = rows * sum(a.stop - a.start for a in deals if a.target == rank)
    kept = borrowed * 4 * c if exchange.startswith("halo-x") else (own + borrowed) * 2 * c
    return base + own * (4 * c + heads) + kept
