"""What splitting a sequence costs each rank: work of every kernel, bytes and messages, memory. Exact, by formula.

Plain Python. Pairs are (query, key) pairs for one head and one row of the batch; a *row* of traffic is one token's q
(or k, or v) of one layer: B C numbers.
"""

from fractions import Fraction

from ...machine.arguments import checked
from .layouts import TokenLayout, bounds, contributors, lenders, loans, widths
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


def _even(total: int, parts: int) -> list[int]:
    ends = bounds(total, parts)
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


@checked(rank=0, numbers=0, window=0)
def sent(
    exchange: str, table: TokenLayout, rank: int, numbers: int, window: int | None = None
) -> dict[str, tuple]:
    """What a rank sends in one layer: {"forward": (numbers, messages), "backward": (numbers, messages)}.

    `numbers` = B C counts one row; times 4 these are bytes of float32. Messages are those of the bandwidth-optimal
    algorithm: N-1 for a gather or a reduce-scatter, 2 (N-1) for an all-reduce, one for each send.
    """
    rows = {"qkv": 3, "halo-x": 1}.get("-".join(exchange.split("-")[:2]), 2)
    if exchange.startswith("halo"):
        return _sent_halo(exchange, table, rank, rows * numbers, window)
    n, c, total = table.ranks, table.sizes, table.tokens
    after = c[(rank + 1) % n]
    gathered = rows * numbers * (total - after), n - 1
    chunks = _even(rows * numbers * total, n)
    borrowers = [r for r in contributors(table, rank, window) if r != rank]
    others = [s for s in lenders(table, window)[rank] if s != rank]
    back = rows * numbers * sum(c[s] for s in others), len(others)
    if exchange in ("qkv", "kv-allreduce"):
        size = 2 * sum(chunks) - chunks[rank] - chunks[(rank + 1) % n]
        return {"forward": gathered, "backward": (size, 2 * (n - 1))}
    if exchange == "kv":
        return {"forward": gathered, "backward": (rows * numbers * (total - c[rank]), n - 1)}
    if exchange == "kv-roots":  # its groups are fixed, so a window spares nothing
        roots = range(rank) if table.name in ("contiguous", "unequal") else [s for s in range(n) if s != rank]
        return {"forward": gathered, "backward": (rows * numbers * sum(c[s] for s in roots), len(roots))}
    if exchange == "triangle":
        lent = rows * numbers * c[rank] * len(borrowers), len(borrowers)
        return {"forward": lent, "backward": back}
    if exchange in ("ring", "double-ring"):
        way = ring_path(exchange, n)
        hops, held = reach(table, window, way), [way.source(rank, h) for h in range(n)]
        passed = [c[s] for h, s in enumerate(held) if hops[s] > h]
        returned = [c[s] for h, s in enumerate(held) if hops[s] >= h > 0]
        both = rows * numbers * (sum(passed) + sum(returned)), len(passed) + len(returned)
        return {"forward": (rows * numbers * sum(passed), len(passed)), "backward": both}
    if exchange == "heads":
        own, rest = numbers * c[rank] * (n - 1) // n, numbers * (total - c[rank]) // n
        return {"forward": (3 * own + rest, 2 * (n - 1)), "backward": (own + 3 * rest, 2 * (n - 1))}
    raise _unknown(exchange)


def _unknown(exchange: str) -> ValueError:
    return ValueError(
        f"there is no formula for an exchange called {exchange!r}. Use a name of parallel/context."
    )


def _sent_halo(exchange, table, rank, numbers, window):
    """Loans from this rank forward, loans to it backward; the all-gather also passes on those of other ranks."""
    n, deals = table.ranks, loans(table, window)
    out, into = (
        [a.stop - a.start for a in deals if getattr(a, side) == rank] for side in ("source", "target")
    )
    if exchange.endswith("allgather"):
        return {
            "forward": _gathered(deals, "source", rank, n, numbers),
            "backward": _gathered(deals, "target", rank, n, numbers),
        }
    return {"forward": (numbers * sum(out), len(out)), "backward": (numbers * sum(into), len(into))}


def _gathered(deals, side, rank, n, numbers):
    sizes = [sum(a.stop - a.start for a in deals if getattr(a, side) == r) for r in range(n)]
    return numbers * (sum(sizes) - sizes[(rank + 1) % n]), n - 1


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
    halo = rows * widths(table, rank, config.window)[0] if exchange.startswith("halo") else 0
    if exchange.startswith("halo-x"):
        return base + own * (4 * c + heads) + halo * 4 * c
    if exchange.startswith("halo-kv"):
        borrowed = own + halo
    elif exchange == "triangle":
        borrowed = rows * len(table.chunks({*lenders(table, config.window)[rank], rank}))
    elif exchange in ("kv", "kv-allreduce", "kv-roots"):
        borrowed = every
    elif exchange in ("ring", "double-ring"):
        borrowed = 0
    else:
        raise _unknown(exchange)
    return base + own * (4 * c + heads) + borrowed * 2 * c
