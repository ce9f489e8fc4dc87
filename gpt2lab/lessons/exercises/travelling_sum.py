"""Checker of lesson 06: a sum that travels around a ring while each rank computes the next term."""

import torch

from ...ranks import comm
from ...ranks.mesh import Mesh
from . import close, live, ranked, returned, unaided
from .watching import noted

TOKENS = 4, 3, 3


def travelling_sum(answer) -> None:
    """Exercise: the sums over three ranks of 4, 3 and 3 tokens travel around a ring while the next terms are made."""
    terms = [[_term(rank, place) for rank in range(3)] for place in range(3)]
    found = live(_sum_on_a_rank, unaided(answer, "gpt2lab.lessons.labs"), ranks=3, what="three live ranks")
    for rank, (got, asked, started, sent) in enumerate(found):
        assert started, (
            f"rank {rank} makes all terms, then sums: keep the sum so far and send it around the ring"
        )
        places = [place for place, _ in asked]
        assert len(set(places)) == len(places), f"rank {rank} computes a term twice, of places {places}"
        lost = {0, 1, 2} - set(places)
        assert not lost, f"rank {rank} never asked for the term of place {lost.pop()}"
        close(got, sum(terms[rank]), f"the sum at rank {rank}'s place")
        alone = [place for place, under_way in asked[1:] if not under_way]
        assert not alone, (
            f"rank {rank}: no message was on its way while it computed the term of place {alone[0]}"
        )
        assert sent == 16 * (10 - TOKENS[rank]), f"rank {rank} sent {sent} bytes, more than the others' sums"


def _term(rank: int, place: int):
    chance = torch.Generator().manual_seed(3 * rank + place)
    return torch.randn(TOKENS[place], 2, generator=chance, dtype=torch.float64)


def _sum_on_a_rank(rank, world_size, answer):
    """The sum, the places asked for and whether messages were under way then, how many began, and bytes sent."""
    asked, started, waited = [], [], []

    def term(place):
        asked.append((place, len(started) > len(waited)))
        return _term(rank, place)

    comm.clear_log()
    with noted(comm, "isend", started), noted(comm, "irecv", started), noted(comm.Handle, "wait", waited):
        found = returned(answer(term, Mesh(tp=world_size)["tp"], TOKENS))
    return found, asked, len(started), ranked.sent()
