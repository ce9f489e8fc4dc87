"""Every strategy trains over messages as strict as NCCL's: without a GPU this is what can be known of its deadlocks."""

import pytest
import torch
from planting import is_noticed
from strict import strict

from gpt2lab import RankFailed, Ranks
from gpt2lab.compositions import ALL, PAIRS, TRIPLES, WITH_EXPERTS
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

TINY = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8, window=3)
PLANS = (
    "dp=2,data=servers",
    "cp=2,exchange=ring,layout=zigzag",
    "cp=2,exchange=halo-kv",
    "pp=2,micro=3",
    "pp=2,micro=3,schedule=zb_h1",
    "pp=3,micro=4,schedule=interleaved",
    "pp=2,micro=2,schedule=chimera",
    "pp=2,micro=2,schedule=terapipe",
    "pp=2,schedule=pipedream",
)
SLOW = (*PAIRS, *WITH_EXPERTS, *TRIPLES, *ALL)


@pytest.mark.parametrize("plan", PLANS)
def test_strict_messages_arrive(pools, plan):
    config = TINY if "schedule" not in plan else GPT2Config(37, 16, 6, 2, 8)
    assert not is_noticed(pools[Plan.parse(plan).world], strict, plan, config)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("composition", SLOW, ids=lambda c: f"{c.plan} {c.router}")
def test_strict_messages_of_every_composition_arrive(pools, composition):
    plan = Plan.parse(composition.plan)
    assert not is_noticed(pools[plan.world], strict, plan, composition.config)


def receive_and_send(rank, world_size, apart):
    """What every pipeline does: the receive is posted first, on both ranks; then also in a circle of three."""
    with strict(apart):
        axis = Mesh(dp=world_size)["dp"]
        for by in (1, -1):
            coming = comm.irecv(torch.empty(1), axis, (rank - by) % world_size)
            going = comm.isend(torch.tensor([float(rank)]), axis, (rank + by) % world_size)
            assert coming.wait().item() == (rank - by) % world_size
            going.wait()
    return True


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_ranks_that_both_receive_first_go_on(ranks, pools):
    assert pools[ranks].run(receive_and_send, True) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_mutant_with_one_queue_for_both_directions_waits_forever(ranks):
    with Ranks(ranks, echo=False, timeout=1.5) as own, pytest.raises(RankFailed) as failed:
        own.run(receive_and_send, False)
    assert failed.value.ename in ("Deadlock", "TimeoutError")
