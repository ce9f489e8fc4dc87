"""Checker of lesson 06: a sum that travels around a ring while each rank computes the next term."""

from unittest.mock import patch

import torch

from . import close, live, returned

TOKENS = 4, 3, 3


def travelling_sum(answer) -> None:
    """Exercise: the sums over three ranks of 4, 3 and 3 tokens travel around a ring while the next terms are made."""
    terms = [[_term(rank, place) for rank in range(3)] for place in range(3)]
    for rank, (got, asked, posted, sent) in enumerate(
        live(_sum_on_a_rank, answer, ranks=3, what="three live ranks")
    ):
        assert posted, (
            f"rank {rank} makes all terms and then sums them: keep the sum so far and send it around the ring"
        )
        places = [place for place, _ in asked]
        assert len(set(places)) == len(places), f"rank {rank} computes a term twice, of places {places}"
        assert len(places) == 3, (
            f"rank {rank} never asked for the term of place {({0, 1, 2} - set(places)).pop()}"
        )
        close(got, sum(terms[rank]), f"the sum at rank {rank}'s place")
        alone = [place for place, under_way in asked[1:] if not under_way]
        assert not alone, (
            f"rank {rank}: no message was on its way while the term of place {alone[0]} was computed"
        )
        assert sent == 16 * (10 - TOKENS[rank]), f"rank {rank} sent {sent} bytes, more than the others' sums"


def _term(rank: int, place: int):
    chance = torch.Generator().manual_seed(3 * rank + place)
    return torch.randn(TOKENS[place], 2, generator=chance, dtype=torch.float64)


def _sum_on_a_rank(rank, world_size, answer):
    """The sum, the places asked for and whether a message was coming then, how many were asked for, and bytes sent."""
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    asked, posted, coming, irecv, wait = [], [], set(), comm.irecv, comm.Handle.wait

    def term(place):
        asked.append((place, bool(coming)))
        return _term(rank, place)

    def post(*given):
        posted.append(irecv(*given))
        coming.add(posted[-1])
        return posted[-1]

    def awaited(handle):
        coming.discard(handle)
        return wait(handle)

    comm.clear_log()
    with patch.object(comm, "irecv", post), patch.object(comm.Handle, "wait", awaited):
        found = returned(answer(term, Mesh(tp=world_size)["tp"], TOKENS))
    return found, asked, len(posted), sum(size for _, size, _ in comm.traffic().values())
