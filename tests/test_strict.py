"""Every strategy trains over messages as strict as NCCL's: without a GPU this is what can be known of its deadlocks."""

import pytest
import torch
import torch.distributed as dist
from planting import is_noticed, planted
from strict import Race, strict

from gpt2lab import RankFailed, Ranks
from gpt2lab.compositions import ALL, PAIRS, TRIPLES, WITH_EXPERTS, WITHOUT_FLUSH
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.transport.engine import ProgressEngine

pytestmark = pytest.mark.live

TINY = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8, window=3)
PLANS = (
    "dp=2", "dp=2,zero=3", "dp=2,data=servers", "tp=2,sp=on", "cp=2,exchange=ring,layout=zigzag",
    "cp=2,exchange=halo-kv", "pp=2,micro=3", "pp=2,micro=3,schedule=zb_h1",
    "pp=3,micro=4,schedule=interleaved", "pp=2,micro=2,schedule=chimera", "pp=2,micro=2,schedule=terapipe",
    "pp=2,schedule=pipedream",
)  # fmt: skip
SOME = (PAIRS[3], PAIRS[6], PAIRS[14], PAIRS[20], WITH_EXPERTS[6], WITHOUT_FLUSH[4])
SLOW = tuple(c for c in (*PAIRS, *WITH_EXPERTS, *TRIPLES, *ALL, *WITHOUT_FLUSH) if c not in SOME)


def arrive(pools, plan: Plan, config) -> bool:
    """Whether a plan's gradients, and its first updates, are right over strict messages; later ones send the same."""
    return not is_noticed(pools[plan.world], strict, plan, config, depths=("steps",))


@pytest.mark.parametrize("plan", PLANS)
def test_strict_messages_arrive(pools, plan):
    config = TINY if "schedule" not in plan else GPT2Config(37, 16, 6, 2, 8)
    assert arrive(pools, Plan.parse(plan), config)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "composition",
    [*SOME, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)],
    ids=lambda c: f"{c.plan} {c.router}",
)
def test_strict_messages_of_every_composition_arrive(pools, composition):
    assert arrive(pools, Plan.parse(composition.plan), composition.config)


def a_wait_that_is_late(rank, world_size):
    """Rank 1 sends when rank 0 has waited and gone on; then what an operation says that comes before the wait."""
    with strict() as order:
        axis, store = Mesh(dp=world_size)["dp"], dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["went on"])
            comm.isend(torch.tensor([7.0]), axis, 0).wait()
            return True
        found = comm.irecv(torch.empty(1), axis, 1).wait()
        assert [call.waited for call in order.calls if "receive" in call.name][-1:] == [True]
        store.set("went on", "")
        return (found + 1).item() == 8


def test_a_wait_does_not_block_the_host_but_orders_what_comes_later(pools):
    assert pools[2].run(a_wait_that_is_late) == [True, True]


def too_early(rank, world_size, what):
    """What an operation says that does not wait for a call."""
    with strict():
        axis, x = Mesh(dp=world_size)["dp"], torch.ones(3)
        summed = comm.all_reduce(x, axis, async_op=True)
        try:
            if what == "read":
                summed._result + 1
            else:  # `own`: the result is x itself
                own = comm.all_reduce(x, axis, async_op=True, own=True)
                x.zero_()
        except Race as race:
            return str(race)
        finally:
            summed.wait()
            if what == "written":
                own.wait()


@pytest.mark.parametrize("what", ["read", "written"])
def test_mutant_that_does_not_wait_is_named(what, pools):
    for said in pools[2].run(too_early, what):
        assert "touches the memory of all_reduce, which nobody has waited for" in said


def objects_beside_a_sum(rank, world_size):
    """Nobody drives the transport but who waits: rank 0 moves the sum, which is under way, while it gathers objects."""
    with planted(ProgressEngine, "_serve", lambda _: lambda engine: None), strict():
        axis, store = Mesh(dp=world_size)["dp"], dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["rank 0 gathers"])
        found = comm.all_reduce(torch.ones(3), axis, async_op=True, own=True).wait()
        store.set("rank 0 gathers", "")
        return comm.gather_objects(rank, axis), found.sum().item()


def test_a_call_of_objects_moves_the_tensors_of_others():
    with Ranks(2, echo=False, timeout=10) as own:
        assert own.run(objects_beside_a_sum) == [([0, 1], 6.0)] * 2


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
