"""Checker of lesson 06: a sum that travels around a ring while each rank computes the next term."""

from ...ranks import comm
from . import returned, unaided
from .differences import randoms
from .ranked import ranked, sent
from .watching import noted, watched


def _term(rank: int, place: int, tokens, seed: int):
    return randoms(3 * rank + place + 100 * seed, (tokens[place], 2))[0]


def _travelled(rank: int, tokens, seed: int = 0) -> tuple:
    ranks, others = range(len(tokens)), sum(tokens) - tokens[rank]
    return True, [*ranks], sum(_term(r, rank, tokens, seed) for r in ranks), [], 1, 16 * others


def _sum_on_a_rank(axis, answer, tokens, seed: int = 0) -> tuple:
    asked, started, waited = [], [], []

    def term(place):
        asked.append((place, len(started) > len(waited)))
        return _term(axis.rank, place, tokens, seed)

    begun = noted(comm, "isend", started), noted(comm, "irecv", started), noted(comm.Handle, "wait", waited)
    with begun[0], begun[1], begun[2], watched() as seen:
        found = returned(unaided(answer, "gpt2lab.lessons.labs")(term, axis, tokens))
    alone = [place for place, under_way in asked[1:] if not under_way]
    places, to = sorted(place for place, _ in asked), {to for to, _ in seen.sent}
    return bool(started), places, found, alone, len(to), sent()


travelling_sum = ranked(
    (
        "whether messages of its own carry a sum around the ring",
        "the places whose terms it makes, each once,",
        "the sum at its place",
        "places whose term it makes while no message is on its way",
        "neighbours that it sends to",
        "bytes sent, the sums at the others' places,",
    ),
    _travelled,
    _sum_on_a_rank,
    lambda tokens, *_: len(tokens),
    shown={"three live ranks": ((4, 3, 3),)},
    what="live ranks of {0} tokens",
    drawn=lambda chance: (tuple(chance.choices(range(1, 9), k=4)), chance.randrange(1, 999)),
    count=1,
)
"""Exercise: the sums over ranks, of each place's tokens, travel around a ring while the next terms are made."""
